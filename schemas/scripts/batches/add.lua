-- Accept a batch.
-- ARGV: id, tenant, what was asked as JSON, milliseconds of its window, most batches of the tenant
-- that have not ended, most batches in the tenant's list, seconds that the batch is kept, the
-- account that its lines count for as JSON (empty: the tenant), most bytes that the tenant may have
-- stored
-- Returns 'ok'; 'known': its id is taken; 'full': the tenant has too many batches that have not
-- ended; or what store of storage.lua refuses by
-- Its first write is one that Redis refuses when memory is full.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local id, tenant, asked, window_ms, most, listed, kept_s, account, most_bytes = unpack(ARGV)
if redis.call('EXISTS', PREFIX .. 'batch:' .. id) == 1 then return {'known'} end
refuse_when_full()
local list = PREFIX .. 'batches:' .. tenant
redis.call('ZREMRANGEBYSCORE', list, '-inf', NOW - kept_s * 1000)
if redis.call('SCARD', PREFIX .. 'batches_open:' .. tenant) >= tonumber(most) then return {'full'} end
local refused = store(tenant, id, #asked + #account, NOW + window_ms + kept_s * 1000, most_bytes)
if refused then return refused end
redis.call('HSET', PREFIX .. 'batch:' .. id, 'id', id, 'tenant', tenant, 'asked', asked, 'status',
  'validating', 'created_ms', NOW, 'expires_ms', NOW + window_ms)
if account ~= '' then redis.call('HSET', PREFIX .. 'batch:' .. id, 'account', account) end
redis.call('SADD', PREFIX .. 'batches_open:' .. tenant, id)
redis.call('ZADD', list, NOW, id)
redis.call('ZREMRANGEBYRANK', list, 0, -1 - listed)
redis.call('EXPIRE', list, kept_s)
redis.call('ZADD', PREFIX .. 'due:batches', NOW, id)
return {'ok'}
