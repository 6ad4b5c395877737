-- Remember in a cache that the callbacks of a task were dispatched, beside the outcome or before it
-- comes. As in mark_dispatched.lua the first is kept for good, and of the others the newest.
local key = KEYS[1]
local task = ARGV[1]
local keep_ms = ARGV[2] -- where no outcome has its own
local RING = 249 -- rules.MOST_DISPATCHED but for the first
local mark = 'announced:' .. task
if not redis.call('HGET', key, mark) then
  local number = redis.call('HINCRBY', key, 'announced', 1)
  redis.call('HSET', key, mark, 1)
  if number > 1 then
    local place = 'announcer:' .. number % RING
    local oldest = redis.call('HGET', key, place)
    if oldest then
      redis.call('HDEL', key, 'announced:' .. oldest)
    end
    redis.call('HSET', key, place, task)
  end
end
if redis.call('PTTL', key) < 0 then
  redis.call('PEXPIRE', key, keep_ms)
end
return 1
