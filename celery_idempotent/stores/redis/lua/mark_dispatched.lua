-- Remember in a settled record that the callbacks of a task were dispatched: rules.mark_dispatched
-- in Python. The first is kept for good. The ids of the others are in a ring of places besides,
-- where the newest takes the place of the oldest.
-- Reply: 1, or 0 if there is no such record.
local key = KEYS[1]
local task = ARGV[1]
local RING = 249 -- rules.MOST_DISPATCHED but for the first
local mark = 'announced:' .. task
local found = redis.call('HMGET', key, 'state', mark, 'task', 'args')
local state, known, task_id, fingerprint = unpack(found, 1, 4)
if state ~= 'completed' and state ~= 'failed' then
  return 0
end
if known then
  return 1
end
-- So many fields has a record whose callbacks are not marked.
local bare = 4 + (task_id and 1 or 0) + (fingerprint and 1 or 0)
local first = redis.call('HLEN', key) == bare
-- HDEL comes first: a full server allows HSET only to a script that has written.
redis.call('HDEL', key, mark)
redis.call('HSET', key, mark, 1)
if not first then
  local place = 'announcer:' .. redis.call('HINCRBY', key, 'announced', 1) % RING
  local oldest = redis.call('HGET', key, place)
  if oldest then
    redis.call('HDEL', key, 'announced:' .. oldest)
  end
  redis.call('HSET', key, place, task)
end
return 1
