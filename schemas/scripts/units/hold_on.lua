-- Keep a unit for another lease. see units/due.lua for units.
-- ARGV: kind, unit, the taker's turn, lease_ms
-- Returns 'ok', or 'gone': the unit is another's
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local kind, unit, turn, lease_ms = unpack(ARGV)
if redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) ~= turn then return {'gone'} end
redis.call('HSET', PREFIX .. 'held:' .. kind, unit, NOW + lease_ms)
redis.call('ZADD', PREFIX .. 'due:' .. kind, NOW + lease_ms, unit)
return {'ok'}
