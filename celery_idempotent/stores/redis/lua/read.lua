-- Reply with the server's time and the record KEYS[1] as it is, so that what remains of a lease is told by the server's clock.
local clock = redis.call('TIME')
return {clock[1] * 1000000 + clock[2], redis.call('HGETALL', KEYS[1])}
