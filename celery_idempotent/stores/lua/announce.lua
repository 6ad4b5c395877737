-- Remember in the settled record KEYS[1] that what task ARGV[1] sets off was dispatched; replies 0 if there is none.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'completed' and state ~= 'failed' then return 0 end
redis.call('HSET', KEYS[1], 'announced:' .. ARGV[1], 1)
return 1
