-- Forget a file.
-- ARGV: id, tenant, its bytes
-- Returns 'ok' or 'missing'
-- Uses PREFIX of lane.lua (joined by schemas/script.py).

local id, tenant, bytes = unpack(ARGV)
local list = PREFIX .. 'files:' .. tenant
if redis.call('ZREM', list, id) == 0 then return {'missing'} end
redis.call('DEL', PREFIX .. 'file:' .. id)
redis.call('ZREM', PREFIX .. 'files_expire', id)
if redis.call('HINCRBY', PREFIX .. 'files_bytes', tenant, -bytes) <= 0 then
  redis.call('HDEL', PREFIX .. 'files_bytes', tenant)
end
return {'ok'}
