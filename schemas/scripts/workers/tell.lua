-- Give a worker an order; it learns of it at its next beat.
-- ARGV: worker, order: 'drain', 'sleep', 'wake' or 'reset_prefix_cache'
-- Returns 'ok'; 'deaf' where its card says that it takes no such order; or 'missing' where no worker
-- has a lease under this name
-- Of the first three the last one counts, and none after 'drain'. Each is told with its time, so
-- that one that is given again is another.
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, order = unpack(ARGV)
local until_ms = redis.call('ZSCORE', PREFIX .. 'workers', worker)
if not until_ms or tonumber(until_ms) < NOW or not has_lease(worker) then return {'missing'} end
local key = PREFIX .. 'worker:' .. worker
local card = cjson.decode(redis.call('HGET', key, 'card'))
if order ~= 'drain' and not card.sleeps then return {'deaf'} end
local field = order == 'reset_prefix_cache' and 'reset' or 'told'
local told = redis.call('HGET', key, field) or ''
if not string.find(told, 'drain', 1, true) then
  redis.call('HSET', key, field, string.format('%.0f ', NOW_US) .. order)
end
return {'ok'}
