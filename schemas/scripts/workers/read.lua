-- Claim at most `count` jobs: those handed back first, then those of text, high, normal and batch. In a
-- class the account goes first whose tenant was served least (fair queueing).
-- Prefix affinity: a job is left for a moment to the worker that began the latest job with the same
-- `affinity`, and a worker passes over a few jobs for one whose prompt it has; see `chosen`.
-- Workers are one consumer group of each stream of ready jobs.
-- ARGV
--   worker
--   ticket: a new one for each call. The answer is kept under it, so a call that is repeated
--     because its reply was lost gives the same entries, and none is left claimed and unknown
--   count
--   alone: 1 if the worker holds nothing, and takes nothing beside a suspect; else 0
--   class: claim only what waits in it and the higher ones, for a full worker whose lower jobs give
--     way; empty: all
--   microseconds that a step of the worker takes (0: unknown), to leave other workers their share;
--     empty: it takes what it asks for, whatever the others could take
--   most of the class batch; those that were handed back are not counted
--   held rows of a full worker, where a tenant gives a row to another; empty: none does. As JSON, for
--     each class [tenant, weight, {tenant: rows}]: the tenant that has the most rows for its weight,
--     of those that would give way to the class. If nothing else is claimed, one job is that would
--     get a row from that tenant
-- Returns one of
--   'entries', then (ready, entry, job) for each
--   'idle', the last id of `news`, to wait for newer ones, and the milliseconds until something may
--     be read all the same (-1: nothing is due)
--   'lost': the worker has no lease
--   'empty': a suspect waits. The worker must hand back what it has and read again, alone
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local worker, ticket, count, alone, down_to = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local asked, step_us, most_batch = count, tonumber(ARGV[6]), tonumber(ARGV[7])
local held_rows = ARGV[8] ~= '' and cjson.decode(ARGV[8]) or {}
local worker_key = PREFIX .. 'worker:' .. worker
local MOST = 64 -- entries moved in one call
local SUSPECT_WAIT_MS, TRIER_MS = 2000, 10000
write_when_full()
if not has_lease(worker) then return {'lost'} end
local last = redis.call('HMGET', worker_key, 'ticket', 'taken')
if last[1] == ticket then return cjson.decode(last[2]) end

local function newest_news()
  local newest = redis.call('XREVRANGE', PREFIX .. 'news', '+', '-', 'COUNT', 1)[1]
  return newest and newest[1] or '0-0'
end

if redis.call('EXISTS', PREFIX .. 'paused') == 1 then
  redis.call('SET', PREFIX .. 'idle', 1, 'EX', 60)
  return {'idle', newest_news(), -1}
end

local function due(name)
  return redis.call('ZRANGEBYSCORE', PREFIX .. name, '-inf', NOW, 'LIMIT', 0, MOST)
end

local function wake()
  for _, name in ipairs(due('parked')) do unblock(account_of(name)) end
  for _, id in ipairs(due('delayed')) do
    local key = PREFIX .. 'job:' .. id
    local job = redis.call('HMGET', key, 'account', 'class', 'due')
    redis.call('ZREM', PREFIX .. 'delayed', id)
    if job[1] then join_backlog(job[2], account_of(job[1]), id, job[3], NOW) end
  end
end

-- The last job of the class batch that went up waits there still, and could begin.
local function is_one_aged()
  local id = redis.call('GET', PREFIX .. 'aged')
  if not id or not redis.call('ZSCORE', PREFIX .. 'waiting:normal', id) then return false end
  return not account_of(redis.call('HGET', PREFIX .. 'job:' .. id, 'account')).blocked
end

