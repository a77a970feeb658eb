-- Forget a conversation.
-- ARGV: tenant, id
-- Returns 'ok' or 'missing'
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local key = PREFIX .. 'conversation:' .. ARGV[2]
if redis.call('HGET', key, 'tenant') ~= ARGV[1] then return {'missing'} end
redis.call('DEL', key, key .. ':entries')
redis.call('ZREM', PREFIX .. 'conversations:' .. ARGV[1], ARGV[2])
give_back(ARGV[1], ARGV[2])
return {'ok'}
