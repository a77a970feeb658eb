-- Keep a unit for another lease. ARGV: kind, unit, its turn, lease_ms. Returns: ok; or gone

local kind, unit, turn, lease_ms = unpack(ARGV)
if redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) ~= turn then return {'gone'} end
redis.call('HSET', PREFIX .. 'held:' .. kind, unit, NOW + lease_ms)
redis.call('ZADD', PREFIX .. 'due:' .. kind, NOW + lease_ms, unit)
return {'ok'}
