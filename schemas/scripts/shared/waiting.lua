
-- The jobs that wait, and whose turn it is: weighted fair queueing (WFQ) by virtual time,
-- without the rounds of DRR. A tenant is charged the tokens that were computed for it.
--   backlog:<class>:<account>  zset: the account's waiting jobs of a class, by when they are due
--   waiting:<class>            zset: all of them, by when to look whether they waited too long
--   fair:<class>               zset: accounts that may be served, by their tenant's virtual time
--   served:<class>:<tenant>    that time: tokens computed for the tenant, divided by its weight
--   delayed                    zset: jobs, by when they may begin
--   parked                     zset: accounts that their limits block, by when to look again
--   news                       stream: gets an entry when something may be read
--   idle                       key: a worker waits for news
--   near:<affinity>            text: the worker that began the latest of the jobs that share this
--   foreign                    zset: jobs with tokens of a model that is not here, by when they end
--   foreign:<fingerprint>      set: those of one model
-- A job is in one backlog or in `delayed` until its first claim; later it has an entry in a stream.
-- Calls functions of lane.lua and accounts.lua (joined by schemas/redis/script.py).

local CLASSES = {'text', 'high', 'normal', 'batch'} -- text: what no engine computes

local ABOVE = {normal = 'high', batch = 'normal'}

local PATIENCE_MS = {text = 0, high = 0, normal = 60000, batch = 900000} -- then a job goes one class up

local DUE_MS = 600000 -- the place in its account's backlog of a job without a deadline

local NEVER = 9e15

local NEAR_TTL_S = 600 -- then other prompts have taken the place in its cache

local function near_key(affinity)
  return PREFIX .. 'near:' .. affinity
end

-- Tokens of the prompts that wait for their first claim, by the guess of their submission.
local function count_tokens(amount)
  redis.call('HINCRBY', PREFIX .. 'counts', 'queued_tokens', amount)
end

local function backlog_key(class, account)
  return PREFIX .. 'backlog:' .. class .. ':' .. account.name
end

-- An account may be served from now on. Who comes back has no credit for the time away.
local function enter_turns(class, account)
  local fair, served = PREFIX .. 'fair:' .. class, served_key(class, account)
  if redis.call('ZSCORE', fair, account.name) then return end
  local own = tonumber(redis.call('GET', served) or 0)
  local head = redis.call('ZRANGE', fair, 0, 0, 'WITHSCORES')
  local clock = tonumber(head[2] or redis.call('HGET', PREFIX .. 'counts', 'clock:' .. class) or 0)
  if clock > own then redis.call('SET', served, clock, 'EX', IDLE_TTL_S) end
  redis.call('ZADD', fair, math.max(own, clock), account.name)
end

-- `due_us`: earliest first in the account's backlog. `since_ms`: when it began to wait.
local function join_backlog(class, account, id, due_us, since_ms)
  redis.call('ZADD', backlog_key(class, account), due_us, id)
  redis.call('ZADD', PREFIX .. 'waiting:' .. class, since_ms + PATIENCE_MS[class], id)
  if not account.blocked then enter_turns(class, account) end
end

local function leave_backlog(class, account, id)
  local key = backlog_key(class, account)
  redis.call('ZREM', PREFIX .. 'waiting:' .. class, id)
  local is_there = redis.call('ZREM', key, id) == 1
  if is_there and redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', PREFIX .. 'fair:' .. class, account.name)
  end
  return is_there
end

-- No job of the account begins until `wake_ms`, or until a slot of it is free.
local function block(account, reason, wake_ms)
  account.blocked = reason
  redis.call('HSET', account.key, 'blocked', reason, 'blocked_ms', NOW)
  redis.call('ZADD', PREFIX .. 'parked', wake_ms or NEVER, account.name)
  for _, class in ipairs(CLASSES) do redis.call('ZREM', PREFIX .. 'fair:' .. class, account.name) end
end

local function unblock(account)
  account.blocked = false
  redis.call('HDEL', account.key, 'blocked', 'blocked_ms')
  redis.call('ZREM', PREFIX .. 'parked', account.name)
  for _, class in ipairs(CLASSES) do
    if redis.call('EXISTS', backlog_key(class, account)) == 1 then enter_turns(class, account) end
  end
  announce()
end

-- A job that ends leaves its place in the queue, and gives its slot back.
function vacate(job)
  local account = account_of(job.account)
  if job.entry then
    unclaim(job.ready, job.entry)
    tally_running(account, job.tenant, job.class, -1)
    if account.blocked == 'running' then unblock(account) end
  else
    redis.call('ZREM', PREFIX .. 'delayed', job.id)
    leave_backlog(job.class, account, job.id)
    tally(account, 'queued', -1)
    count_tokens(-(redis.call('HGET', job.key, 'cost') or 0))
  end
  if job.stop then -- it was booked up to there
    local left = job.position - job.stop
    charge(job, account, 0, 0, left, left)
    job.stop = nil
    book()
  end
  if return_draw(job, account) and account.blocked == 'rate' then unblock(account) end
  add_usage(account, 'jobs', 1)
  if account.running + account.queued == 0 then redis.call('EXPIRE', account.key, IDLE_TTL_S) end
end

-- Jobs handed back, which nobody claimed yet.
local function num_handed_back()
  local total = redis.call('ZCARD', PREFIX .. 'foreign')
  for _, ready in ipairs({'suspect', 'resume'}) do
    local length = redis.call('XLEN', ready_key(ready))
    if length > 0 then total = total + length - num_pending(ready) end
  end
  return total
end

local function num_waiting()
  local total = redis.call('ZCARD', PREFIX .. 'delayed') + num_handed_back()
  for _, class in ipairs(CLASSES) do
    total = total + redis.call('ZCARD', PREFIX .. 'waiting:' .. class)
  end
  return total
end

local function num_claimed()
  local total = 0
  for _, ready in ipairs(READY) do total = total + num_pending(ready) end
  return total
end

-- About how many jobs begin before one that has `rank` others of its account before it: all of the
-- higher classes, and as many of each other account as have their turn until then. The second
-- number leaves out those of its own account.
local function num_ahead(class, account, rank)
  local ahead = num_handed_back()
  for _, higher in ipairs(CLASSES) do
    if higher == class then break end
    ahead = ahead + redis.call('ZCARD', PREFIX .. 'waiting:' .. higher)
  end
  local fair = PREFIX .. 'fair:' .. class
  local others = redis.call('ZCARD', PREFIX .. 'waiting:' .. class)
    - redis.call('ZCARD', backlog_key(class, account))
  local before = redis.call('ZRANK', fair, account.name)
  local accounts_beside = redis.call('ZCARD', fair) - (before and 1 or 0)
  local foreign = ahead + math.min(others, rank * accounts_beside + (before or 0))
  return foreign + rank, foreign
end
