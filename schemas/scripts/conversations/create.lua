-- Begin a conversation.
-- ARGV: tenant, id, metadata as JSON, seconds that it is kept after its last use, most of the
-- tenant, most bytes that the tenant may have stored, entries as JSON
-- Returns 'ok' or, where it had begun before, 'known', each with when that was (unix seconds);
-- 'full'; or what store of storage.lua refuses by
-- Its first write is one that Redis refuses when memory is full, so nothing is stored by half.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, id, metadata, kept_s, most, most_bytes = unpack(ARGV, 1, 6)
local key, list = PREFIX .. 'conversation:' .. id, PREFIX .. 'conversations:' .. tenant
local known = redis.call('HGET', key, 'created_s')
if known then return {'known', known} end
refuse_when_full()
redis.call('ZREMRANGEBYSCORE', list, '-inf', NOW - kept_s * 1000)
if redis.call('ZCARD', list) >= tonumber(most) then return {'full'} end
local bytes = #metadata
for at = 7, #ARGV do bytes = bytes + #ARGV[at] end
local refused = store(tenant, id, bytes, NOW + kept_s * 1000, most_bytes)
if refused then return refused end
local created_s = math.floor(NOW / 1000)
redis.call('HSET', key, 'tenant', tenant, 'created_s', created_s, 'metadata', metadata,
  'version', 0, 'kept_s', kept_s, 'length', #ARGV - 6)
for at = 7, #ARGV do redis.call('RPUSH', key .. ':entries', ARGV[at]) end
redis.call('ZADD', list, NOW, id)
for _, each in ipairs({key, key .. ':entries', list}) do redis.call('EXPIRE', each, kept_s) end
return {'ok', created_s}
