-- Count other bytes of something that is stored, if it is counted at all.
-- ARGV: tenant, its name, bytes
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, name, bytes = unpack(ARGV)
local gone_ms = redis.call('ZSCORE', PREFIX .. 'storage:' .. tenant, name)
if gone_ms then store(tenant, name, tonumber(bytes), gone_ms, math.huge) end
return {'ok'}
