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

local found = redis.call('HMGET', key, 'state', 'owner', 'fence', 'lease_end')
local last_state, last_owner, last_fence, lease_end = unpack(found, 1, 4)
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- It is settled so already: the first reply was lost.
if last_state == state and last_fence == fence then
  return 1
end

-- Another has it, or had it, unless the server lost its data and the key was not claimed since.
local gone = not last_state and redis.call('EXISTS', key) == 0
-- A record from before the lease, whose own lease is over: the server has lost the later one alone.
local free = last_state == 'released' or (last_state == 'in_progress' and now >= (tonumber(lease_end) or math.huge))
if free and (tonumber(last_fence) or math.huge) < tonumber(fence) then
  gone, last_fence = true, nil
end
if not gone and (last_state ~= 'in_progress' or last_owner ~= owner) then
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
