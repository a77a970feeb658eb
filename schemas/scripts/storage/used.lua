-- Tell what a tenant has stored.
-- ARGV: tenant
-- Returns its bytes, and how many things they are
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local used = stored_bytes(ARGV[1])
return {string.format('%.0f', used), redis.call('ZCARD', PREFIX .. 'storage:' .. ARGV[1])}
