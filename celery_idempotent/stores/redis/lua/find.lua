-- Read the outcome that a cache keeps under a key, and whether the callbacks of one task were
-- dispatched; those of others are not read, however many they are.
-- Reply: the server's time, and the values of cached.ANSWERED.
local key = KEYS[1]
local announcer = ARGV[1]
local clock = redis.call('TIME')
local values = redis.call('HMGET', key, 'version', 'state', 'fence', 'task', 'fingerprint', 'payload',
  'checksum', 'ended', 'expires', 'announced:' .. announcer)
return {clock[1] * 1000000 + clock[2], values}
