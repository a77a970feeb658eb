-- Make an ended webhook one to be sent again, under its id. ARGV: tenant, id
-- Returns: the unit that it is due in; or missing

local key = PREFIX .. 'webhook:' .. ARGV[2]
local tenant, unit = unpack(redis.call('HMGET', key, 'tenant', 'unit'))
if tenant ~= ARGV[1] then return {'missing'} end
redis.call('HSET', key, 'state', 'pending', 'attempts', 0)
redis.call('PERSIST', key)
return {'unit', unit}
