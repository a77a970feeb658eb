-- List units of work that housekeeping should look at now. A unit, as a batch, holds items.
--   due:<kind>           when to look at each unit
--   turns:<kind>         how often each unit was taken
--   held:<kind>          until when each unit is its taker's
--   items:<kind>:<unit>  when each item of the unit is due
-- Its owner is what follows the first space of its name, or else itself.
-- ARGV: kind, most units, most units of one owner, with those that are held
-- Returns (unit, turns so far) for each that is due, the longest waiting first
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local PAGE = 1000 -- units that are read at once

local kind, most, most_each = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local counts, reply = {}, {}

local function has_room(unit)
  local owner = unit:match('^[^ ]* (.*)$') or unit
  counts[owner] = (counts[owner] or 0) + 1
  return counts[owner] <= most_each
end

local held = redis.call('HGETALL', PREFIX .. 'held:' .. kind)
for at = 1, #held, 2 do
  if tonumber(held[at + 1]) > NOW then has_room(held[at]) end
end
local key, at = PREFIX .. 'due:' .. kind, 0
repeat
  local units = redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', at, PAGE)
  for _, unit in ipairs(units) do
    if #reply < 2 * most and has_room(unit) then
      reply[#reply + 1] = unit
      reply[#reply + 1] = redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) or '0'
    end
  end
  at = at + PAGE
until #units < PAGE or #reply == 2 * most
return reply