-- What waited too long goes one class up, once, unless its account's own limits hold it. Of the
-- class batch one job at a time goes up, behind those that wait there: the rest of a large file
-- would be before all who come later.
local function age(class)
  bring_near('waiting:' .. class, PATIENCE_MS[class])
  for _, id in ipairs(due('waiting:' .. class)) do
    local key = PREFIX .. 'job:' .. id
    local name, moved = unpack(redis.call('HMGET', key, 'account', 'moved'))
    local account = name and account_of(name)
    if class == 'batch' and is_one_aged() then break end
    if not account or account.blocked or moved then
      redis.call('ZADD', PREFIX .. 'waiting:' .. class, NOW + PATIENCE_MS[class], id)
    else
      local due_us = redis.call('ZSCORE', backlog_key(class, account), id)
      leave_backlog(class, account, id)
      if class == 'batch' then
        due_us = NOW_US + DUE_MS * 1000
        redis.call('SET', PREFIX .. 'aged', id, 'PX', PATIENCE_MS.batch)
      end
      join_backlog(ABOVE[class], account, id, due_us, NOW)
      redis.call('HSET', key, 'class', ABOVE[class], 'moved', 1)
    end
  end
end

local function fail_budget(id, renews_ms)
  local job = load(id)
  settle_failed(job, 'failed', string.format(OVER_BUDGET, renews_ms / 1000))
end

-- Why the account's next job may not begin now, and when to look again.
local function hindrance(account, job)
  if account.max_running and account.running >= account.max_running then return 'running' end
  if job.waits then return over_limit(account, job.bound, 0) end
  local left, renews_ms = budget_left(account)
  if left <= 0 then return 'spent', renews_ms end
end

local STATED_MS = 2500 -- who has room states it every second

local function held_by_worker()
  local held = {}
  for _, ready in ipairs(READY) do
    local consumers = redis.pcall('XINFO', 'CONSUMERS', ready_key(ready), GROUP)
    for _, consumer in ipairs(consumers.err and {} or consumers) do
      held[consumer[2]] = (held[consumer[2]] or 0) + consumer[4]
    end
  end
  return held
end

-- A job goes to the worker that has the beginning of its prompt in the cache, while that one has
-- room and not much more to do. Others leave it the job for NEAR_MS, and take one of theirs first
-- that waits behind it; a job is passed over MOST_PASSED times.
local NEAR_MS, NEAR_LOOK, MOST_PASSED = 100, 16, 16
local held, is_one_left = nil, false

local function is_busier(one, other)
  held = held or held_by_worker()
  return (held[one] or 0) > 1.5 * (held[other] or 0) + 4
end

-- The worker that has the beginning of a job's prompt; nil where none is known that takes jobs.
local function near_of(affinity)
  local name = affinity and redis.call('GET', near_key(affinity))
  if not name or name == worker then return name or nil end
  local until_ms = redis.call('ZSCORE', PREFIX .. 'workers', name)
  if not until_ms or tonumber(until_ms) < NOW then return nil end
  return not redis.call('HGET', PREFIX .. 'worker:' .. name, 'draining') and name or nil
end

local function could_take(name)
  local room, stated_ms = unpack(redis.call('HMGET', PREFIX .. 'worker:' .. name, 'room', 'stated_ms'))
  return stated_ms and tonumber(room) > 0 and math.abs(NOW - stated_ms) < STATED_MS
    and not is_busier(name, worker)
end

-- Which of an account's jobs this worker takes: mostly the first. Nil and true: one is left to
-- another. One that waits for a rate passes over none, since it would hold up the account. `own` asks for one whose prompt begins as one that this worker has.
local function chosen(class, account, own)
  local backlog = backlog_key(class, account)
  local first = redis.call('ZRANGE', backlog, 0, 0)[1]
  if not first then return nil, false end
  local affinity, passed, created_ms, deadline, start_by, priority = unpack(redis.call('HMGET',
    PREFIX .. 'job:' .. first, 'affinity', 'passed', 'created_ms', 'deadline', 'start_by', 'priority'))
  local near = near_of(affinity)
  if near == worker or not near and not own then return first end
  if not deadline and not start_by and tonumber(passed or 0) < MOST_PASSED then
    for _, id in ipairs(redis.call('ZRANGE', backlog, 1, NEAR_LOOK)) do
      local shared, waits, its = unpack(redis.call('HMGET', PREFIX .. 'job:' .. id, 'affinity', 'waits',
        'priority'))
      if shared and not waits and its == priority and redis.call('GET', near_key(shared)) == worker then
        redis.call('HINCRBY', PREFIX .. 'job:' .. first, 'passed', 1)
        return id
      end
    end
  end
  if own then return nil, true end
  if NOW - (created_ms or 0) < NEAR_MS and could_take(near) then
    is_one_left = true
    return nil, true
  end
  return first
