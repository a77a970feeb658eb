-- Put other entries in place of a conversation's last ones, if it is still as it was read.
-- ARGV: tenant, id, the version that was read, how many entries stay, the bytes of all entries then,
-- 1 where Redis holds less then, most bytes that the tenant may have stored, the
-- others as JSON
-- Returns 'ok', 'stale', 'missing', or what store of storage.lua refuses by
-- Where Redis does not hold less its first write is one that Redis refuses when memory is full.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, id, version, num_kept, bytes, frees, most_bytes = unpack(ARGV, 1, 7)
local key = PREFIX .. 'conversation:' .. id
local entries = key .. ':entries'
local owner, now_at, kept_s, length =
  unpack(redis.call('HMGET', key, 'tenant', 'version', 'kept_s', 'length'))
if owner ~= tenant then return {'missing'} end
if length and tonumber(length) ~= redis.call('LLEN', entries) then return {'missing'} end
if now_at ~= version then return {'stale'} end
if frees == '1' then write_when_full() else refuse_when_full() end
bytes = bytes + redis.call('HSTRLEN', key, 'metadata')
local refused = store(tenant, id, bytes, NOW + kept_s * 1000, most_bytes)
if refused then return refused end
if num_kept == '0' then
  redis.call('DEL', entries)
else
  redis.call('LTRIM', entries, 0, num_kept - 1)
end
for at = 8, #ARGV do redis.call('RPUSH', entries, ARGV[at]) end
redis.call('HSET', key, 'length', redis.call('LLEN', entries))
redis.call('EXPIRE', entries, kept_s)
redis.call('HINCRBY', key, 'version', 1)
return {'ok'}
