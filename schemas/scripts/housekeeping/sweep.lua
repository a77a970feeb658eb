-- End waiting jobs that are out of time, foreground jobs that nobody listened to for a grace, and
-- jobs set aside for a model that no worker serves any more. Running jobs are ended by their
-- workers, which are told here.
-- ARGV: grace_ms, most jobs of each kind
-- Returns how many jobs were looked at, of the kind with most
-- Subscribers are counted on this server alone: on a cluster readers subscribe where the lane
-- lives.
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local grace_ms, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local AGAIN_MS = 1000
local MODEL_CHANGED = '"state":"failed","error":{"code":"model_changed","message":"the model was '
  .. 'replaced while the job ran, and another cannot go on with it: submit the job again",'
  .. '"status":503,"retryable":true}'
-- Five looks in a grace at each foreground job, but of all of them no more than five a millisecond:
-- a look takes some 30 us, in which nobody else is served.
local LOOKS_A_GRACE, LOOKS_A_MS = 5, 5
local num_lonely = redis.call('ZCARD', PREFIX .. 'orphans')
local look_ms = math.ceil(math.max(grace_ms / LOOKS_A_GRACE, num_lonely / LOOKS_A_MS))
write_when_full()

local function due(name)
  return redis.call('ZRANGEBYSCORE', PREFIX .. name, '-inf', NOW, 'LIMIT', 0, most)
end

local function is_heard(job)
  local names = {}
  for channel in string.gmatch(job.channels, '[^\n]+') do names[#names + 1] = channel end
  if #names == 0 then return false end
  local counts = redis.call('PUBSUB', 'NUMSUB', unpack(names))
  for at = 2, #counts, 2 do
    if tonumber(counts[at]) > 0 then return true end
  end
  return false
end

local function look(job)
  local orphaned = redis.call('HGET', job.key, 'orphaned')
  if is_heard(job) then
    if orphaned then redis.call('HDEL', job.key, 'orphaned') end
  elseif not orphaned then
    redis.call('HSET', job.key, 'orphaned', NOW)
  elseif math.abs(NOW - orphaned) >= grace_ms then
    cancel(job)
    return job.running
  end
  return true
end

local function is_served(fingerprint)
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'workers', NOW, '+inf')) do
    if redis.call('HGET', PREFIX .. 'worker:' .. worker, 'fingerprint') == fingerprint then return true end
  end
  return false
end

local expired = due('deadlines')
for _, id in ipairs(expired) do
  local job = load(id)
  if not job or job.ended then
    redis.call('ZREM', PREFIX .. 'deadlines', id)
  elseif job.running then
    ask_attention(job)
    redis.call('ZADD', PREFIX .. 'deadlines', NOW + AGAIN_MS, id)
  else
    local is_late = job.deadline and NOW >= tonumber(job.deadline)
    settle_failed(job, 'expired', is_late and EXPIRED or NOT_STARTED)
  end
end

bring_near('orphans', math.max(FIRST_LOOK_MS, look_ms))
local lonely = due('orphans')
for _, id in ipairs(lonely) do
  local job = load(id)
  if job and not job.ended and look(job) then
    redis.call('ZADD', PREFIX .. 'orphans', NOW + look_ms, id)
  else
    redis.call('ZREM', PREFIX .. 'orphans', id)
  end
end
bring_near('foreign', ASIDE_MS)
local aside = due('foreign')
for _, id in ipairs(aside) do
  local job = load(id)
  if not job or job.state ~= 'ready' then
    redis.call('ZREM', PREFIX .. 'foreign', id)
  elseif is_served(redis.call('HGET', job.key, 'aside')) then
    put_aside(job, redis.call('HGET', job.key, 'aside'))
  else
    settle_failed(job, 'failed', MODEL_CHANGED)
  end
end
publish()
return {math.max(#expired, #lonely, #aside)}
