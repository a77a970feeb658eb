-- End a job. ARGV: worker, lease_ms, job, epoch, state, end event as JSON, its position, result as
-- JSON, number of events before the end, and for each of these: position, tokens, JSON
-- Returns: K ended; D ended before, in the same way; F fenced

local worker, lease_ms, id, epoch = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local state, event, position, result, count = unpack(ARGV, 5, 9)
write_when_full()
if not renew(worker, lease_ms) then return {'F'} end
local job = load(id)
if job and job.ended and job.owner == worker and job.epoch == epoch then return {'D'} end
if is_fenced(job, worker, epoch) then return {'F'} end
local letter = append(job, tonumber(count), 10)
if letter ~= 'F' and tonumber(position) ~= job.position then
  requeue(job) -- it ends somewhere else than its log: another shall end it
  letter = 'F'
end
if letter ~= 'F' then
  settle(job, epoch, state, event, result)
  letter = 'K'
end
publish()
return {letter}
