-- Take the lease on KEYS[1], or say why not (rules.acquire in Python). Reply: verdict, time, fence, crashes, took over, record
-- ARGV: owner, task id, mark (attempt.copy), token, is copy, sender, fingerprint, max crashes, lease ms, keep ms, holder, attempt
local owner, task, mark, is_copy, clock = ARGV[1], ARGV[2], ARGV[3], ARGV[5] == '1', redis.call('TIME')
local key, now, flat, r = KEYS[1], clock[1] * 1000000 + clock[2], redis.call('HGETALL', KEYS[1]), {}
for i = 1, #flat, 2 do r[flat[i]] = flat[i + 1] end
local int, whole = function(n) return string.format('%.0f', n) end, function(f, or_else) return (r[f] or or_else):find('^%d+$') end
local function reply(verdict, took) return {verdict, int(now), r.fence or '0', r.crashes or '0', took or 0, flat} end
local state, no_end = r.state or 'released', {in_progress = '', released = '0', completed = '0', failed = '0'}
local sound = no_end[r.state] and not r.version and whole('fence', '') and whole('lease_end', no_end[state])
if #flat > 0 and not (sound and whole('crashes', '0') and whole('not_before', '0')) then return reply('unreadable') end
local mine, running, free, ends = (r.task or '') == task, state == 'in_progress', state == 'released', int(now + ARGV[9] * 1000)
if not (mine or free) and ARGV[7] ~= '' and (r.fingerprint or ARGV[7]) ~= ARGV[7] then return reply('key_reused') end
if not (running or free) then return reply(state) end
if running and r.owner == owner then -- our first reply was lost, perhaps long ago, and we count the lease from now
  redis.call('PEXPIRE', key, ARGV[9] + ARGV[10]) redis.call('HSET', key, 'lease_end', ends) return reply('lease') end
local waiting, token = string.match(r['waiting:' .. task] or ' ', '^(%S*) (.*)$')
local late = mark < (r['attempt:' .. task] or '') or mark < waiting or (mark == waiting and token ~= ARGV[4])
if late and is_copy then return reply('superseded') end local lapsed = running and (ARGV[6] == '' or ARGV[6] ~= r.owner)
local busy = now < tonumber(lapsed and r.lease_end or (free and not mine and r.not_before) or 0) -- of a crowd, 1,000 are told apart
if busy and (waiting ~= '' or #flat < 2000) then redis.call('HSET', key, 'waiting:' .. task, mark .. ' ' .. ARGV[4]) end
if busy then return reply('conflict') end local died = lapsed and r.reason ~= 'shutdown' -- as was announced
r.crashes = died and redis.call('HINCRBY', key, 'crashes', 1) or r.crashes
if mine and tonumber(r.crashes or 0) >= tonumber(ARGV[8]) and (died or is_copy or r.reason == 'crashed') then
  redis.call('HDEL', key, 'owner', 'not_before') redis.call('HSET', key, 'state', 'released', 'reason', 'crash_loop')
  flat = redis.call('HGETALL', key) return reply('crash_loop') end
r.fence = int(math.max(now, (r.fence or 0) + 1))
if #flat > 0 then redis.call('HDEL', key, 'reason', 'not_before', 'task', 'fingerprint', 'waiting:' .. task, 'attempt:' .. task) end
local new = {key, 'state', 'in_progress', 'owner', owner, 'fence', r.fence, 'lease_end', ends, 'holder', ARGV[11]}
local function set(field, value) if value ~= '' then new[#new + 1] = field new[#new + 1] = value end end
set('task', task) set('fingerprint', ARGV[7]) set('attempt:' .. task, ARGV[12])
redis.call('HSET', unpack(new)) redis.call('PEXPIRE', key, ARGV[9] + ARGV[10]) return reply('lease', lapsed and 1 or 0)
