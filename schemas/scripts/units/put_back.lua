-- Let go of a unit. see units/due.lua for units.
-- ARGV: kind, unit, the taker's turn, milliseconds until it is to be looked at again, if no item is
-- due before (-1: only when an item is due)
-- Returns 'ok', or 'gone': the lease lapsed, and the unit is another's
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local kind, unit, turn, delay_ms = unpack(ARGV)
if redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) ~= turn then return {'gone'} end
local next_ms = tonumber(delay_ms) >= 0 and NOW + delay_ms
local first = redis.call('ZRANGE', PREFIX .. 'items:' .. kind .. ':' .. unit, 0, 0, 'WITHSCORES')[2]
if first then next_ms = math.min(next_ms or tonumber(first), tonumber(first)) end
redis.call('HDEL', PREFIX .. 'held:' .. kind, unit)
if next_ms then
  redis.call('ZADD', PREFIX .. 'due:' .. kind, next_ms, unit)
else
  redis.call('ZREM', PREFIX .. 'due:' .. kind, unit)
  redis.call('HDEL', PREFIX .. 'turns:' .. kind, unit)
end
return {'ok'}