end

-- On a full worker an account's next job may begin once it has waited for ROW_WAIT_MS, if the tenant
-- that gives a row then has as many for its weight as the job's tenant, of this worker's rows and of
-- the jobs of all workers. Nil and true: it may not. The first ROW_LOOK accounts are looked at.
local ROW_WAIT_MS, ROW_LOOK = 1000, 16

local function is_below_share(rows, account)
  local most, weight, counts = unpack(rows)
  local function is_below(own, most_rows)
    return (own + 1) / account.weight <= (most_rows - 1) / weight
  end
  local own, most_rows = counts[account.tenant] or 0, counts[most]
  local jobs = redis.call('HMGET', PREFIX .. 'running', account.tenant, most)
  -- Rows may be of jobs in other lanes, and a job may have several.
  return account.tenant ~= most and is_below(own, most_rows)
    and is_below(math.max(own, jobs[1] or 0), math.max(most_rows, jobs[2] or 0))
end

local function due_a_row(class, account)
  local id = redis.call('ZRANGE', backlog_key(class, account), 0, 0)[1]
  if not id then return nil, false end
  local look_ms = redis.call('ZSCORE', PREFIX .. 'waiting:' .. class, id)
  if not look_ms or NOW - (look_ms - PATIENCE_MS[class]) < ROW_WAIT_MS then return nil, true end
  if is_below_share(held_rows[class], account) then return id, false end
  return nil, true
end

-- The account and job whose turn it is in a class. Scores of `fair` may lag behind `served` for a
-- tenant with several accounts; what is found out of place is put right. `by_row` passes over
-- those that are due no row.
local function next_turn(class, own, by_row)
  local fair, at = PREFIX .. 'fair:' .. class, 0
  for _ = 1, 2 * MOST do
    local name, score = unpack(redis.call('ZRANGE', fair, at, at, 'WITHSCORES'))
    if not name or by_row and at >= ROW_LOOK then return nil end
    local account = account_of(name)
    local v = redis.call('GET', served_key(class, account))
    if not v then -- none of its jobs began for so long that it was forgotten, and its place was not
      redis.call('SET', served_key(class, account), score, 'EX', IDLE_TTL_S)
      v = score
    end
    local lags, id, is_left = tonumber(v) > tonumber(score), nil, false
    if not lags and by_row then
      id, is_left = due_a_row(class, account)
    elseif not lags then
      id, is_left = chosen(class, account, own)
    end
    if lags then
      redis.call('ZADD', fair, v, name)
    elseif is_left then
      at = at + 1
    elseif not id then
      redis.call('ZREM', fair, name)
    else
      local job = {key = PREFIX .. 'job:' .. id}
      local known = redis.call('HMGET', job.key, 'cost', 'bound', 'waits', 'tenant')
      job.cost, job.bound, job.waits = tonumber(known[1] or 1), tonumber(known[2] or 1), known[3]
      job.tenant = known[4] or account.tenant
      local reason, wake_ms = hindrance(account, job)
      if not reason then return account, id, job, v end
      if reason == 'spent' then fail_budget(id, wake_ms) else block(account, reason, wake_ms) end
    end
  end
end

local function claim(class, own, by_row)
  local account, id, job, v = next_turn(class, own, by_row)
  if not account then return false end
  leave_backlog(class, account, id)
  tally(account, 'queued', -1)
  count_tokens(-job.cost)
  tally_running(account, job.tenant, class, 1)
  if job.waits then draw(account, job.key, job.bound) end
  redis.call('HSET', PREFIX .. 'counts', 'clock:' .. class, v)
  serve(account, class, job.cost)
  local entry = redis.call('XADD', ready_key(class), '*', 'job', id)
  redis.call('HSET', job.key, 'entry', entry, 'ready', class, 'turn', NOW_US)
  if held then held[worker] = (held[worker] or 0) + 1 end
  return true
