-- What is known of a job. ARGV: tenant, job
-- Returns: state, tokens, background, cancel, created_ms, started_ms, ended_ms, deadline, owner, class,
-- metadata as JSON, and while it waits: position (1: the next), reason, eta_ms (each empty: none); or missing

local key = PREFIX .. 'job:' .. ARGV[2]
local values = redis.call('HMGET', key, 'tenant', 'state', 'position', 'background', 'cancel',
  'created_ms', 'started_ms', 'ended_ms', 'deadline', 'owner', 'class', 'account', 'entry', 'metadata')
if values[1] ~= ARGV[1] then return {'missing'} end
local reply = {}
for at = 2, 11 do reply[at - 1] = values[at] or '' end
reply[11], reply[12], reply[13], reply[14] = values[14] or '', '', '', ''
if values[2] ~= 'ready' then return reply end

local function eta(ahead, least_ms)
  local interval, ends = pace()
  if ends == 0 then return '' end
  return math.ceil(math.max(ahead * interval, least_ms))
end

-- A claimed job counts as the next: it waits for its worker alone.
local function place()
  local class, account = values[11], account_of(values[12])
  local has_worker = redis.call('ZCOUNT', PREFIX .. 'workers', NOW, '+inf') > 0
  local otherwise = has_worker and 'capacity' or 'no_worker'
  if values[13] then return 1, values[14] == 'suspect' and 'suspect' or otherwise, eta(0, 0) end
  local begin_ms = redis.call('ZSCORE', PREFIX .. 'delayed', ARGV[2])
  local rank = redis.call('ZRANK', backlog_key(class, account), ARGV[2])
    or redis.call('ZCARD', backlog_key(class, account))
  local ahead, foreign = num_ahead(class, account, rank)
  if begin_ms then return ahead + 1, 'delayed', eta(ahead, begin_ms - NOW) end
  if account.blocked then
    local wake_ms = tonumber(redis.call('ZSCORE', PREFIX .. 'parked', account.name) or NEVER)
    return ahead + 1, account.blocked, eta(ahead, wake_ms < NEVER and wake_ms - NOW or 0)
  end
  return ahead + 1, foreign > 0 and has_worker and 'turn' or otherwise, eta(ahead, 0)
end

reply[12], reply[13], reply[14] = place()
return reply
