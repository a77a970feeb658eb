-- Ask for the end of a batch, which its next turn carries out.
-- ARGV: id, tenant
-- Returns 'ok', 'ended' or 'missing'
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local id, tenant = unpack(ARGV)
local key = PREFIX .. 'batch:' .. id
if redis.call('HGET', key, 'tenant') ~= tenant then return {'missing'} end
if redis.call('SISMEMBER', PREFIX .. 'batches_open:' .. tenant, id) == 0 then return {'ended'} end
redis.call('HSETNX', key, 'cancelling_ms', NOW)
return {'ok'}
