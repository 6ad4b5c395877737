-- Reply with the server's time and the lines of the history KEYS[1].
local clock = redis.call('TIME')
return {clock[1] * 1000000 + clock[2], redis.call('LRANGE', KEYS[1], 0, -1)}
