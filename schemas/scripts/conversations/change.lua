-- Put other entries in place of a conversation's last ones, if it is still as it was read.
-- ARGV: tenant, id, the version that was read, how many entries stay, the others as JSON
-- Returns 'ok', 'stale' or 'missing'
-- Uses PREFIX of lane.lua (joined by schemas/script.py).

local tenant, id, version, num_kept = unpack(ARGV)
local key = PREFIX .. 'conversation:' .. id
local entries = key .. ':entries'
local owner, now_at, kept_s, length =
  unpack(redis.call('HMGET', key, 'tenant', 'version', 'kept_s', 'length'))
if owner ~= tenant then return {'missing'} end
if length and tonumber(length) ~= redis.call('LLEN', entries) then return {'missing'} end
if now_at ~= version then return {'stale'} end
if num_kept == '0' then
  redis.call('DEL', entries)
else
  redis.call('LTRIM', entries, 0, num_kept - 1)
end
for at = 5, #ARGV do redis.call('RPUSH', entries, ARGV[at]) end
redis.call('HSET', key, 'length', redis.call('LLEN', entries))
redis.call('EXPIRE', entries, kept_s)
redis.call('HINCRBY', key, 'version', 1)
return {'ok'}
