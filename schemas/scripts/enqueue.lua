-- with lane, accounts, waiting
-- Accept a job, or say why not.
-- KEYS: the lane's prefix
-- ARGV: job id, digest of the body, the Job as JSON, reply channel, options as a JSON object:
--   tenant           "default"
--   class            "high" | "normal" | "batch"; "normal"
--   background       false: refused where no worker is, cancelled when nobody listens
--   timeout_ms       from now to the end; none
--   queue_timeout_ms until it is started, from when it may; none
--   not_before_ms    unix time, or delay_ms from now: waits at least until then; none
--   prompt_tokens    about how long the prompts are; 1
--   over_limit       "refuse" | "wait": what to do above the account's rates and budgets; "refuse"
--   account          {"name": .., "limits": {"weight": .., "max_running": .., ..}}; the tenant
--   max_queued       most jobs that may wait in the lane; 10000
--   ttl_s            how long the result is kept; 3600
--   note             a text that is put in the lane's outbox when the job ends; none
-- Returns: outcome, jobs that waited before, milliseconds after which to try again, a reason.
--   accepted | duplicate | mismatch | full | no_worker
--   limited (reason: queued | rate | budget), unmeetable (the deadline, at the live rate)
--   invalid (the reason is a sentence)
-- Its first write is one that Redis refuses when memory is full, so nothing is accepted by half.

local LOOK_MS = 2000 -- until the first look whether anybody listens
local DUE_MS = 600000 -- the place in its account's backlog of a job without a deadline
local KNOWN_ENDS = 10 -- that a rate to refuse by is made of
local YEAR_MS, LAST_MS, MOST = 31536000000, 4102444800000, 2 ^ 50

local options
local id, digest, request, channel = unpack(ARGV, 1, 4)

local function whole(least, most)
  return function(value)
    return type(value) == 'number' and value >= least and value <= most and value % 1 == 0,
      'a whole number from ' .. string.format('%.0f to %.0f', least, most)
  end
end

local function name(value)
  return type(value) == 'string' and value ~= '' and #value <= 256 and not string.find(value, '%c'),
    'a text of 1 to 256 bytes without control characters'
end

local function one_of(...)
  local words = {...}
  return function(value)
    for _, word in ipairs(words) do
      if value == word then return true end
    end
    return false, table.concat(words, ', ')
  end
end

local KINDS = {
  tenant = name,
  class = one_of('high', 'normal', 'batch'),
  background = function(value) return type(value) == 'boolean', 'true or false' end,
  timeout_ms = whole(1, YEAR_MS),
  queue_timeout_ms = whole(1, YEAR_MS),
  not_before_ms = whole(0, LAST_MS),
  delay_ms = whole(0, YEAR_MS),
  prompt_tokens = whole(0, MOST),
  over_limit = one_of('refuse', 'wait'),
  account = function(value) return type(value) == 'table', 'an object' end,
  max_queued = whole(0, MOST),
  ttl_s = whole(1, YEAR_MS / 1000),
  note = function(value)
    return type(value) == 'string' and value ~= '' and #value <= 4096, 'a text of 1 to 4096 bytes'
  end,
}
local ACCOUNT_KINDS = {name = name, limits = KINDS.account}
local LIMIT_KINDS = {}
for _, field in ipairs(LIMITS) do LIMIT_KINDS[field] = whole(1, MOST) end
LIMIT_KINDS.weight = function(value)
  return type(value) == 'number' and value >= 0.001 and value <= 1000, 'a number from 0.001 to 1000'
end

local function wrong_field(path, object, kinds)
  for field, value in pairs(object) do
    local kind = kinds[field]
    if not kind then
      return path .. '.' .. string.sub(tostring(field), 1, 64) .. ' is not known; leave it out'
    end
    local is_good, needed = kind(value)
    if not is_good then return path .. '.' .. field .. ' is ' .. needed end
  end
end

local function complaint()
  if #ARGV ~= 5 then return 'enqueue takes 5 arguments, got ' .. #ARGV end
  if not string.match(id, '^job_[a-z2-7]+[0-9]+_[a-z2-7]+$') or #id > 64 then
    return 'an id is job_<lane>_<26 letters of base32>'
  end
  if digest == '' or request == '' then return 'digest or job is empty' end
  if channel == '' or string.find(channel, '%c') then
    return 'the reply channel is empty or has a control character'
  end
  local is_json, value = pcall(cjson.decode, ARGV[5])
  if not is_json or type(value) ~= 'table' then return 'options is a JSON object' end
  options = value
  local wrong = wrong_field('options', options, KINDS)
  local account = options.account or {}
  wrong = wrong or wrong_field('options.account', account, ACCOUNT_KINDS)
    or wrong_field('options.account.limits', account.limits or {}, LIMIT_KINDS)
  if wrong then return wrong end
  if options.account and not account.name then return 'options.account.name is missing' end
  if options.not_before_ms and options.delay_ms then
    return 'options.not_before_ms and delay_ms: give one of them'
  end