end

local function take(ready)
  local command = {'XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS',
    ready_key(ready), '>'}
  local reply = redis.pcall(unpack(command))
  if reply and reply.err then
    if string.find(reply.err, 'NOGROUP', 1, true) then -- the first read of this stream
      redis.call('XGROUP', 'CREATE', ready_key(ready), GROUP, '0', 'MKSTREAM')
    end
    reply = redis.call(unpack(command))
  end
  return reply and reply[1][2] or {}
end

local taken = {'entries'}

local function collect(ready)
  for _, entry in ipairs(take(ready)) do
    local id, fields = entry[1], entry[2]
    if fields[1] == 'job' then
      taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = ready, id, fields[2]
      count = count - 1
    else
      unclaim(ready, id) -- not an entry of ours
    end
  end
end

-- Milliseconds that the first suspect nobody has waits; nil without one.
local function suspect_waits_ms()
  local key, last = ready_key('suspect'), '-'
  if redis.call('XLEN', key) == 0 then return nil end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    for at = 1, #group, 2 do
      if group[at] == 'last-delivered-id' then last = '(' .. group[at + 1] end
    end
  end
  local first = redis.call('XRANGE', key, last, '+', 'COUNT', 1)[1]
  return first and math.abs(NOW - tonumber(string.match(first[1], '^%d+')))
end

-- A suspect goes to a worker that holds nothing. Where none comes by for a while, one at a time is
-- asked to become such, and stays the one until all suspects had their turn.
local function must_be_empty(waits_ms)
  local trier = redis.call('GET', PREFIX .. 'trier')
  if trier and redis.call('TTL', PREFIX .. 'trier') > TRIER_MS / 1000 then trier = false end
  if alone ~= '1' and trier ~= worker and (trier or waits_ms < SUSPECT_WAIT_MS) then return false end
  redis.call('SET', PREFIX .. 'trier', worker, 'PX', TRIER_MS)
  return alone ~= '1'
end

-- Jobs that only a worker of this model can go on with.
local function adopt()
  local own = PREFIX .. 'foreign:' .. (redis.call('HGET', worker_key, 'fingerprint') or '')
  for _, id in ipairs(redis.call('SRANDMEMBER', own, count)) do
    local job = load(id)
    redis.call('SREM', own, id)
    if redis.call('ZREM', PREFIX .. 'foreign', id) == 1 and job.state == 'ready' then requeue(job, 'model_back') end
  end
end

-- What waits is shared while several workers have room. Each takes what evens out how long a step
-- is times how many jobs it has, and what others leave lying; who has none takes one at once.
local SHARE_MS = 250

