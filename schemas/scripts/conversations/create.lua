-- Begin a conversation.
-- ARGV: tenant, id, metadata as JSON, seconds that it is kept after its last use, most of the
-- tenant, entries as JSON
-- Returns 'ok', and when it began (unix seconds); or 'full'
-- Uses NOW and PREFIX of lane.lua (joined by schemas/script.py).

local tenant, id, metadata, kept_s, most = unpack(ARGV)
local list = PREFIX .. 'conversations:' .. tenant
redis.call('ZREMRANGEBYSCORE', list, '-inf', NOW - kept_s * 1000)
if redis.call('ZCARD', list) >= tonumber(most) then return {'full'} end
local key, created_s = PREFIX .. 'conversation:' .. id, math.floor(NOW / 1000)
redis.call('HSET', key, 'tenant', tenant, 'created_s', created_s, 'metadata', metadata,
  'version', 0, 'kept_s', kept_s, 'length', #ARGV - 5)
for at = 6, #ARGV do redis.call('RPUSH', key .. ':entries', ARGV[at]) end
redis.call('ZADD', list, NOW, id)
for _, each in ipairs({key, key .. ':entries', list}) do redis.call('EXPIRE', each, kept_s) end
return {'ok', created_s}
