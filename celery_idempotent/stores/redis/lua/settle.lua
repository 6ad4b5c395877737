-- Record the outcome under KEYS[1] if the lease is still ours (rules.settle in Python); replies 1, or 0 if it is lost.
-- ARGV: owner, fence, lease ms, keep ms, holder, task id, fingerprint, attempt, state, payload, ttl ms
local owner, fence, state, payload, ttl = ARGV[1], ARGV[2], ARGV[9], ARGV[10], ARGV[11]
local r = redis.call('HMGET', KEYS[1], 'state', 'owner', 'fence')
if r[1] == state and r[3] == fence then return 1 end -- our first reply was lost
local gone = not r[1] and redis.call('EXISTS', KEYS[1]) == 0 -- the server lost its data, and nobody has claimed the key since
if not gone and (r[1] ~= 'in_progress' or r[2] ~= owner) then return 0 end
local ended = string.format('%.0f', redis.call('TIME')[1])
local new = {'state', state, 'fence', r[3] or fence, 'payload', payload, 'ended', ended}
for field, value in pairs({task = ARGV[6], fingerprint = ARGV[7]}) do
  if value ~= '' then new[#new + 1] = field new[#new + 1] = value end
end
redis.call('DEL', KEYS[1]) -- owner, holder and marks have served; and HSET may now write though the server be full
redis.call('HSET', KEYS[1], unpack(new))
redis.call('PEXPIRE', KEYS[1], ttl)
return 1
