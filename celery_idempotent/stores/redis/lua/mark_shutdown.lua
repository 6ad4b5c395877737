-- Note that the worker of KEYS[1]'s holder is about to end (rules.mark_shutdown in Python); replies 1, or 0 if it is no
-- more the lease of the owner ARGV[1].
local r = redis.call('HMGET', KEYS[1], 'state', 'owner')
if r[1] ~= 'in_progress' or r[2] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'reason', 'shutdown')
return 1
