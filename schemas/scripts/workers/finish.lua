-- End a job.
-- ARGV: worker, lease_ms, job, epoch, state, end event as JSON, its position, result as JSON,
-- prompt (tokens:cached; empty: none was computed), tokens drawn that no event shows, number of
-- events before the end, and for each event: position, tokens, JSON
-- Returns one of
--   'K': it ended
--   'D': it ended before, in the same way
--   'F': fenced
--   'B', position: the budget allows it to end there and no later
-- Calls functions of lane.lua, accounts.lua and log.lua (joined by schemas/redis/script.py).

local worker, lease_ms, id, epoch = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local state, event, position, result, prompt, unshown, count = unpack(ARGV, 5, 11)
write_when_full()
if not renew(worker, lease_ms) then return {'F'} end
local job = load(id)
if job and job.ended and job.owner == worker and job.epoch == epoch then return {'D'} end
if is_fenced(job, worker, epoch) then return {'F'} end
local letter = append(job, prompt, tonumber(count), 12)
book()
if letter ~= 'F' and tonumber(position) ~= job.position then
  if job.stop and tonumber(position) > job.stop then
    publish()
    return {'B', job.stop}
  end
  requeue(job, 'log_differs') -- it ends somewhere else than its log: another shall end it
  letter = 'F'
end
if letter ~= 'F' then
  charge_unshown(job, tonumber(unshown))
  settle(job, epoch, state, event, result)
  letter = 'K'
end
publish()
return {letter}
