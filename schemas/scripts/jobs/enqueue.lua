-- Accept a job into its account's backlog, a sorted set, or say why not. A worker's `read` moves it
-- to a ready stream. Admission control is here: rate limits, budgets, and load shedding where the
-- lane is full or the job could not begin in time.
-- KEYS: the lane's prefix
-- ARGV: job id, digest of the body, the Job as JSON, reply channel, options as a JSON object. Each
-- option with its meaning and, after the semicolon, what holds where it is left out:
--   tenant           whose job it is; "default"
--   class            "text" | "high" | "normal" | "batch"; "normal"
--   priority         of the account's jobs of a class that wait, the lower go first; 0. A step is
--                    worth the ten minutes that an earlier deadline is at most; from 10000 on, and
--                    down to as many, all count alike
--   background       whether the job runs on although nobody listens. A job in the foreground is
--                    refused where no worker is, and cancelled when nobody listens; false
--   timeout_ms       from now to the end; none
--   queue_timeout_ms until it is started, from when it may; none
--   not_before_ms    unix time, or delay_ms from now: waits at least until then; none
--   prompt_tokens    about how many tokens the prompts have; 1
--   completion_tokens  about how many it may make, over all choices; 0
--   over_limit       "refuse" | "wait": what to do above the account's rates and budgets; "refuse"
--   account          {"name": .., "limits": {"weight": .., "max_running": .., ..}}; the tenant
--   max_queued       most jobs that may wait in the lane; 10000
--   max_queued_tokens  most tokens that their prompts may have, by prompt_tokens. Where nothing
--                    waits a longer prompt is accepted all the same; no limit
--   ttl_s            how long the result is kept, in seconds; 3600
--   remember_s       how long the id is known after the end, at least twice ttl_s; 0
--   metadata         {name: text, ..}, given back with the job's status; {}
--   keeps_request    whether the job is kept as long as its result; false
--   affinity         a text that jobs share whose prompts begin alike: they go to one worker, where
--                    it has room; none
--   shares           a text that equal jobs have: one that has not ended is joined; none
--   note             a text that is put in the lane's outbox when the job ends; none
-- Returns: outcome, jobs that waited before, milliseconds after which to try again, a reason, and
-- when the job that is here was submitted (unix milliseconds).
-- Outcomes:
--   accepted
--   duplicate    the same job is here already
--   shared       nothing was changed: an equal job is here, and the reason is its id
--   mismatch     the id is taken by a job with another digest or tenant
--   full         the reason is empty, or `tokens`
--   no_worker
--   limited      the reason is the account's limit, as max_queued or tokens_per_day
--   unmeetable   at the live rate the job would not begin before its time is up
--   invalid      the reason is a sentence
-- Its first write is one that Redis refuses when memory is full, so nothing is accepted by half.
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local KNOWN_ENDS = 10 -- ends of jobs that make a rate to refuse by
local EQUAL_TTL_S = 3600 -- a job that runs for longer is joined by no more
local YEAR_MS, LAST_MS, MOST = 31536000000, 4102444800000, 2 ^ 50
local STEPS = 10000 -- levels of priority, to each side of 0

local OPTIONS = ' tenant class priority background timeout_ms queue_timeout_ms not_before_ms delay_ms '
  .. 'prompt_tokens completion_tokens over_limit account max_queued '
  .. 'max_queued_tokens ttl_s remember_s metadata keeps_request affinity shares note '
local ACCOUNT_OPTIONS = ' name limits '
local LIMIT_OPTIONS = ' ' .. table.concat(LIMITS, ' ') .. ' '

local options
local id, digest, request, channel = unpack(ARGV, 1, 4)

local function whole(object, path, field, least, most)
  local value = object[field]
  if value == nil then return end
  if type(value) ~= 'number' or value < least or value > most or value % 1 ~= 0 then
    return string.format('%s.%s is a whole number from %.0f to %.0f', path, field, least, most)
  end
end

