-- Take the lease on a key, or reply why not: rules.acquire in Python, case by case and in its order.
-- Reply: verdict, server's time, fence, crashes, whether the lease was taken over, and what was
-- read of the record (records.ANSWERED); where that is no record of this version, all of it.
-- Of the marks of tasks, only the claimer's own are read: those of others must cost no claim
-- anything, however many there are.
local key = KEYS[1]
local owner = ARGV[1]
local task = ARGV[2]
local announcer = ARGV[3]
local mark = ARGV[4] -- attempt and copy in fixed width, which are ordered as text
local token = ARGV[5]
local is_copy = ARGV[6] == '1'
local sender = ARGV[7]
local fingerprint = ARGV[8]
local max_crashes = tonumber(ARGV[9])
local lease_ms = ARGV[10]
local keep_ms = ARGV[11]
local holder = ARGV[12]
local attempt = ARGV[13] -- empty for a first attempt
local WAITING = 'waiting:' .. task
local ATTEMPT = 'attempt:' .. task
local MOST_WAITING = 1000 -- these two as in rules.py
local MOST_MARKS = 1100
local LAST_NESTING = '999999' -- RETRIES_LIMIT - 1 in records.py

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local ends = string.format('%.0f', now + lease_ms * 1000)
local size = redis.call('HLEN', key)

-- Takes the lease; called once it is decided.
local function grant(fence, crashes, took_over, has_room)
  local new = {'state', 'in_progress', 'owner', owner, 'fence', fence, 'lease_end', ends, 'holder', holder}
  if task ~= '' then
    new[#new + 1] = 'task'
    new[#new + 1] = task
  end
  if fingerprint ~= '' then
    new[#new + 1] = 'args'
    new[#new + 1] = fingerprint
  end
  if attempt ~= '' and has_room then
    new[#new + 1] = ATTEMPT
    new[#new + 1] = attempt
  end
  redis.call('HSET', key, unpack(new))
  redis.call('PEXPIRE', key, lease_ms + keep_ms)
  return {'lease', string.format('%.0f', now), fence, crashes, took_over, {}}
end

-- A new operation.
if size == 0 then
  return grant(string.format('%.0f', now), '0', 0, true)
end

local function read(...)
  return redis.call('HMGET', key, 'state', 'owner', 'fence', 'lease_end', 'not_before', 'crashes',
    'task', 'args', 'reason', 'holder', 'value', 'ended', 'version',
    'announced:' .. announcer, ...)
end
local values = is_copy and read(WAITING, ATTEMPT) or read()
local state, last_owner, fence, lease_end, not_before, crashes = unpack(values, 1, 6)
local last_task, last_fingerprint, reason = unpack(values, 7, 9)
local version = values[13]

local function reply(verdict)
  return {verdict, string.format('%.0f', now), fence or '0', crashes or '0', 0, values}
end

-- No record of this version: a newer one, or garbage.
local function is_whole(number)
  return not number or (#number <= 20 and string.find(number, '^%d+$'))
end
-- What HINCRBY counts on: no zero in front, and not too large.
local function is_count(number)
  return not number or number == '0' or (#number <= 18 and string.find(number, '^[1-9]%d*$'))
end
local running = state == 'in_progress'
local released = state == 'released'
local settled = state == 'completed' or state == 'failed'
local has_state = released or settled or (running and lease_end)
local has_numbers = fence and is_whole(fence) and is_whole(lease_end)
  and is_count(crashes) and is_whole(not_before)
local arrived, last_token = string.match(values[15] or ' ', '^(%S*) (.*)$')
if not (has_state and has_numbers and arrived and not version) then
  values = redis.call('HGETALL', key)
  return reply('unreadable')
end

-- Another task's, with other arguments; what is released takes new ones.
local mine = (last_task or '') == task
local differs = fingerprint ~= '' and (last_fingerprint or fingerprint) ~= fingerprint
if not mine and not released and differs then
  return reply('key_reused')
end

-- Settled.
if settled then
  return reply(state)
end

-- The claimer's own lease: the first reply was lost, perhaps long ago. The lease counts from now.
if running and last_owner == owner then
  redis.call('PEXPIRE', key, lease_ms + keep_ms)
  redis.call('HSET', key, 'lease_end', ends)
  return reply('lease')
end

-- A copy, and a later copy or attempt of its message has arrived.
if is_copy then
  local last_attempt = values[16] or ''
  if mark < last_attempt or mark < arrived or (mark == arrived and token ~= last_token) then
    return reply('superseded')
  end
end

-- It is held, and its holder has not published this message as its retry; or a retry is due
-- before others may run.
local function marks() -- how many marks of tasks the record has
  local count = size
  for place = 1, 13 do
    if values[place] then
      count = count - 1
    end
  end
  return count
end
local handed_over = running and sender ~= '' and sender == last_owner
local held_until = running and not handed_over and lease_end
local due = released and not_before
local busy = now < tonumber(held_until or due or 0)
if busy and released and mine then
  -- A task that was replaced by itself goes on as what is nested at least as deeply as the mark.
  local awaited = redis.call('HGET', key, ATTEMPT) or ''
  busy = string.sub(mark, 1, 6) < string.sub(awaited, 1, 6)
end
if busy then
  -- Published again: its copies count from here, also if what runs has died.
  local nesting, own = string.sub(mark, 1, 6), string.sub(mark, 1, 12)
  local last = not is_copy and redis.call('HGET', key, ATTEMPT) or ''
  if own < last and nesting == string.sub(last, 1, 6) then
    redis.call('HSET', key, ATTEMPT, own)
  end
  -- Of a crowd, so many are distinguished. What claims for a continuation that will not come is no message.
  local has_room = size < MOST_WAITING or marks() < MOST_WAITING or redis.call('HGET', key, WAITING)
  if has_room and nesting ~= LAST_NESTING then
    redis.call('HSET', key, WAITING, mark .. ' ' .. token)
  end
  return reply('conflict')
end

-- The lease ran out: its holder has died, and perhaps so did those before it. A shutdown that was
-- announced is no crash.
local lapsed = running and not handed_over
local died = lapsed and reason ~= 'shutdown'
if died then
  crashes = redis.call('HINCRBY', key, 'crashes', 1)
end
local crashed = died or reason == 'crashed'
local count = tonumber(crashes or 0)
local looping = mine and count >= max_crashes and (crashed or is_copy)
-- Messages of several task ids may take turns.
if looping or (crashed and count >= 2 * max_crashes) then
  -- The task has failed: published again, its message is not one of those that have been superseded.
  redis.call('HDEL', key, 'owner', 'not_before', WAITING, ATTEMPT)
  redis.call('HSET', key, 'state', 'released', 'reason', 'crash_loop')
  values = read()
  return reply('crash_loop')
end

-- A new lease.
size = size - redis.call('HDEL', key, WAITING, ATTEMPT)
redis.call('HDEL', key, 'reason', 'not_before', 'task', 'args')
fence = string.format('%.0f', math.max(now, (fence or 0) + 1))
return grant(fence, crashes or '0', lapsed and 1 or 0, marks() < MOST_MARKS)
