-- Read a conversation, which is kept for longer by it.
-- ARGV: tenant, id
-- Returns 'found', when it began (unix seconds), its metadata as JSON, its version, the time now
-- (unix milliseconds), and its entries as JSON; or 'missing'
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, id = unpack(ARGV)
local key, list = PREFIX .. 'conversation:' .. id, PREFIX .. 'conversations:' .. tenant
local owner, created_s, metadata, version, kept_s, length =
  unpack(redis.call('HMGET', key, 'tenant', 'created_s', 'metadata', 'version', 'kept_s', 'length'))
if owner ~= tenant then return {'missing'} end
-- What was said in it is gone, and the rest is no conversation.
if length and tonumber(length) ~= redis.call('LLEN', key .. ':entries') then return {'missing'} end
write_when_full() -- else nobody could read what there is, and delete it
redis.call('ZADD', list, NOW, id)
keep_stored(tenant, id, NOW + kept_s * 1000)
for _, each in ipairs({key, key .. ':entries', list}) do redis.call('EXPIRE', each, kept_s) end
local reply = {'found', created_s, metadata, version, NOW}
for _, entry in ipairs(redis.call('LRANGE', key .. ':entries', 0, -1)) do reply[#reply + 1] = entry end
return reply
