-- Tell how full the lane is.
-- ARGV: how many blocked accounts earlier calls looked at (limits keep their jobs from running)
-- Returns, in this order
--   jobs claimed or running, jobs ended so far, average milliseconds between two ends while it is
--     busy
--   jobs handed back, delayed, and waiting in class text, high, normal and batch
--   dead letters
--   since the beginning: crashes of workers, lapses of workers, jobs reaped, put back, and given up
--   tokens of the prompts that wait
--   milliseconds since the submission of the first job that waits in a class, of the longest; 0:
--     none waits
--   1 if a foreground job was refused of late since no worker is there, else 0
--   1 if no job may begin
--   how many blocked accounts were looked at now (64: there may be more)
--   (reason, jobs) for the waiting jobs of these accounts
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local MOST = 64
local before = tonumber(ARGV[1])

local reply = {num_claimed(), redis.call('HGET', PREFIX .. 'counts', 'ended') or '0', tostring((pace())),
  num_handed_back(), redis.call('ZCARD', PREFIX .. 'delayed')}
for _, class in ipairs(CLASSES) do
  reply[#reply + 1] = redis.call('ZCARD', PREFIX .. 'waiting:' .. class)
end
reply[#reply + 1] = redis.call('XLEN', PREFIX .. 'dead')
local totals = redis.call('HMGET', PREFIX .. 'counts', 'crashed', 'lapsed', 'reaped', 'requeued', 'buried',
  'queued_tokens')
for at = 1, 6 do reply[#reply + 1] = totals[at] or '0' end
local oldest = NOW
for _, class in ipairs(CLASSES) do
  local first = redis.call('ZRANGE', PREFIX .. 'waiting:' .. class, 0, 0)[1]
  local created = first and redis.call('HGET', PREFIX .. 'job:' .. first, 'created_ms')
  oldest = math.min(oldest, tonumber(created or NOW))
end
reply[#reply + 1] = NOW - oldest
reply[#reply + 1] = redis.call('EXISTS', PREFIX .. 'wanted')
reply[#reply + 1] = redis.call('EXISTS', PREFIX .. 'paused')
local blocked = redis.call('ZRANGE', PREFIX .. 'parked', before, before + MOST - 1)
reply[#reply + 1] = #blocked
local reasons = {}
for _, name in ipairs(blocked) do
  local account = account_of(name)
  for _, class in ipairs(CLASSES) do
    local jobs = redis.call('ZCARD', backlog_key(class, account))
    reasons[account.blocked] = (reasons[account.blocked] or 0) + jobs
  end
end
for reason, jobs in pairs(reasons) do
  reply[#reply + 1], reply[#reply + 2] = reason, jobs
end
return reply