end

local wrong = complaint()
if wrong then return {'invalid', '0', '0', wrong} end

local key = PREFIX .. 'job:' .. id
local tenant, class = options.tenant or 'default', options.class or 'normal'
local background = options.background and 1 or 0
local waiting = num_waiting()
local known = redis.call('HMGET', key, 'digest', 'tenant')
if known[1] then
  local is_same = known[1] == digest and known[2] == tenant
  return {is_same and 'duplicate' or 'mismatch', waiting, '0', ''}
end
local begin_ms = math.max(NOW, options.not_before_ms or NOW + (options.delay_ms or 0))
local deadline = options.timeout_ms and NOW + options.timeout_ms
if deadline and begin_ms >= deadline then
  return {'invalid', waiting, '0', 'not_before_ms or delay_ms lies after the end of timeout_ms'}
end
local start_by = options.queue_timeout_ms and begin_ms + options.queue_timeout_ms

-- The account as it was before, under the limits of this submission.
local account = account_of(options.account and options.account.name or tenant)
local limits = options.account and options.account.limits or {}
limits.weight = limits.weight or 1
local is_changed = account.tenant ~= tenant
account.tenant = tenant
for _, field in ipairs(LIMITS) do
  is_changed = is_changed or account[field] ~= limits[field]
  account[field] = limits[field]
end

local cost = options.prompt_tokens or 1
local waits = options.over_limit == 'wait'

local function refusal()
  if background == 0 and redis.call('ZCOUNT', PREFIX .. 'workers', NOW, '+inf') == 0 then
    return 'no_worker', 1000, ''
  end
  if waiting >= (options.max_queued or 10000) then return 'full', retry_ms(), '' end
  if account.max_queued and account.queued >= account.max_queued then
    return 'limited', retry_ms(), 'queued'
  end
  if not waits then
    local reason, renews_ms = over_limit(account, cost)
    if reason then return 'limited', renews_ms - NOW, reason end
  end
  local last_ms = start_by and deadline and math.min(start_by, deadline) or start_by or deadline
  if last_ms then
    local interval, ends = pace()
    local rank = redis.call('ZCARD', backlog_key(class, account))
    local wait_ms = num_ahead(class, account, rank) * interval
    if ends >= KNOWN_ENDS and begin_ms == NOW and NOW + wait_ms > last_ms then
      return 'unmeetable', math.ceil(NOW + wait_ms - last_ms), ''
    end
  end
end

local outcome, retry, reason = refusal()
if outcome then return {outcome, waiting, retry, reason} end

redis.call('SET', key .. ':request', request)
keep_account(account, is_changed)
if is_changed and account.blocked then unblock(account) end
if not waits then draw(account) end
tally(account, 'queued', 1)

local due_ms = math.min(deadline or LAST_MS, start_by or LAST_MS, begin_ms + DUE_MS)
local due_us = due_ms * 1000 + NOW_US % 1000
redis.call('HSET', key, 'state', 'ready', 'epoch', 0, 'position', 0, 'ready', class, 'class', class,
  'digest', digest, 'tenant', tenant, 'account', account.name, 'channels', channel,
  'background', background, 'created_ms', NOW, 'ttl', options.ttl_s or 3600, 'cost', cost)
if waits then redis.call('HSET', key, 'waits', 1) end
if options.note then redis.call('HSET', key, 'note', options.note) end
if deadline then redis.call('HSET', key, 'deadline', deadline) end
if start_by then redis.call('HSET', key, 'start_by', start_by) end
local last_ms = math.min(deadline or LAST_MS, start_by or LAST_MS)
if last_ms < LAST_MS then redis.call('ZADD', PREFIX .. 'deadlines', last_ms, id) end
if background == 0 then redis.call('ZADD', PREFIX .. 'orphans', NOW + LOOK_MS, id) end
if waiting == 0 and num_claimed() == 0 then -- the drain rate counts from here
  redis.call('HSET', PREFIX .. 'counts', 'busy_since_ms', NOW)
end
if begin_ms > NOW then
  redis.call('HSET', key, 'due', due_us)
  redis.call('ZADD', PREFIX .. 'delayed', begin_ms, id)
else
  join_backlog(class, account, id, due_us, NOW)
end
announce()
return {'accepted', waiting, '0', ''}
