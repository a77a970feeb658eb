-- Record how an attempt to send a webhook went.
-- ARGV: id, unit, turn of the attempt, state (pending | delivered | failed), what the receiver
-- answered, milliseconds until the next attempt, seconds that an ended webhook is kept
-- Returns 'ok', or 'late': its lease lapsed, and another attempt began
-- An outcome is counted once, though the call be repeated.
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local id, unit, turn, state, answer, delay_ms, ttl_s = unpack(ARGV)
local key, items = PREFIX .. 'webhook:' .. id, PREFIX .. 'items:webhooks:' .. unit
if redis.call('HGET', key, 'turn') ~= turn then return {'late'} end
if redis.call('HGET', key, 'counted') ~= turn then
  redis.call('HINCRBY', PREFIX .. 'counts', 'webhooks_' .. state, 1)
end
redis.call('HSET', key, 'state', state, 'answer', answer, 'last_ms', NOW, 'counted', turn)
if state == 'pending' then
  redis.call('ZADD', items, NOW + delay_ms, id)
else
  redis.call('ZREM', items, id)
  redis.call('EXPIRE', key, ttl_s)
  give_back(redis.call('HGET', key, 'tenant'), id)
end
return {'ok'}
