-- Give a conversation other metadata.
-- ARGV: tenant, id, metadata as JSON, most bytes that the tenant may have stored
-- Returns 'ok', 'missing', or what store of storage.lua refuses by
-- Its first write is one that Redis refuses when memory is full.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, id, metadata, most_bytes = unpack(ARGV)
local key = PREFIX .. 'conversation:' .. id
local owner, kept_s = unpack(redis.call('HMGET', key, 'tenant', 'kept_s'))
if owner ~= tenant then return {'missing'} end
refuse_when_full()
local before = redis.call('HGET', PREFIX .. 'storage_bytes:' .. tenant, id) or THING_BYTES
local bytes = before - THING_BYTES - redis.call('HSTRLEN', key, 'metadata') + #metadata
local refused = store(tenant, id, math.max(0, bytes), NOW + kept_s * 1000, most_bytes)
if refused then return refused end
redis.call('HSET', key, 'metadata', metadata)
return {'ok'}
