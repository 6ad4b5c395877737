-- Read a record as it is.
-- Reply: the server's time, by which what remains of a lease is counted, all fields, and for how many ms they are kept.
local key = KEYS[1]

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
return {now, redis.call('HGETALL', key), redis.call('PTTL', key)}
