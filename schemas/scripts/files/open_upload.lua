-- Begin an upload, for whose whole file there is room from now on.
-- ARGV: id, tenant, record as JSON, bytes of the file, seconds for its parts to come, seconds that
-- it is known, most open ones and most bytes of the tenant
-- Returns 'ok'; 'known': its id is taken; 'full': too many are open; or what store of storage.lua
-- refuses by
-- Its first write is one that Redis refuses when memory is full.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local LEFT_MS = 7200000 -- after its time its parts are on disk until they are swept

local id, tenant, record, bytes, open_s, known_s, most_open, most_bytes = unpack(ARGV)
local key, list = PREFIX .. 'upload:' .. id, PREFIX .. 'uploads:' .. tenant
if redis.call('EXISTS', key) == 1 then return {'known'} end
refuse_when_full()
redis.call('ZREMRANGEBYSCORE', list, '-inf', NOW - open_s * 1000)
if redis.call('ZCARD', list) >= tonumber(most_open) then return {'full'} end
local refused = store(tenant, id, tonumber(bytes), NOW + open_s * 1000 + LEFT_MS, most_bytes)
if refused then return refused end
redis.call('HSET', key, 'record', record)
redis.call('EXPIRE', key, known_s)
redis.call('ZADD', list, NOW, id)
redis.call('EXPIRE', list, open_s + 60)
return {'ok'}
