-- Tell which of a tenant's jobs something befell last.
-- ARGV: tenant, most jobs
-- Returns (job, when in milliseconds) for each, the latest first
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

return redis.call('ZREVRANGE', PREFIX .. 'recent:' .. ARGV[1], 0, ARGV[2] - 1, 'WITHSCORES')
