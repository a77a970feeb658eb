-- How full the lane is. Returns: claimed or running, ended so far, average milliseconds between two
-- ends while it is busy, handed back, delayed, waiting of class high, normal, batch; then
-- (reason, jobs) for those whose account's limits hold them

local reply = {num_claimed(), redis.call('HGET', PREFIX .. 'counts', 'ended') or '0', tostring((pace())),
  num_handed_back(), redis.call('ZCARD', PREFIX .. 'delayed')}
for _, class in ipairs(CLASSES) do
  reply[#reply + 1] = redis.call('ZCARD', PREFIX .. 'waiting:' .. class)
end
local reasons = {}
for _, name in ipairs(redis.call('ZRANGE', PREFIX .. 'parked', 0, -1)) do
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
