
-- Accounts: what each may use of this lane, and has used: rate limits, budgets, jobs at once.
-- A rate limit is a window of a minute that begins with its first request, no token bucket.
--   account:<name>        hash: tenant, weight and limits as last submitted; jobs queued and
--                         running; the minute's window; why it is blocked
--   running                 hash: for each tenant its jobs that count as running, but for those of the
--                         classes text and batch
--   usage:<day>:<name>    hash: prompt_tokens, cached_tokens, completion_tokens, jobs
--   usage:<month>:<name>  the same
-- A job counts as `running` from its first claim to its end: when it is handed back it keeps its
-- place, and goes on before all that waits. Counts change only inside the transitions of jobs, so
-- none leaks.
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local MINUTE_MS = 60000

local DAY_MS = 86400000

local IDLE_TTL_S = 3600

local MOST_ACCOUNTS = 1000 -- accounts in the list

local DAY_TTL_S = 40 * 86400

local MONTH_TTL_S = 70 * 86400

local LIMITS = {
  'requests_per_minute', 'tokens_per_minute', 'max_running', 'max_queued', 'tokens_per_day',
  'tokens_per_month', 'weight',
}

local ACCOUNT = {
  'tenant', 'blocked', 'running', 'queued', 'minute', 'requests', 'tokens', 'spell', unpack(LIMITS),
}

local accounts = {}

local touched = {}

local function account_of(name)
  local account = accounts[name]
  if account then return account end
  local key = PREFIX .. 'account:' .. name
  local values = redis.call('HMGET', key, unpack(ACCOUNT))
  account = {name = name, key = key, computed = {}, is_new = not values[1]}
  account.tenant, account.blocked = values[1] or name, values[2]
  for at = 3, 8 do account[ACCOUNT[at]] = tonumber(values[at] or 0) end
  for at = 9, #ACCOUNT do account[ACCOUNT[at]] = values[at] and tonumber(values[at]) or nil end
  account.weight = account.weight or 1
  accounts[name] = account
  return account
end

-- Year, month and day of a number of days since 1970.
local function civil(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524)
    - math.floor(doe / 146096)) / 365)
  local doy = doe - 365 * yoe - math.floor(yoe / 4) + math.floor(yoe / 100)
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return yoe + era * 400 + (month <= 2 and 1 or 0), month, doy - math.floor((153 * mp + 2) / 5) + 1
end

local TODAY = math.floor(NOW / DAY_MS)
local year, month, day = civil(TODAY)
local MONTH_NAME = string.format('%04d-%02d', year, month)
local DAY_NAME = string.format('%s-%02d', MONTH_NAME, day)

local function usage_key(period, account)
  return PREFIX .. 'usage:' .. period .. ':' .. account.name
end

local function day_end_ms()
  return (TODAY + 1) * DAY_MS
end

local function month_end_ms()
  local days = TODAY
  repeat
    days = days + 1
    local _, _, first = civil(days)
  until first == 1
  return days * DAY_MS
end

local function spent(period, account)
  local used = redis.call('HMGET', usage_key(period, account), 'prompt_tokens', 'completion_tokens')
  return (used[1] or 0) + (used[2] or 0)
end

-- Tokens left of the budgets (math.huge: none is set), when the scarcest renews, and its name.
local function budget_left(account)
  if not account.left then
    account.left, account.renews_ms = math.huge, 0
    local charged = (account.prompt or 0) + (account.completion or 0) -- and not booked yet
    if account.tokens_per_day then
      account.left = account.tokens_per_day - spent(DAY_NAME, account) - charged
      account.renews_ms, account.scarcest = day_end_ms(), 'tokens_per_day'
    end
    if account.tokens_per_month then
      local left = account.tokens_per_month - spent(MONTH_NAME, account) - charged
      if left < account.left or left <= 0 then
        account.left, account.renews_ms = math.min(left, account.left), month_end_ms()
        account.scarcest = 'tokens_per_month'
      end
    end
  end
  return account.left, account.renews_ms, account.scarcest
end

-- The minute's window: a new one begins when the last is over. What ran over the tokens of one
-- minute counts in the next. A spell is the time since the count of tokens was last put to 0: what
-- was counted in an earlier one has no part in the count of now.
local function roll(account)
  local gone = math.floor((NOW - account.minute) / MINUTE_MS)
  if gone > 0 or NOW < account.minute then
    local debt = account.tokens - gone * (account.tokens_per_minute or 0)
    account.minute, account.requests = NOW, 0
    account.tokens = account.tokens_per_minute and gone > 0 and math.max(0, debt) or 0
    if account.tokens == 0 then account.spell = NOW end
  end
end

local function keep_minute(account)
  redis.call('HSET', account.key, 'minute', account.minute, 'spell', account.spell,
    'requests', account.requests, 'tokens', account.tokens)
end

