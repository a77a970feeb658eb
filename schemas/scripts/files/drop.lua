-- Forget a file.
-- ARGV: id, tenant
-- Returns 'ok' or 'missing'
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local id, tenant = unpack(ARGV)
if redis.call('ZREM', PREFIX .. 'files:' .. tenant, id) == 0 then return {'missing'} end
redis.call('DEL', PREFIX .. 'file:' .. id)
redis.call('ZREM', PREFIX .. 'files_expire', id)
give_back(tenant, id)
return {'ok'}
