-- Read the history of a key. Reply: the server's time, and its lines.
local list = KEYS[1]

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
return {now, redis.call('LRANGE', list, 0, -1)}
