-- Mark that the worker of the holder is about to end: rules.mark_shutdown in Python.
-- Reply: 1, or 0 if it is not the lease of this owner.
local key = KEYS[1]
local owner = ARGV[1]

local found = redis.call('HMGET', key, 'state', 'owner')
local state, last_owner = found[1], found[2]
if state ~= 'in_progress' or last_owner ~= owner then
  return 0
end
-- HDEL comes first: a full server allows HSET only to a script that has written.
redis.call('HDEL', key, 'reason')
redis.call('HSET', key, 'reason', 'shutdown')
return 1
