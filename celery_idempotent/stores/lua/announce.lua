-- Remember in the completed record KEYS[1] that the callbacks of task ARGV[1] were dispatched; replies 0 if there is none.
if redis.call('HGET', KEYS[1], 'state') ~= 'completed' then return 0 end
redis.call('HSET', KEYS[1], 'announced:' .. ARGV[1], 1)
return 1
