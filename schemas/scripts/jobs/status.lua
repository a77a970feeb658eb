-- Tell what is known of a job.
-- ARGV: tenant, job
-- Returns 'missing'; or state, tokens, background, cancel, created_ms, started_ms, ended_ms,
-- deadline, owner, class, metadata as JSON, and while it waits: position (1: the next), reason,
-- eta_ms (each may be empty); then its history: see note_history; at last 'text' where it would go
-- on elsewhere from its text
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local key = PREFIX .. 'job:' .. ARGV[2]
local values = redis.call('HMGET', key, 'tenant', 'state', 'position', 'background', 'cancel',
  'created_ms', 'started_ms', 'ended_ms', 'deadline', 'owner', 'class', 'account', 'entry', 'metadata',
  'ready', 'waits', 'bound', 'history', 'resumes')
if values[1] ~= ARGV[1] then return {'missing'} end
local reply = {}
for at = 2, 11 do reply[at - 1] = values[at] or '' end
reply[11], reply[12], reply[13], reply[14] = values[14] or '', '', '', ''
reply[15], reply[16] = values[18] or '', values[19] or ''
if values[2] ~= 'ready' then return reply end

local has_worker = is_staffed()

-- Nobody knows when a worker comes.
local function eta(ahead, least_ms)
  local interval, ends = pace()
  if not has_worker or ends == 0 and least_ms <= 0 then return '' end
  return math.ceil(math.max(ends > 0 and ahead * interval or 0, least_ms))
end

-- What of its account's limits it waits for, behind `rank` others of the account, and until when.
local function hindrance(account, rank)
  if account.max_running and account.running >= account.max_running then return 'running', NOW end
  if values[16] then
    local reason, wake_ms = over_limit(account, tonumber(values[17]), rank)
    if reason then return reason, wake_ms end
  end
  if account.blocked then
    local wake_ms = tonumber(redis.call('ZSCORE', PREFIX .. 'parked', account.name) or NEVER)
    return account.blocked, wake_ms < NEVER and wake_ms or NOW
  end
end

-- A claimed job counts as the next: it waits for its worker alone.
local function place()
  local class, account = values[11], account_of(values[12])
  local is_paused = redis.call('EXISTS', PREFIX .. 'paused') == 1
  if values[13] then
    local reason = values[15] == 'suspect' and 'suspect' or 'capacity'
    if is_paused then return 1, 'paused', '' end
    return 1, has_worker and reason or 'no_worker', eta(0, 0)
  end
  local begin_ms = redis.call('ZSCORE', PREFIX .. 'delayed', ARGV[2])
  local rank = redis.call('ZRANK', backlog_key(class, account), ARGV[2])
    or redis.call('ZCARD', backlog_key(class, account))
  local ahead, foreign = num_ahead(class, account, rank)
  if begin_ms then return ahead + 1, 'delayed', eta(ahead, begin_ms - NOW) end
  if is_paused then return ahead + 1, 'paused', '' end
  if not has_worker then return ahead + 1, 'no_worker', '' end
  local reason, wake_ms = hindrance(account, rank)
  if reason then return ahead + 1, reason, eta(ahead, wake_ms - NOW) end
  return ahead + 1, foreign > 0 and 'turn' or 'capacity', eta(ahead, 0)
end

reply[12], reply[13], reply[14] = place()
return reply
