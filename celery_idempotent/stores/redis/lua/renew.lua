-- Extend leases: rules.renew in Python.
-- KEYS: the keys. ARGV, nine for each key: owner, fence, lease ms, keep ms, holder, task,
-- fingerprint, attempt, '1' to restore a record that is gone.
-- Reply: the positions, from 0, of the leases that are lost; and of those that are not held here, and were left as they
-- are, since there are several keys: behind a proxy that distributes keys another server may have them.
local RENEWALS = 10 -- a holder that has lived for so many of them, three to a ttl, is no crash loop

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Restore a record that the server has lost; return an error, or whether it is there again.
local function restore(key, owner, fence, holder, task, fingerprint, attempt)
  local written = redis.pcall('HSET', key, 'state', 'in_progress', 'owner', owner, 'fence', fence,
    'holder', holder)
  local error = type(written) == 'table' and written.err
  if error and error:find('OOM') then
    return nil, false -- no memory: it is lost
  elseif error then
    return written, false -- as on a replica, which does not know what is lost
  end
  local optional = {task = task, args = fingerprint, ['attempt:' .. task] = attempt}
  for field, value in pairs(optional) do
    if value ~= '' then
      redis.call('HSET', key, field, value)
    end
  end
  return nil, true
end

local lost, left, alone = {}, {}, #KEYS == 1
for place, key in ipairs(KEYS) do
  local first = 9 * place - 8
  local owner, fence, lease_ms, keep_ms = unpack(ARGV, first, first + 3)
  local holder, task, fingerprint, attempt, revive = unpack(ARGV, first + 4, first + 8)
  local found = redis.pcall('HMGET', key, 'state', 'owner', 'fence', 'crashes')
  if found.err and not found.err:find('WRONGTYPE') then
    return found -- as for a right that is missing; a key that is no hash is lost
  end
  local state, last_owner, last_fence, crashes = unpack(found, 1, 4)
  local held = state == 'in_progress' and last_owner == owner
  local gone = not found.err and not state and redis.call('EXISTS', key) == 0
  if alone and state and not held and revive == '1' and is_outdated(key, fence, now) then
    redis.call('DEL', key)
    gone, crashes, last_fence = true, nil, nil
  end
  if alone and gone and revive == '1' then
    local error -- the server lost its data, and the key was not claimed since
    error, held = restore(key, owner, fence, holder, task, fingerprint, attempt)
    if error then
      return error
    end
  end
  if held then
    -- PEXPIRE comes first: a full server allows HSET only to a script that has written.
    redis.call('PEXPIRE', key, lease_ms + keep_ms)
    redis.call('HSET', key, 'lease_end', string.format('%.0f', now + lease_ms * 1000))
    if crashes and now - (tonumber(last_fence) or now) > lease_ms * 1000 * RENEWALS / 3 then
      redis.call('HDEL', key, 'crashes')
    end
  elseif alone or (state == 'released' and last_owner == owner and last_fence == fence) then
    lost[#lost + 1] = place - 1
  else
    left[#left + 1] = place - 1
  end
end
return {lost, left}
