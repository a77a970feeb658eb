-- Look whether somebody uses the lane, or drop what is left of it where nobody does.
-- ARGV: 'look', 'drop', or the cursor of a search for jobs that are kept (0: from the beginning);
--   keys to search
-- Returns
--   to 'look', and to 'drop' where it dropped nothing: the leases, the jobs that wait or run, those
--     that ended and are to be handed on, the dead letters
--   to 'drop': 'dropped'
--   to a cursor: the next one (0: all keys were seen), and how many jobs were found
-- Calls functions of lane.lua and waiting.lua (joined by schemas/redis/script.py).

local asked, most = ARGV[1], ARGV[2]
if asked ~= 'look' and asked ~= 'drop' then
  local pattern = string.gsub(PREFIX, '[%*%?%[%]\\]', '\\%0') .. 'job:*'
  local found = redis.call('SCAN', asked, 'MATCH', pattern, 'COUNT', most)
  return {found[1], #found[2]}
end
local jobs = num_claimed() + num_handed_back() + redis.call('ZCARD', PREFIX .. 'delayed')
for _, class in ipairs(CLASSES) do jobs = jobs + redis.call('ZCARD', PREFIX .. 'waiting:' .. class) end
local used = {redis.call('ZCARD', PREFIX .. 'workers'), jobs, redis.call('XLEN', PREFIX .. 'outbox'),
  redis.call('XLEN', PREFIX .. 'dead')}
if asked == 'look' or used[1] + used[2] + used[3] > 0 then return used end
for _, name in ipairs({'counts', 'outbox', 'news', 'paused', 'dead', 'idle'}) do
  redis.call('DEL', PREFIX .. name)
end
for _, ready in ipairs(READY) do redis.call('DEL', ready_key(ready)) end
return {'dropped'}
