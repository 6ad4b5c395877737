-- Forget an outcome in a cache, and for a while let no client that read it earlier bring it back.
-- Reply: 1.
local key = KEYS[1]
local while_ms = ARGV[1]

redis.call('DEL', key)
local kept = redis.pcall('HSET', key, 'deleted', 1)
if type(kept) ~= 'table' then
  redis.call('PEXPIRE', key, while_ms)
elseif not kept.err:find('OOM') then -- a full server takes no late outcome either
  return kept
end
return 1
