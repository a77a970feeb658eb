-- Ask for the end of a batch; its next turn sees it. ARGV: id, tenant. Returns: ok; ended; missing

local id, tenant = unpack(ARGV)
local key = PREFIX .. 'batch:' .. id
if redis.call('HGET', key, 'tenant') ~= tenant then return {'missing'} end
if redis.call('SISMEMBER', PREFIX .. 'batches_open:' .. tenant, id) == 0 then return {'ended'} end
redis.call('HSETNX', key, 'cancelling_ms', NOW)
return {'ok'}
