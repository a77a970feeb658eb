-- Begin to send a webhook that is due; for a lease nobody else does. ARGV: id, unit, lease_ms
-- Returns: send, turn, attempts so far, the time in seconds, tenant, URL, body; or no

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
