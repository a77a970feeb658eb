-- Record a webhook that is to be sent. A repeated call changes nothing.
-- ARGV: id, tenant, URL, unit, body, most webhooks in the tenant's list, seconds that the list is
-- kept
-- Returns its state
-- Uses NOW and PREFIX of lane.lua (joined by schemas/script.py).

local id, tenant, url, unit, body, most, ttl_s = unpack(ARGV)
local key = PREFIX .. 'webhook:' .. id
if redis.call('HSETNX', key, 'state', 'pending') == 0 then
  return {redis.call('HGET', key, 'state')}
end
redis.call('HSET', key, 'tenant', tenant, 'url', url, 'unit', unit, 'body', body, 'turn', 0,
  'attempts', 0, 'created_ms', NOW)
local list = PREFIX .. 'webhooks:' .. tenant
redis.call('ZADD', list, NOW, id)
redis.call('ZREMRANGEBYRANK', list, 0, -1 - most)
redis.call('EXPIRE', list, ttl_s)
return {'pending'}
