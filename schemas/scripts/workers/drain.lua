-- Tell a worker to drain; it learns of it at its next beat.
-- ARGV: worker
-- Returns 'ok', or 'missing' where no worker has a lease under this name
-- Calls functions of lane.lua (joined by schemas/script.py).

local until_ms = redis.call('ZSCORE', PREFIX .. 'workers', ARGV[1])
if not until_ms or tonumber(until_ms) < NOW then return {'missing'} end
redis.call('HSET', PREFIX .. 'worker:' .. ARGV[1], 'told', 'drain')
return {'ok'}
