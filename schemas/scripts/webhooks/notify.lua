-- Record a webhook that is to be sent. A repeated call changes nothing.
-- ARGV: id, tenant, URL, unit, body, most webhooks in the tenant's list, seconds that the list is
-- kept
-- Returns its state
-- Until it has ended it counts as stored, whatever the tenant's quota: others wait for it.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

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
store(tenant, id, #url + #body, NOW + ttl_s * 1000, math.huge)
return {'pending'}
