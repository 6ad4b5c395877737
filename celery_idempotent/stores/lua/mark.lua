-- Remember in a cache that the callbacks of a task were dispatched, beside the outcome or before it comes. The newest
-- are kept: their ids are in a ring of places besides, where one takes the place of the oldest.
local key = KEYS[1]
local task = ARGV[1]
local keep_ms = ARGV[2] -- where no outcome says for how long
local MOST = 250 -- rules.MOST_ANNOUNCED
local mark = 'announced:' .. task
if not redis.call('HGET', key, mark) then
  local place = 'announcer:' .. redis.call('HINCRBY', key, 'announced', 1) % MOST
  local oldest = redis.call('HGET', key, place)
  if oldest then
    redis.call('HDEL', key, 'announced:' .. oldest)
  end
  redis.call('HSET', key, mark, 1, place, task)
end
if redis.call('PTTL', key) < 0 then
  redis.call('PEXPIRE', key, keep_ms)
end
return 1
