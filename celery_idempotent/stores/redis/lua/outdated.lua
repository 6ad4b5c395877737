-- Comes before the scripts that ask it: rules.outdated in Python.

-- No number, or a whole one, as this version writes them.
local function is_whole(number)
  return not number or string.find(number, '^%d+$')
end

-- Whether a record is from before a lease, and its own lease is over: the server has lost the later one alone.
-- Of what is no record of this version nothing is known.
local function is_outdated(key, fence, now)
  local found = redis.call('HMGET', key, 'state', 'fence', 'lease_end', 'not_before', 'crashes', 'version')
  local state, last_fence, lease_end, not_before, crashes, version = unpack(found, 1, 6)
  local has_numbers = last_fence and is_whole(last_fence) and is_whole(lease_end)
    and is_whole(not_before) and is_whole(crashes)
  if version or not has_numbers then
    return false
  end
  local is_over = state == 'released' or (state == 'in_progress' and lease_end and now >= tonumber(lease_end))
  return is_over and tonumber(last_fence) < tonumber(fence)
end

