-- Keep an outcome in a cache, unless it was deleted there, or one as late is there.
-- Reply: 1, or 0 if nothing was written.
local key = KEYS[1]
local fence = ARGV[1]
local keep_ms = ARGV[2]
local age_ms = ARGV[3] -- since it was settled
local rest_ms = ARGV[4] -- until the durable store forgets it
-- ARGV[5] and later: fields and values

local function whole(number)
  return string.format('%.0f', number)
end

local known = redis.call('HMGET', key, 'deleted', 'fence')
local deleted, last_fence = known[1], known[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if deleted or (last_fence and (tonumber(last_fence) or 0) >= tonumber(fence)) then
  return 0
end
if last_fence then
  redis.call('DEL', key) -- its marks are those of an earlier outcome
end
local ended = whole(now - age_ms * 1000)
local expires = whole(now + rest_ms * 1000)
redis.call('HSET', key, 'ended', ended, 'expires', expires, unpack(ARGV, 5))
redis.call('PEXPIRE', key, keep_ms)
return 1
