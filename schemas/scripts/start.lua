-- Take a claimed job up. ARGV: worker, ready, entry, job
-- Returns: started, epoch, milliseconds left (-1: no deadline), milliseconds waited, the Job's JSON
-- (empty: lost), the events of its log; or none, when nothing is left to do; or lost.

local worker, ready, entry, id = unpack(ARGV)
write_when_full()
if not redis.call('ZSCORE', PREFIX .. 'workers', worker) then return {'lost'} end
local job = load(id)
if not job or job.ended or not is_entry_of(job, ready, entry) then
  unclaim(ready, entry)
  return {'none'}
end
if job.running and job.owner ~= worker then return {'none'} end
if job.state == 'ready' then
  if job.deadline and NOW >= tonumber(job.deadline) then
    settle_failed(job, 'expired', EXPIRED)
    publish()
    return {'none'}
  end
  job.epoch = job.epoch + 1
  redis.call('HSET', job.key, 'state', 'admitting', 'epoch', job.epoch, 'owner', worker)
  redis.call('HSETNX', job.key, 'started_ms', NOW)
end
local created = redis.call('HGET', job.key, 'created_ms')
local left = job.deadline and math.max(0, job.deadline - NOW) or -1
local request = redis.call('GET', job.key .. ':request') or ''
local reply = {'started', job.epoch, left, NOW - created, request}
for _, line in ipairs(redis.call('XRANGE', job.key .. ':log', '-', '+')) do
  reply[#reply + 1] = line[2][2]
end
return reply
