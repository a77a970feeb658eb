-- Make a unit one taker's for a lease. ARGV: kind, unit, its turn, lease_ms
-- Returns: taken, once for each turn; or gone

local kind, unit, turn, lease_ms = unpack(ARGV)
local due = redis.call('ZSCORE', PREFIX .. 'due:' .. kind, unit)
local turns = redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) or '0'
if not due or tonumber(due) > NOW or turns ~= turn then return {'gone'} end
redis.call('HINCRBY', PREFIX .. 'turns:' .. kind, unit, 1)
redis.call('HSET', PREFIX .. 'held:' .. kind, unit, NOW + lease_ms)
redis.call('ZADD', PREFIX .. 'due:' .. kind, NOW + lease_ms, unit)
return {'taken'}
