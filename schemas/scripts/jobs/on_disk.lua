-- Keep a word in place of what a job asks, which is on disk now; for as long as that was kept.
-- ARGV: tenant, job
-- Returns 'ok'; or 'gone' where it is kept no longer, or is not kept for good
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local job = load(ARGV[2])
if not job or job.tenant ~= ARGV[1] or not job.ended or job.state == 'dead' then return {'gone'} end
if not redis.call('SET', job.key .. ':request', 'on disk', 'XX', 'KEEPTTL') then return {'gone'} end
return {'ok'}
