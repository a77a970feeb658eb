-- List units of work that housekeeping should look at now. A unit, as a batch, holds items.
--   due:<kind>           when to look at each unit
--   turns:<kind>         how often each unit was taken
--   held:<kind>          until when each unit is its taker's
--   items:<kind>:<unit>  when each item of the unit is due
-- ARGV: kind, most units
-- Returns (unit, turns so far) for each that is due, the longest waiting first
-- Uses NOW and PREFIX of lane.lua (joined by schemas/script.py).

local kind, most = ARGV[1], ARGV[2]
local reply = {}
for _, unit in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'due:' .. kind, '-inf', NOW, 'LIMIT', 0, most)) do
  reply[#reply + 1] = unit
  reply[#reply + 1] = redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) or '0'
end
return reply
