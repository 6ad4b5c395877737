-- Give a lease back: rules.release in Python.
-- Reply: 1 if it was still the owner's, else 0.
local key = KEYS[1]
local owner = ARGV[1]
local reason = ARGV[2]
local retry_ms = ARGV[3]
local next_attempt = ARGV[4]
local keep_ms = ARGV[5]
local fence = ARGV[6] -- 0 where it is not known
local claimer = ARGV[7] -- the task that claimed it
local mark = ARGV[8] -- the claim's attempt and copy in fixed width, which are ordered as text
local token = ARGV[9]
local MOST_MARKS = 1100 -- as in rules.py

-- Forgets the marks of a task that has ended while it waited, unless a later copy or attempt of it
-- goes on.
local function forget_waiting(running)
  local WAITING = 'waiting:' .. claimer
  local ATTEMPT = 'attempt:' .. claimer
  local marks = redis.call('HMGET', key, WAITING, ATTEMPT, 'task', 'lease_end')
  local arrived = string.match(marks[1] or '', '^%S*')
  if marks[1] and (arrived < mark or marks[1] == mark .. ' ' .. token) then
    redis.call('HDEL', key, WAITING)
  end
  local clock = redis.call('TIME')
  local runs = running and marks[3] == claimer and clock[1] * 1000000 + clock[2] < tonumber(marks[4] or 0)
  if marks[2] and not runs and marks[2] <= string.sub(mark, 1, 12) then
    redis.call('HDEL', key, ATTEMPT)
  end
end

local found = redis.call('HMGET', key, 'state', 'owner', 'task')
local state, last_owner, task = found[1], found[2], found[3] or ''
if not state and redis.call('EXISTS', key) == 0 then
  return 1 -- a key without a record is free already
end
if state and last_owner ~= owner then
  local clock = redis.call('TIME')
  if is_outdated(key, fence, clock[1] * 1000000 + clock[2]) then
    return 1 -- free already
  end
end
local comes_again = reason == 'crashed' or reason == 'shutdown' or reason == 'requeued' or reason == 'retry'
if last_owner ~= owner or (state ~= 'in_progress' and state ~= 'released') then
  if not comes_again then
    forget_waiting(state == 'in_progress')
  end
  return 0
end
if state == 'released' then
  return 1 -- our first reply was lost
end

local ATTEMPT = 'attempt:' .. task
local function marks() -- how many tasks have marks in the record
  local count = redis.call('HLEN', key)
  local fields = redis.call('HMGET', key, 'state', 'owner', 'fence', 'lease_end', 'not_before',
    'crashes', 'task', 'args', 'reason', 'holder')
  for place = 1, 10 do
    if fields[place] then
      count = count - 1
    end
  end
  return count
end

-- HDEL comes first: a full server allows HSET only to a script that has written.
redis.call('HDEL', key, 'holder', 'lease_end')
redis.call('HSET', key, 'state', 'released', 'reason', reason)
if reason == 'crashed' then
  redis.call('HINCRBY', key, 'crashes', 1)
elseif reason ~= 'shutdown' and reason ~= 'revoked' then
  redis.call('HDEL', key, 'crashes')
end
if reason == 'retry' then
  local clock = redis.call('TIME')
  local due = clock[1] * 1000000 + clock[2] + retry_ms * 1000
  redis.call('HSET', key, 'not_before', string.format('%.0f', due))
  if redis.call('HGET', key, ATTEMPT) or marks() < MOST_MARKS then
    redis.call('HSET', key, ATTEMPT, next_attempt)
  end
  redis.call('PEXPIRE', key, keep_ms + retry_ms)
  return 1
end
if not comes_again then
  redis.call('HDEL', key, ATTEMPT)
end
redis.call('PEXPIRE', key, keep_ms)
return 1
