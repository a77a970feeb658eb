-- Add an item to a unit. see units/due.lua for units.
-- An item that is there already, leased or waiting, keeps its time. A unit that somebody holds is
-- not made due: its holder looks at its items before it lets go.
-- ARGV: kind, unit, item, milliseconds until the item is due
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local kind, unit, item, delay_ms = unpack(ARGV)
redis.call('ZADD', PREFIX .. 'items:' .. kind .. ':' .. unit, 'NX', NOW + delay_ms, item)
local held = redis.call('HGET', PREFIX .. 'held:' .. kind, unit)
if not held or tonumber(held) <= NOW then
  redis.call('ZADD', PREFIX .. 'due:' .. kind, 'LT', NOW + delay_ms, unit)
end
return {'ok'}