-- Whether the account's limits keep a job from going on now, or after `before` others like it: why,
-- until when, and which limit. `tokens`: about what each will use. Alone in its minute one may use more than the
-- minute has.
local function over_limit(account, tokens, before)
  local left, renews_ms, budget = budget_left(account)
  if left <= 0 then return 'budget', renews_ms, budget end
  local requests, most = account.requests_per_minute, account.tokens_per_minute
  if not requests and not most then return end
  roll(account)
  local minutes, limit = 0, nil
  if requests then
    local over = account.requests + before - requests
    if over >= 0 then
      minutes, limit = 1 + math.floor(math.min(over, before) / requests), 'requests_per_minute'
    end
  end
  tokens = math.max(1, tokens)
  local counted = account.tokens + before * tokens
  local excess = counted + tokens - (most or math.huge)
  if counted > 0 and excess > 0 then
    local more = math.ceil(math.min(counted, excess) / most)
    if more > minutes then minutes, limit = more, 'tokens_per_minute' end
  end
  if minutes > 0 then return 'rate', account.minute + minutes * MINUTE_MS, limit end
end

-- One request of the minute, and what it may use: `charge` counts what it uses beyond that, and
-- `return_draw` what it did not use.
local function draw(account, job_key, tokens)
  if not account.requests_per_minute and not account.tokens_per_minute then return end
  roll(account)
  account.requests = account.requests + 1
  if account.tokens_per_minute then
    account.tokens = account.tokens + tokens
    redis.call('HSET', job_key, 'drawn', tokens, 'spell', account.spell)
  end
  keep_minute(account)
end

local function tally(account, field, amount)
  account[field] = account[field] + amount
  redis.call('HINCRBY', account.key, field, amount)
end

-- Whether a job of the class takes a row of an engine that a job of another tenant could have.
local function takes_row(class)
  return class == 'high' or class == 'normal'
end

-- A job of the account counts as running from now on (1), or no more (-1).
local function tally_running(account, tenant, class, amount)
  tally(account, 'running', amount)
  if not takes_row(class) then return end
  local key = PREFIX .. 'running'
  if redis.call('HINCRBY', key, tenant, amount) <= 0 then redis.call('HDEL', key, tenant) end
end

-- It has a job now; its limits are written where they are new.
local function keep_account(account, is_changed)
  if account.running + account.queued == 0 then redis.call('PERSIST', account.key) end
  keep_last('accounts', account.name, MOST_ACCOUNTS)
  if not is_changed and not account.is_new then return end
  redis.call('HDEL', account.key, unpack(LIMITS))
  redis.call('HSET', account.key, 'tenant', account.tenant)
  for _, field in ipairs(LIMITS) do
    if account[field] then redis.call('HSET', account.key, field, account[field]) end
  end
end

-- Tokens that were charged for a job so far.
local function used_by(job)
  local prompt = job.prompt and string.match(job.prompt, '^%d+') or 0
  return prompt + (job.stop or job.position) + (job.unshown or 0)
end

-- An ended job's draw counts as far as it was used. Whether the minute has more left by that.
local function return_draw(job, account)
  local unused = job.drawn - used_by(job)
  if unused <= 0 then return false end
  roll(account)
  if tonumber(redis.call('HGET', job.key, 'spell')) ~= account.spell then return false end
  account.tokens = math.max(0, account.tokens - unused)
  keep_minute(account)
  return true
end

-- Note what a job used, before it is noted in the job itself; `book` writes it. `computed` went
-- through the model, for the fair turns.
local function charge(job, account, prompt, cached, completion, computed)
  local class, before = job.class, used_by(job)
  touched[account.name] = account
  account.undrawn = (account.undrawn or 0)
    + math.max(job.drawn, before + prompt + completion) - math.max(job.drawn, before)
  account.prompt = (account.prompt or 0) + prompt
  account.cached = (account.cached or 0) + cached
  account.completion = (account.completion or 0) + completion
  account.computed[class] = (account.computed[class] or 0) + computed
  if account.left then account.left = account.left - prompt - completion end
end

local function add_usage(account, field, amount)
  if amount == 0 then return end
  local day_key, month_key = usage_key(DAY_NAME, account), usage_key(MONTH_NAME, account)
  if redis.call('HINCRBY', day_key, field, amount) == amount then
    redis.call('EXPIRE', day_key, DAY_TTL_S)
  end
  if redis.call('HINCRBY', month_key, field, amount) == amount then
    redis.call('EXPIRE', month_key, MONTH_TTL_S)
  end
end

-- One key for each tenant: who is gone for good is forgotten, however busy the others keep the lane.
local function served_key(class, account)
  return PREFIX .. 'served:' .. class .. ':' .. account.tenant
end

-- A tenant's virtual time in a class goes on.
local function serve(account, class, computed)
  local key = served_key(class, account)
  local v = redis.call('INCRBYFLOAT', key, computed / account.weight)
  redis.call('EXPIRE', key, IDLE_TTL_S)
  redis.call('ZADD', PREFIX .. 'fair:' .. class, 'XX', v, account.name)
end

-- Write what was charged in this call, once an account.
local function book()
  for _, account in pairs(touched) do
    add_usage(account, 'prompt_tokens', account.prompt)
    add_usage(account, 'cached_tokens', account.cached)
    add_usage(account, 'completion_tokens', account.completion)
    if account.tokens_per_minute and account.undrawn ~= 0 then
      roll(account)
      account.tokens = math.max(0, account.tokens + account.undrawn)
      keep_minute(account)
    end
    for class, computed in pairs(account.computed) do
      if computed ~= 0 then serve(account, class, computed) end
    end
    account.prompt, account.cached, account.completion = 0, 0, 0
    account.undrawn, account.computed = 0, {}
  end
  touched = {}
end
