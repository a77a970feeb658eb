-- An item of a unit will be due, if it is not there already, leased or waiting for its time. Whoever
-- has the unit at present will see it.
-- ARGV: kind, unit, item, milliseconds until then

local kind, unit, item, delay_ms = unpack(ARGV)
redis.call('ZADD', PREFIX .. 'items:' .. kind .. ':' .. unit, 'NX', NOW + delay_ms, item)
local held = redis.call('HGET', PREFIX .. 'held:' .. kind, unit)
if not held or tonumber(held) <= NOW then
  redis.call('ZADD', PREFIX .. 'due:' .. kind, 'LT', NOW + delay_ms, unit)
end
return {'ok'}
