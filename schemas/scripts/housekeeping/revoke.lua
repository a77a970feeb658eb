-- Cancel the jobs of accounts whose API keys are revoked or expired.
-- ARGV: most jobs, then the accounts
-- Returns how many jobs were cancelled
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local most, count = tonumber(ARGV[1]), 0
local MOST_DELAYED = 2000 -- delayed jobs looked at, the next to begin; others are met when they begin
write_when_full()

local function cancel_all(ids, account)
  for _, id in ipairs(ids) do
    local job = count < most and load(id)
    if job and job.account == account.name and not job.ended and not job.cancel then
      cancel(job)
      count = count + 1
    end
  end
end

local function claimed()
  local ids = {}
  for _, ready in ipairs(READY) do
    for _, entry in ipairs(redis.call('XRANGE', ready_key(ready), '-', '+')) do
      ids[#ids + 1] = entry[2][2]
    end
  end
  return ids
end

for at = 2, #ARGV do
  local account = account_of(ARGV[at])
  if account.running > 0 then cancel_all(claimed(), account) end
  for _, class in ipairs(CLASSES) do
    if account.queued == 0 then break end
    cancel_all(redis.call('ZRANGE', backlog_key(class, account), 0, most - 1), account)
  end
  if account.queued > 0 then
    cancel_all(redis.call('ZRANGE', PREFIX .. 'delayed', 0, MOST_DELAYED - 1), account)
  end
end
publish()
return {count}
