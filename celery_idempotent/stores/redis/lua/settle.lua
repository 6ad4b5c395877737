-- Record the outcome of a run, if its lease is still the holder's: rules.settle in Python.
-- Reply: 1, or 0 if the lease is lost.
local key = KEYS[1]
local owner = ARGV[1]
local fence = ARGV[2]
-- ARGV[3] to ARGV[5] and ARGV[8] are for renew.lua, which restores lost records.
local task = ARGV[6]
local fingerprint = ARGV[7]
local state = ARGV[9]
local payload = ARGV[10]
local ttl_ms = ARGV[11]

local found = redis.call('HMGET', key, 'state', 'owner', 'fence')
local last_state, last_owner, last_fence = unpack(found, 1, 3)
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- It is settled so already: the first reply was lost.
if last_state == state and last_fence == fence then
  return 1
end

-- Another has it, or had it, unless the server lost its data and the key was not claimed since.
local gone = not last_state and redis.call('EXISTS', key) == 0
local held = last_state == 'in_progress' and last_owner == owner
if last_state and not held and is_outdated(key, fence, now) then
  gone, last_fence = true, nil
end
if not gone and not held then
  return 0
end

-- The outcome. The record is replaced: owner, holder and marks have served, and a full server
-- allows HSET only to a script that has written, as DEL does.
local new = {'state', state, 'fence', last_fence or fence, 'value', payload}
local function set(field, value)
  if value ~= '' then
    new[#new + 1] = field
    new[#new + 1] = value
  end
end
set('ended', string.format('%.0f', clock[1]))
set('task', task)
set('args', fingerprint)
redis.call('DEL', key)
redis.call('HSET', key, unpack(new))
redis.call('PEXPIRE', key, ttl_ms)
return 1