local function name(value, path)
  if value == nil then return end
  if type(value) ~= 'string' or value == '' or #value > 256 or string.find(value, '%c') then
    return path .. ' is a text of 1 to 256 bytes without control characters'
  end
end

local function unknown(object, path, known)
  for field in pairs(object) do
    if not string.find(known, ' ' .. field .. ' ', 1, true) then
      return path .. '.' .. string.sub(field, 1, 64) .. ' is not known; leave it out'
    end
  end
end

local function wrong_account(account)
  if type(account) ~= 'table' then return 'options.account is an object' end
  local wrong = unknown(account, 'options.account', ACCOUNT_OPTIONS)
    or name(account.name, 'options.account.name')
  if wrong then return wrong end
  if not account.name then return 'options.account.name is missing' end
  local limits, path = account.limits, 'options.account.limits'
  if limits == nil then return end
  if type(limits) ~= 'table' then return path .. ' is an object' end
  wrong = unknown(limits, path, LIMIT_OPTIONS)
  for _, field in ipairs(LIMITS) do
    if field ~= 'weight' then wrong = wrong or whole(limits, path, field, 1, MOST) end
  end
  if wrong then return wrong end
  local weight = limits.weight or 1
  if type(weight) ~= 'number' or not (weight >= 0.001 and weight <= 1000) then
    return path .. '.weight is a number from 0.001 to 1000'
  end
end

