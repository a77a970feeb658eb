-- Give a job that is kept with its result other metadata.
-- ARGV: tenant, job, metadata as JSON
-- Returns its state; or 'missing'; or 'gone' where it is not kept.
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local job = load(ARGV[2])
if not job or job.tenant ~= ARGV[1] then return {'missing'} end
if redis.call('EXISTS', job.key .. ':request') == 0 then return {'gone'} end
redis.call('HSET', job.key, 'metadata', ARGV[3])
return {job.state}
