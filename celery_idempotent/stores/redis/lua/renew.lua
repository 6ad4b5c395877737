-- Extend the leases on KEYS, and reply with the positions (from 0) of those that are lost (rules.renew in Python).
-- ARGV, eight per key: owner, fence, lease ms, keep ms, holder, task id, fingerprint, attempt
local clock = redis.call('TIME')
local now, lost = clock[1] * 1000000 + clock[2], {}
for i, key in ipairs(KEYS) do
  local owner, fence, lease, keep, holder, task, fingerprint, attempt = unpack(ARGV, 8 * i - 7, 8 * i)
  local r = redis.pcall('HMGET', key, 'state', 'owner', 'fence', 'crashes')
  if r.err and not r.err:find('WRONGTYPE') then return r end -- a right we lack, say; but a key that is no hash is lost
  local gone = not r.err and not r[1] and redis.call('EXISTS', key) == 0
  if gone then -- the server lost its data, and nobody has claimed the key since
    local restored = redis.pcall('HSET', key, 'state', 'in_progress', 'owner', owner, 'fence', fence, 'holder', holder)
    local failed = type(restored) == 'table' and restored.err
    if failed and not failed:find('OOM') then return restored end -- a replica, say, which cannot tell what is lost
    if failed then task, fingerprint, attempt, gone = '', '', '', false end -- no memory: lost
    for field, value in pairs({task = task, fingerprint = fingerprint, ['attempt:' .. task] = attempt}) do
      if value ~= '' then redis.call('HSET', key, field, value) end
    end
  end
  if gone or (r[1] == 'in_progress' and r[2] == owner) then
    redis.call('PEXPIRE', key, lease + keep) -- before HSET, which a full server allows only to a script that has written
    redis.call('HSET', key, 'lease_end', string.format('%.0f', now + lease * 1000))
    -- ten renewals, three to a ttl: a holder that lives this long is no crash loop
    if r[4] and now - r[3] > lease * 1000 * 10 / 3 then redis.call('HDEL', key, 'crashes') end
  else
    lost[#lost + 1] = i - 1
  end
end
return lost
