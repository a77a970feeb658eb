-- Make an ended webhook one to be sent again, under its id.
-- ARGV: tenant, id
-- Returns 'unit', and the unit that sends it; or 'missing'
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local key = PREFIX .. 'webhook:' .. ARGV[2]
local tenant, unit = unpack(redis.call('HMGET', key, 'tenant', 'unit'))
if tenant ~= ARGV[1] then return {'missing'} end
redis.call('HSET', key, 'state', 'pending', 'attempts', 0)
redis.call('PERSIST', key)
return {'unit', unit}
