-- Record a webhook that is to be sent; a repeat changes nothing. ARGV: id, tenant, URL, unit, body,
-- most that a tenant's list holds, seconds that the list is kept. Returns: its state

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
