-- Drop a dead letter, and the request that is kept for it.
-- ARGV: job
-- Returns 1, or 0: there was none
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local key = PREFIX .. 'job:' .. ARGV[1]
local entry = redis.call('HGET', key, 'dead')
if not entry then return {0} end
redis.call('DEL', key .. ':request')
redis.call('HDEL', key, 'dead')
return {redis.call('XDEL', PREFIX .. 'dead', entry)}
