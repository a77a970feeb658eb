-- Hand jobs back, started or only claimed.
-- ARGV: worker, jobs
-- Returns how many were handed back
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, count = ARGV[1], 0
write_when_full()

local function is_claimed(job)
  if job.running then return job.owner == worker end
  if not job.entry then return false end
  local range = {ready_key(job.ready), GROUP, job.entry, job.entry, 1, worker}
  return job.state == 'ready' and #redis.pcall('XPENDING', unpack(range)) == 1
end

for at = 2, #ARGV do
  local job = load(ARGV[at])
  if job and is_claimed(job) then
    requeue(job, 'handed_back')
    count = count + 1
  end
end
publish()
return {count}
