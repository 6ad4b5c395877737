-- Add lines to the history of a key, and keep the newest: stores/history.py in Python. Reply: 1.
local list = KEYS[1]
local limit = ARGV[1]
local keep_ms = ARGV[2]
-- ARGV[3] and later, two for each line: microseconds since it happened, its text

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local lines = {}
for place = 3, #ARGV, 2 do
  local ago, text = ARGV[place], ARGV[place + 1]
  lines[#lines + 1] = string.format('%.0f', now - ago) .. ' ' .. text
end
redis.call('RPUSH', list, unpack(lines))
redis.call('LTRIM', list, -limit, -1)
redis.call('PEXPIRE', list, keep_ms)
return 1
