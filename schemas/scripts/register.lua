-- A worker's lease begins, or its card changes. ARGV: worker, lease_ms, card as JSON

local worker, lease_ms, card = unpack(ARGV)
write_when_full()
redis.call('ZADD', PREFIX .. 'workers', NOW + lease_ms, worker)
local fingerprint = cjson.decode(card).fingerprint or ''
redis.call('HSET', PREFIX .. 'worker:' .. worker, 'card', card, 'fingerprint', fingerprint)
redis.call('EXPIRE', PREFIX .. 'worker:' .. worker, WORKER_TTL_S)
return {'ok'}
