-- Remember in a cache that the callbacks of task ARGV[1] were dispatched, beside the outcome KEYS[1] or before it comes.
-- ARGV: task id, ms to keep it where no outcome says how long
redis.call('HSET', KEYS[1], 'announced:' .. ARGV[1], 1)
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
