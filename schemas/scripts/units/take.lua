-- Take a unit that is due, for the time of a lease. see units/due.lua for units.
-- ARGV: kind, unit, turns so far, lease_ms
-- Returns 'taken', to one caller for each turn; or 'gone'
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local kind, unit, turn, lease_ms = unpack(ARGV)
local due = redis.call('ZSCORE', PREFIX .. 'due:' .. kind, unit)
local turns = redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) or '0'
if not due or tonumber(due) > NOW or turns ~= turn then return {'gone'} end
redis.call('HINCRBY', PREFIX .. 'turns:' .. kind, unit, 1)
redis.call('HSET', PREFIX .. 'held:' .. kind, unit, NOW + lease_ms)
redis.call('ZADD', PREFIX .. 'due:' .. kind, NOW + lease_ms, unit)
return {'taken'}
