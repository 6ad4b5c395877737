-- Free KEYS[1] if its owner asks (rules.release in Python); replies 1 if the lease was still the owner's, else 0.
-- ARGV: owner, reason, retry in ms, next attempt, keep ms
local r = redis.call('HMGET', KEYS[1], 'state', 'owner', 'task')
if not r[1] and redis.call('EXISTS', KEYS[1]) == 0 then return 1 end -- what nobody knows of is free already
if r[2] ~= ARGV[1] or (r[1] ~= 'in_progress' and r[1] ~= 'released') then return 0 end
if r[1] == 'released' then return 1 end -- our first reply was lost
local reason, attempt, clock = ARGV[2], 'attempt:' .. (r[3] or ''), redis.call('TIME')
redis.call('HDEL', KEYS[1], 'holder', 'lease_end') -- before HSET, which a full server allows only to a script that has written
redis.call('HSET', KEYS[1], 'state', 'released', 'reason', reason)
if reason == 'crashed' then
  redis.call('HINCRBY', KEYS[1], 'crashes', 1)
elseif reason ~= 'shutdown' and reason ~= 'revoked' then
  redis.call('HDEL', KEYS[1], 'crashes')
end
if reason == 'retry' then
  local due = string.format('%.0f', clock[1] * 1000000 + clock[2] + ARGV[3] * 1000)
  redis.call('HSET', KEYS[1], attempt, ARGV[4], 'not_before', due)
elseif reason ~= 'crashed' and reason ~= 'shutdown' and reason ~= 'requeued' then
  redis.call('HDEL', KEYS[1], attempt)
end
redis.call('PEXPIRE', KEYS[1], reason == 'retry' and ARGV[5] + ARGV[3] or ARGV[5])
return 1
