-- Cancel a job, or erase all that is kept of it.
-- ARGV: tenant, job, erase (0 | 1)
-- Returns the state before, or 'missing'; then 'on disk' where what an erased job asked is there
-- still. A running job stops when its worker is told.
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local tenant, id, erases = ARGV[1], ARGV[2], ARGV[3] == '1'
write_when_full()
local job = load(id)
if not job or job.tenant ~= tenant then return {'missing'} end
if job.ended then
  if not erases then return {job.state} end
  local request = redis.call('GETRANGE', job.key .. ':request', 0, 7)
  erase(job)
  return {job.state, request == 'on disk' and request or nil}
end
if erases then
  redis.call('HSET', job.key, 'erase', 1)
  redis.call('HDEL', job.key, 'metadata')
  redis.call('DEL', job.key .. ':request')
end
cancel(job)
publish()
return {job.state}
