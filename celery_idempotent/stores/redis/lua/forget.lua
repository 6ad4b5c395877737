-- Forget the outcome KEYS[1] in a cache, and for ARGV[1] ms let nobody who read it earlier bring it back.
redis.call('DEL', KEYS[1])
local kept = redis.pcall('HSET', KEYS[1], 'deleted', 1)
if type(kept) == 'table' and not kept.err:find('OOM') then return kept end
if type(kept) ~= 'table' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end -- a full server takes no late outcome either
return 1
