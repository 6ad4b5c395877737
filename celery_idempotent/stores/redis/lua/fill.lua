-- Keep an outcome in a cache under KEYS[1], unless it was deleted or one as late is there; replies 1 if it was written.
-- ARGV: fence, ms to keep it, ms since it was settled, ms until the durable store forgets it, then fields and values
local known, clock = redis.call('HMGET', KEYS[1], 'deleted', 'fence'), redis.call('TIME')
if known[1] or (known[2] and (tonumber(known[2]) or 0) >= tonumber(ARGV[1])) then return 0 end
if known[2] then redis.call('DEL', KEYS[1]) end -- the marks are those of an earlier outcome
local now, int = clock[1] * 1000000 + clock[2], function(n) return string.format('%.0f', n) end
local times = {'ended', int(now - ARGV[3] * 1000), 'expires', int(now + ARGV[4] * 1000)}
redis.call('HSET', KEYS[1], times[1], times[2], times[3], times[4], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
