-- Record a file that is on disk.
-- ARGV: id, tenant, record as JSON, bytes, when it expires (unix milliseconds), most files and most
-- bytes of the tenant
-- Returns 'ok'; 'known': its id is recorded; or the limit that it would exceed, 'files' or 'bytes'
-- Uses NOW and PREFIX of lane.lua (joined by schemas/script.py).

local id, tenant, record, bytes, expires_ms, most_files, most_bytes = unpack(ARGV)
if redis.call('EXISTS', PREFIX .. 'file:' .. id) == 1 then return {'known'} end
local list = PREFIX .. 'files:' .. tenant
local held = tonumber(redis.call('HGET', PREFIX .. 'files_bytes', tenant) or 0)
if redis.call('ZCARD', list) >= tonumber(most_files) then return {'files'} end
if held + bytes > tonumber(most_bytes) then return {'bytes'} end
redis.call('SET', PREFIX .. 'file:' .. id, record)
redis.call('ZADD', list, NOW, id)
redis.call('HINCRBY', PREFIX .. 'files_bytes', tenant, bytes)
redis.call('ZADD', PREFIX .. 'files_expire', expires_ms, id)
return {'ok'}
