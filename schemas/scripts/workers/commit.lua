-- Log and publish what a step made.
-- Delivery is at-least-once: a job may be computed twice. Its log is exactly-once: what is not at the
-- log's next position, or comes under an older epoch, is refused.
-- ARGV: worker, lease_ms, number of jobs, then for each: job, epoch, prompt (tokens:cached; empty:
-- not known yet), number of events, and for each event: position, tokens, JSON
-- Returns the JobSignal of each job: K kept, C cancelled, X deadline, B out of budget (`finish`
-- says where to end), F fenced, D duplicate
-- Calls functions of lane.lua, accounts.lua and log.lua (joined by schemas/redis/script.py).

local worker, lease_ms, jobs = ARGV[1], ARGV[2], tonumber(ARGV[3])
write_when_full()
local is_live = renew(worker, lease_ms)
local letters, at = {}, 4
for number = 1, jobs do
  local id, epoch, prompt, count = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], tonumber(ARGV[at + 3])
  local job = is_live and load(id)
  local letter = 'F'
  if not is_fenced(job, worker, epoch) then
    letter = append(job, prompt, count, at + 4)
    if letter ~= 'F' then
      if job.cancel then
        letter = 'C'
      elseif job.deadline and NOW >= tonumber(job.deadline) then
        letter = 'X'
      end
    end
  end
  letters[number] = letter
  at = at + 4 + 3 * count
end
book()
publish()
return letters
