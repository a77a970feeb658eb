-- Note a job whose chat is stored, in the list of its tenant. It may be repeated.
-- ARGV: tenant, job, most jobs of the list, seconds that the list is kept
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local tenant, job, most, ttl_s = unpack(ARGV)
local key = PREFIX .. 'stored:' .. tenant
redis.call('ZADD', key, 'NX', NOW, job)
redis.call('ZREMRANGEBYRANK', key, 0, -1 - most)
redis.call('EXPIRE', key, ttl_s)
return {'ok'}