local function wrong_option()
  local class, over = options.class or 'normal', options.over_limit or 'refuse'
  if not PATIENCE_MS[class] then return 'options.class is text, high, normal or batch' end
  if over ~= 'refuse' and over ~= 'wait' then return 'options.over_limit is refuse or wait' end
  if type(options.background or false) ~= 'boolean' then
    return 'options.background is true or false'
  end
  local note = options.note
  if note ~= nil and (type(note) ~= 'string' or note == '' or #note > 4096) then
    return 'options.note is a text of 1 to 4096 bytes'
  end
  if type(options.keeps_request or false) ~= 'boolean' then
    return 'options.keeps_request is true or false'
  end
  if type(options.metadata or {}) ~= 'table' then return 'options.metadata is an object' end
  return unknown(options, 'options', OPTIONS)
    or name(options.tenant, 'options.tenant')
    or name(options.affinity, 'options.affinity')
    or name(options.shares, 'options.shares')
    or whole(options, 'options', 'priority', -MOST, MOST)
    or whole(options, 'options', 'timeout_ms', 1, YEAR_MS)
    or whole(options, 'options', 'queue_timeout_ms', 1, YEAR_MS)
    or whole(options, 'options', 'not_before_ms', 0, LAST_MS)
    or whole(options, 'options', 'delay_ms', 0, YEAR_MS)
    or whole(options, 'options', 'prompt_tokens', 0, MOST)
    or whole(options, 'options', 'completion_tokens', 0, MOST)
    or whole(options, 'options', 'max_queued', 0, MOST)
    or whole(options, 'options', 'max_queued_tokens', 1, MOST)
    or whole(options, 'options', 'ttl_s', 1, YEAR_MS / 1000)
    or whole(options, 'options', 'remember_s', 0, YEAR_MS / 1000)
    or options.account and wrong_account(options.account)
end

local function invalid()
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
  if options.not_before_ms and options.delay_ms then
    return 'options.not_before_ms and delay_ms: give one of them'
  end
  return wrong_option()
end

local wrong = invalid()
if wrong then return {'invalid', '0', '0', wrong, '0'} end

local key = PREFIX .. 'job:' .. id
local tenant, class = options.tenant or 'default', options.class or 'normal'
local background = options.background and 1 or 0
local waiting = num_waiting()
local known = redis.call('HMGET', key, 'digest', 'tenant', 'created_ms')
if known[1] then
  local is_same = known[1] == digest and known[2] == tenant
  return {is_same and 'duplicate' or 'mismatch', waiting, '0', '', is_same and known[3] or '0'}
end
local begin_ms = math.max(NOW, options.not_before_ms or NOW + (options.delay_ms or 0))
local deadline = options.timeout_ms and NOW + options.timeout_ms
if deadline and begin_ms >= deadline then
  return {'invalid', waiting, '0', 'not_before_ms or delay_ms lies after the end of timeout_ms', '0'}
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
local bound = cost + (options.completion_tokens or 0)
local waits = options.over_limit == 'wait'

-- What scales workers sees for so long that one was wanted; a caller who tries again renews it.
local WANTED_MS = 120000

local function refusal()
  if background == 0 and not is_staffed() then
    redis.call('SET', PREFIX .. 'wanted', NOW, 'PX', WANTED_MS)
    return 'no_worker', 1000, ''
  end
  if waiting >= (options.max_queued or 10000) then return 'full', retry_ms(1), '' end
  if options.max_queued_tokens then
    local tokens = tonumber(redis.call('HGET', PREFIX .. 'counts', 'queued_tokens') or 0)
    local excess = tokens + cost - options.max_queued_tokens
    if tokens > 0 and excess > 0 then
      return 'full', retry_ms(math.min(excess / tokens, 1) * waiting), 'tokens'
    end
  end
  if account.max_queued and account.queued >= account.max_queued then
    return 'limited', retry_ms(1), 'max_queued'
  end
  if not waits then
    local reason, renews_ms, limit = over_limit(account, bound, 0)
    if reason then return 'limited', renews_ms - NOW, limit end
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

local equal = options.shares and PREFIX .. 'equal:' .. tenant .. ':' .. options.shares
local other = equal and redis.call('GET', equal)
if other then
  local job = load(other)
  if job and not job.ended and not job.cancel and job.tenant == tenant then
    return {'shared', waiting, '0', other, redis.call('HGET', job.key, 'created_ms')}
  end
end

local outcome, retry, reason = refusal()
if outcome then return {outcome, waiting, retry, reason, '0'} end

redis.call('SET', key .. ':request', request)
redis.call('DEL', key .. ':log', key .. ':result') -- left by a job that ended, and whose record vanished
if equal then redis.call('SET', equal, id, 'EX', EQUAL_TTL_S) end
keep_account(account, is_changed)
if is_changed and account.blocked then unblock(account) end
if not waits then draw(account, key, bound) end
tally(account, 'queued', 1)
count_tokens(cost)

local due_ms = math.min(deadline or LAST_MS, start_by or LAST_MS, begin_ms + DUE_MS)
local steps = math.max(-STEPS, math.min(STEPS, options.priority or 0))
local due_us = (due_ms + steps * DUE_MS) * 1000 + NOW_US % 1000
redis.call('HSET', key, 'state', 'ready', 'epoch', 0, 'position', 0, 'class', class,
  'digest', digest, 'tenant', tenant, 'account', account.name, 'channels', channel,
  'background', background, 'created_ms', NOW, 'ttl', options.ttl_s or 3600, 'cost', cost,
  'bound', bound)
list_recent(tenant, id, class)
if waits then redis.call('HSET', key, 'waits', 1) end
if options.remember_s then redis.call('HSET', key, 'remember', options.remember_s) end
if options.metadata then redis.call('HSET', key, 'metadata', cjson.encode(options.metadata)) end
if options.priority then redis.call('HSET', key, 'priority', options.priority) end
if options.affinity then redis.call('HSET', key, 'affinity', options.affinity) end
if options.note then redis.call('HSET', key, 'note', options.note) end
if options.keeps_request then redis.call('HSET', key, 'keeps', 1) end
if deadline then redis.call('HSET', key, 'deadline', deadline) end
if start_by then redis.call('HSET', key, 'start_by', start_by) end
local last_ms = math.min(deadline or LAST_MS, start_by or LAST_MS)
if last_ms < LAST_MS then redis.call('ZADD', PREFIX .. 'deadlines', last_ms, id) end
if background == 0 then redis.call('ZADD', PREFIX .. 'orphans', NOW + FIRST_LOOK_MS, id) end
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
return {'accepted', waiting, '0', '', NOW}
