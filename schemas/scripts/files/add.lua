-- Record a file that is on disk.
-- ARGV: id, tenant, record as JSON, bytes, when it expires (unix milliseconds), most files and most
-- bytes of the tenant, the name of what was reserved for it
-- Returns 'ok'; 'known': its id is recorded; 'files': the tenant has too many; or what store of
-- storage.lua refuses by
-- Its first write is one that Redis refuses when memory is full.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local SWEPT_MS = 86400000 -- after its end a file is on disk until it is swept

local id, tenant, record, bytes, expires_ms, most_files, most_bytes, reserved = unpack(ARGV)
refuse_when_full()
local list = PREFIX .. 'files:' .. tenant
if redis.call('EXISTS', PREFIX .. 'file:' .. id) == 1 then
  give_back(tenant, reserved)
  return {'known'}
end
if redis.call('ZCARD', list) >= tonumber(most_files) then return {'files'} end
local room = redis.call('HGET', PREFIX .. 'storage_bytes:' .. tenant, reserved) or 0
local refused = store(tenant, id, tonumber(bytes), expires_ms + SWEPT_MS, most_bytes + room)
if refused then return refused end
give_back(tenant, reserved)
redis.call('SET', PREFIX .. 'file:' .. id, record)
redis.call('ZADD', list, NOW, id)
redis.call('ZADD', PREFIX .. 'files_expire', expires_ms, id)
return {'ok'}