-- Workers with room, this one first: {jobs held, room, steps a second}. None where nobody need be
-- thought of: this one is alone, or so many wait that there are as many for each.
local function takers(waiting)
  if waiting == 0 or waiting >= count * redis.call('ZCARD', PREFIX .. 'workers') then return {} end
  local live = redis.call('ZRANGEBYSCORE', PREFIX .. 'workers', NOW, '+inf')
  held = held or held_by_worker()
  local found, total, known = {}, 0, 0
  for _, name in ipairs(live) do
    local room, cost, stated_ms, drains =
      unpack(redis.call('HMGET', PREFIX .. 'worker:' .. name, 'room', 'step_us', 'stated_ms', 'draining'))
    if name == worker then room, cost, stated_ms, drains = count, step_us, NOW, false end
    if stated_ms and not drains and tonumber(room) > 0 and math.abs(NOW - stated_ms) < STATED_MS then
      local speed = tonumber(cost) > 0 and 1e6 / cost
      if speed then total, known = total + speed, known + 1 end
      local one = {name = name, held = held[name] or 0, room = tonumber(room), speed = speed}
      table.insert(found, name == worker and 1 or #found + 1, one)
    end
  end
  for _, one in ipairs(found) do one.speed = one.speed or (known > 0 and total / known or 1) end
  return found
end

-- What brings this worker to the level at which the workers with room have taken all that waits.
local function even_share(all, waiting)
  local low, high, room = 0, 0, 0
  for _, one in ipairs(all) do
    room = room + one.room
    high = math.max(high, (one.held + one.room) / one.speed)
  end
  if room <= waiting then return count end
  for _ = 1, 30 do
    local level, taken = (low + high) / 2, 0
    for _, one in ipairs(all) do
      taken = taken + math.max(0, math.min(one.room, level * one.speed - one.held))
    end
    if taken < waiting then low = level else high = level end
  end
  local me = all[1]
  return math.max(me.held == 0 and 1 or 0, math.ceil(high * me.speed - me.held - 0.001))
end

local others = {} -- workers with room, this one first

local function share()
  local waiting = redis.call('XLEN', ready_key('resume')) - num_pending('resume')
  for _, class in ipairs(CLASSES) do
    if class ~= 'batch' or most_batch >= asked then -- else nobody takes much of it
      waiting = waiting + redis.call('ZCARD', PREFIX .. 'waiting:' .. class)
    end
  end
  local left_ms = redis.call('HGET', worker_key, 'left_ms')
  others = takers(waiting)
  local part = #others > 1 and even_share(others, waiting) or count
  if part > 0 or left_ms and math.abs(NOW - left_ms) >= SHARE_MS then
    if left_ms then redis.call('HDEL', worker_key, 'left_ms') end
    return part > 0 and math.min(part, count) or count
  end
  if not left_ms then redis.call('HSET', worker_key, 'left_ms', NOW) end
  return 0
end

-- Whether no worker with room has much less to do than this one.
local function may_take_more()
  for at = 2, #others do
    if is_busier(worker, others[at].name) then return false end
  end
  return #others > 1
end

local function state_room(num_taken)
  if not step_us then return end
  local room = down_to == '' and asked - num_taken or 0
  redis.call('HSET', worker_key, 'room', room, 'step_us', step_us, 'stated_ms', NOW)
end

if down_to == '' then adopt() end
local waits_ms = down_to == '' and suspect_waits_ms()
if waits_ms then
  if must_be_empty(waits_ms) then return {'empty'} end
  if alone == '1' then
    count = 1
    collect('suspect')
  end
end
wake()
age('batch')
age('normal')
if step_us and down_to == '' then count = math.min(count, share()) end
local is_left = count == 0 and #taken == 1
for _, ready in ipairs(READY) do
  if count <= 0 then break end
  if ready ~= 'resume' and ready ~= 'suspect' then
    for _ = 1, ready == 'batch' and math.min(count, most_batch) or count do
      if not claim(ready) then break end
    end
    collect(ready)
  elseif ready == 'resume' and down_to == '' then
    collect(ready)
  end
  if ready == down_to then break end
end
-- Beyond its share, what begins as it has it already.
for _, class in ipairs(CLASSES) do
  count = asked - (#taken - 1) / 3
  if class == 'batch' or down_to ~= '' then break end
  local num_near = 0
  while num_near < count and may_take_more() and claim(class, true) do num_near = num_near + 1 end
  if num_near > 0 then collect(class) end
end
for _, class in ipairs(CLASSES) do
  if #taken == 1 and held_rows[class] and claim(class, false, true) then
    count = 1
    collect(class)
  end
end
publish()
state_room((#taken - 1) / 3)
if #taken > 1 then
  redis.call('HSET', worker_key, 'ticket', ticket, 'taken', cjson.encode(taken))
  return taken
end

if down_to ~= '' then return {'idle', '0-0', -1} end
redis.call('SET', PREFIX .. 'idle', 1, 'EX', 60)
local wait_ms = is_one_left and NEAR_MS or is_left and SHARE_MS or waits_ms and SUSPECT_WAIT_MS or -1
for _, name in ipairs({'parked', 'delayed'}) do
  local at = tonumber(redis.call('ZRANGE', PREFIX .. name, 0, 0, 'WITHSCORES')[2] or NEVER)
  if at < NEVER and (wait_ms < 0 or at - NOW < wait_ms) then wait_ms = math.max(0, at - NOW) end
end
return {'idle', newest_news(), wait_ms}
