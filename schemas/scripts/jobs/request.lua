-- Read what a job asks, as it was submitted.
-- ARGV: tenant, job
-- Returns its state and the Job as JSON; or in its place 'on disk', or nothing where it is kept no
-- longer; or 'missing'.
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local job = load(ARGV[2])
if not job or job.tenant ~= ARGV[1] then return {'missing'} end
return {job.state, redis.call('GET', job.key .. ':request') or ''}
