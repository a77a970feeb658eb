-- Hand on what is held by workers whose lease ended, or that have none. Other queues call the time of
-- a lease visibility timeout; here it is a worker's, on all its jobs.
-- ARGV: most entries, which bounds the workers too
-- Returns how many entries were handed on
-- Calls functions of lane.lua (joined by schemas/redis/script.py).
--
-- Blame for poison jobs: a crash makes suspects of the jobs that had not committed a first step, and
-- of those that met too many crashes later. A suspect runs alone until it has passed its trial. Only a
-- job that runs alone when its worker dies is charged: 2 for a crash that a supervisor saw, 1 for a
-- lease that merely lapsed. At 4 a job is dead.

local DEADLY = 4
local TRIAL_TOKENS = 64 -- what may be computed and not logged when a worker dies
local OFTEN, TOO_OFTEN = 4, 8 -- crashes met while decoding: then alone for a trial, then to the end
local NO_END = 2147483647
local MOST_DEAD = 1000
local DEAD = '"state":"dead","error":{"code":"worker_crashed","message":"the job was given up: '
  .. 'every worker that ran it alone crashed or was lost","status":500}'

local budget, count, num_forgotten = tonumber(ARGV[1]), 0, 0
local is_done = {} -- workers that are gone: whether nothing is theirs any more
write_when_full()

bring_near('workers', tonumber(redis.call('HGET', PREFIX .. 'counts', 'longest_lease_ms') or 0))

-- Gone from here a worker is fenced as a whole, however many calls its entries take.
local lapsed = redis.call('ZRANGEBYSCORE', PREFIX .. 'workers', '-inf', NOW, 'LIMIT', 0, budget)
for _, worker in ipairs(lapsed) do
  redis.call('ZREM', PREFIX .. 'workers', worker)
  forget_worker(worker)
  redis.call('HINCRBY', PREFIX .. 'counts', 'lapsed', 1)
end

local live = {}
for _, worker in ipairs(redis.call('ZRANGE', PREFIX .. 'workers', 0, -1)) do live[worker] = true end

-- The list is bounded by time and by number; what number pushes out is counted.
local function bound_the_dead()
  local key = PREFIX .. 'dead'
  for _, line in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', 16)) do
    local is_old = tonumber(string.match(line[1], '^%d+')) < NOW - DEAD_TTL_S * 1000
    if not is_old and redis.call('XLEN', key) <= MOST_DEAD then break end
    redis.call('XDEL', key, line[1])
    redis.call('DEL', PREFIX .. 'job:' .. line[2][2] .. ':request')
    if not is_old then redis.call('HINCRBY', PREFIX .. 'counts', 'dead_dropped', 1) end
  end
end

local function bury(job, blame)
  local told = redis.call('HMGET', job.key, 'class', 'digest', 'created_ms', 'crashes', 'crashed_on')
  local num_bytes = redis.call('STRLEN', job.key .. ':request')
  settle_failed(job, 'dead', DEAD)
  redis.call('HINCRBY', PREFIX .. 'counts', 'buried', 1)
  if job.erase then return end
  local entry = redis.call('XADD', PREFIX .. 'dead', '*', 'job', job.id, 'reason', 'worker_crashed',
    'tenant', job.tenant, 'class', told[1], 'digest', told[2], 'request_bytes', num_bytes,
    'num_tokens', job.position, 'deliveries', job.epoch, 'crashes', told[4], 'blame', blame,
    'workers', told[5], 'created_ms', told[3], 'died_ms', NOW)
  redis.call('HSET', job.key, 'dead', entry)
  redis.call('EXPIRE', PREFIX .. 'dead', DEAD_TTL_S)
  bound_the_dead()
end

local function put_on_trial(job, position)
  if not job.trial or tonumber(job.trial) < position then
    job.trial = position
    redis.call('HSET', job.key, 'trial', position)
  end
end

-- Returns the job's blame, if it met the crash alone.
local function accuse(job, worker, how)
  local crashes = redis.call('HINCRBY', job.key, 'crashes', 1)
  local names = redis.call('HGET', job.key, 'crashed_on')
  redis.call('HSET', job.key, 'crashed_on', names and names .. ' ' .. worker or worker)
  if crashes >= TOO_OFTEN then
    put_on_trial(job, NO_END)
  elseif crashes >= OFTEN then
    put_on_trial(job, job.position + TRIAL_TOKENS)
  elseif job.state == 'admitting' then
    put_on_trial(job, job.position + 1)
  end
  if job.ready ~= 'suspect' or not job.on_trial then return 0 end
  return redis.call('HINCRBY', job.key, 'blame', how == 'crashed' and 2 or 1)
end

local function hand_on(ready, entry, worker, how)
  local line = redis.call('XRANGE', ready_key(ready), entry, entry)[1]
  local job = line and load(line[2][2])
  if not job or job.ended or not is_entry_of(job, ready, entry) then return unclaim(ready, entry) end
  if job.running then redis.call('HINCRBY', PREFIX .. 'counts', 'reaped', 1) end
  local is_to_blame = how ~= 'left' and job.running and not job.cancel
  job.on_trial = job.trial
  local blame = is_to_blame and accuse(job, worker, how) or 0
  if blame >= DEADLY then bury(job, blame) else requeue(job, how) end
end

local function reap_stream(ready)
  local key = ready_key(ready)
  if redis.call('EXISTS', key) == 0 then return end
  for _, consumer in ipairs(redis.pcall('XINFO', 'CONSUMERS', key, GROUP)) do
    local name, pending = consumer[2], consumer[4]
    if not live[name] then
      local how = redis.call('GET', PREFIX .. 'ended:' .. name) or 'lapsed'
      local most = math.min(pending, budget - count)
      if most > 0 then
        for _, held in ipairs(redis.call('XPENDING', key, GROUP, '-', '+', most, name)) do
          hand_on(ready, held[1], name, how)
          count = count + 1
        end
      end
      is_done[name] = is_done[name] ~= false and most == pending
      if most == pending and num_forgotten < budget then
        redis.call('XGROUP', 'DELCONSUMER', key, GROUP, name)
        num_forgotten = num_forgotten + 1
      end
    end
  end
end

for _, ready in ipairs(READY) do reap_stream(ready) end
for name, is_so in pairs(is_done) do
  if is_so then redis.call('DEL', PREFIX .. 'ended:' .. name) end
end
publish()
return {count}
