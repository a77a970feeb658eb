-- Give a conversation other metadata.
-- ARGV: tenant, id, metadata as JSON
-- Returns 'ok' or 'missing'
-- Uses PREFIX of lane.lua (joined by schemas/script.py).

local key = PREFIX .. 'conversation:' .. ARGV[2]
if redis.call('HGET', key, 'tenant') ~= ARGV[1] then return {'missing'} end
redis.call('HSET', key, 'metadata', ARGV[3])
return {'ok'}
