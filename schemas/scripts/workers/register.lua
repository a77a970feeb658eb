-- Begin a worker's lease, or change its card.
-- ARGV: worker, lease_ms, card as JSON
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, lease_ms, card = unpack(ARGV)
write_when_full()
redis.call('ZADD', PREFIX .. 'workers', NOW + lease_ms, worker)
local longest = tonumber(redis.call('HGET', PREFIX .. 'counts', 'longest_lease_ms') or 0)
if tonumber(lease_ms) > longest then
  redis.call('HSET', PREFIX .. 'counts', 'longest_lease_ms', lease_ms)
end
local key, read = PREFIX .. 'worker:' .. worker, cjson.decode(card)
redis.call('HSET', key, 'card', card, 'fingerprint', read.fingerprint or '')
if read.resumes == 'text' then redis.call('HSET', key, 'resumes', 'text') end
if read.draining or read.asleep then -- it takes nothing new
  redis.call('HSET', key, 'draining', 1)
else
  redis.call('HDEL', key, 'draining')
  redis.call('DEL', PREFIX .. 'wanted')
end
return {'ok'}
