-- Begin to send a webhook that is due. Until the lease ends nobody else sends it.
-- ARGV: id, unit, lease_ms
-- Returns one of
--   'send', turn of this attempt, attempts with this one, unix time in seconds, tenant, URL, body
--   'no': it is not due, or not pending any more
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local id, unit, lease_ms = unpack(ARGV)
local key, items = PREFIX .. 'webhook:' .. id, PREFIX .. 'items:webhooks:' .. unit
local due = redis.call('ZSCORE', items, id)
if not due or tonumber(due) > NOW then return {'no'} end
if redis.call('HGET', key, 'state') ~= 'pending' then
  redis.call('ZREM', items, id)
  return {'no'}
end
redis.call('ZADD', items, NOW + lease_ms, id)
local turn, attempts = redis.call('HINCRBY', key, 'turn', 1), redis.call('HINCRBY', key, 'attempts', 1)
local now_s = string.format('%d', NOW / 1000)
return {'send', turn, attempts, now_s, unpack(redis.call('HMGET', key, 'tenant', 'url', 'body'))}
