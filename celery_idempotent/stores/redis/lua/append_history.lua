-- Add lines to the history of a key, the list KEYS[1], and keep the newest of them (stores/history.py in Python).
-- ARGV: how many lines to keep, ms to keep them, then for each new line: us since it happened, text
local clock, lines = redis.call('TIME'), {}
local now = clock[1] * 1000000 + clock[2]
for i = 3, #ARGV, 2 do lines[#lines + 1] = string.format('%.0f', now - ARGV[i]) .. ' ' .. ARGV[i + 1] end
redis.call('RPUSH', KEYS[1], unpack(lines))
redis.call('LTRIM', KEYS[1], -ARGV[1], -1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
