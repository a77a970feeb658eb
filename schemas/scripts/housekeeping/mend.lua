-- Look at some keys of the lane, and mend states that no transition leaves behind:
--   jobs that are in no queue, so that no worker would find them
--   remnants of jobs that are gone
--   counts of an account or the lane that do not fit its jobs
-- A script runs alone in Redis, so it cannot meet a transition that is half done.
-- ARGV: cursor, keys to look at, milliseconds for which a job must have been missing
-- Returns the next cursor (0: all keys were seen), then (what was wrong, where) for each thing
-- mended
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local cursor, most, grace_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MOST_COUNTED = 2000 -- claims or waiting jobs; where there are more, counts are left alone
local HEADS = 64
write_when_full()

local running, delayed, of_tenants
local reply = {}

local function mended(what, where)
  reply[#reply + 1] = what
  reply[#reply + 1] = where
end

local function after(one, other)
  local ms, seq = string.match(one, '(%d+)-(%d+)')
  local other_ms, other_seq = string.match(other, '(%d+)-(%d+)')
  if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
  return tonumber(seq) > tonumber(other_seq)
end

-- Whether some worker has it, or the next that reads may get it.
local function is_in_stream(job)
  local key = ready_key(job.ready)
  if #redis.call('XRANGE', key, job.entry, job.entry) == 0 then return false end
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  if groups.err or not groups[1] then return not job.running end
  if #redis.call('XPENDING', key, GROUP, job.entry, job.entry, 1) == 1 then return true end
  for at = 1, #groups[1], 2 do
    if groups[1][at] == 'last-delivered-id' then
      return not job.running and after(job.entry, groups[1][at + 1])
    end
  end
end

local function is_waiting(job)
  if redis.call('ZSCORE', PREFIX .. 'delayed', job.id) then return true end
  return redis.call('ZSCORE', PREFIX .. 'waiting:' .. job.class, job.id)
    and redis.call('ZSCORE', backlog_key(job.class, account_of(job.account)), job.id)
end

local function put_back(job)
  redis.call('HDEL', job.key, 'missed')
  running = nil -- to be counted again
  if job.entry then
    requeue(job, 'lost')
  else
    join_backlog(job.class, account_of(job.account), job.id, NOW_US, NOW)
    announce()
  end
  mended('lost', job.id)
end

local function look_at_job(id)
  local job = load(id)
  if not job or not job.account then
    redis.call('DEL', PREFIX .. 'job:' .. id)
    return mended('remnant', id)
  end
  if job.ended then
    if redis.call('TTL', job.key) == -1 then
      redis.call('EXPIRE', job.key, 2 * redis.call('HGET', job.key, 'ttl'))
      mended('no_ttl', id)
    end
    return
  end
  local missed = redis.call('HGET', job.key, 'missed')
  local is_there = is_waiting(job)
  if job.entry then is_there = is_in_stream(job) end
  if is_there then
    if missed then redis.call('HDEL', job.key, 'missed') end
  elseif not missed and grace_ms > 0 then
    redis.call('HSET', job.key, 'missed', NOW)
  elseif grace_ms == 0 or math.abs(NOW - missed) >= grace_ms then
    put_back(job)
  end
end

-- The heads alone: they are next.
local function look_at_backlog(class, name)
  local account = account_of(name)
  for _, id in ipairs(redis.call('ZRANGE', backlog_key(class, account), 0, HEADS - 1)) do
    local job = load(id)
    if not job or job.ended or job.entry then
      leave_backlog(class, account, id)
      mended('ghost', id)
    end
  end
end

-- By account, and by tenant those that take a row.
local function count(ids)
  local counts, tenants = {}, {}
  for _, id in ipairs(ids) do
    local job = load(id)
    if job and job.account and not job.ended then
      counts[job.account] = (counts[job.account] or 0) + 1
      if takes_row(job.class) then tenants[job.tenant] = (tenants[job.tenant] or 0) + 1 end
    end
  end
  return counts, tenants
end

-- How many jobs each account has in the streams, and in `delayed`; false: there are too many.
local function count_all()
  local total, ids = redis.call('ZCARD', PREFIX .. 'delayed'), {}
  for _, ready in ipairs(READY) do total = total + redis.call('XLEN', ready_key(ready)) end
  running, delayed = false, false
  if total > MOST_COUNTED then return end
  for _, ready in ipairs(READY) do
    for _, entry in ipairs(redis.call('XRANGE', ready_key(ready), '-', '+')) do
      ids[#ids + 1] = entry[2][2]
    end
  end
  running, of_tenants = count(ids)
  delayed = count(redis.call('ZRANGE', PREFIX .. 'delayed', 0, -1))
end

-- Until when an account waits is of a clock that was set back since: it is looked at again.
local function wake_early(name)
  local account = account_of(name)
  local since = redis.call('HGET', account.key, 'blocked_ms')
  if since and tonumber(since) > NOW then unblock(account) end
end

local function look_at_account(name)
  wake_early(name)
  if running == nil then count_all() end
  if not running then return end
  local account, queued = account_of(name), delayed[name] or 0
  for _, class in ipairs(CLASSES) do
    queued = queued + redis.call('ZCARD', backlog_key(class, account))
  end
  local held = running[name] or 0
  if account.running == held and account.queued == queued then return end
  tally(account, 'running', held - account.running)
  tally(account, 'queued', queued - account.queued)
  if account.blocked == 'running' then unblock(account) end
  if held + queued == 0 then redis.call('EXPIRE', account.key, IDLE_TTL_S) end
  mended('counts', name)
end

-- Of the prompts that wait for their first claim; nil: there are too many.
local function count_queued_tokens()
  local names, total, tokens = {'delayed'}, 0, 0
  for _, class in ipairs(CLASSES) do names[#names + 1] = 'waiting:' .. class end
  for _, name in ipairs(names) do total = total + redis.call('ZCARD', PREFIX .. name) end
  if total > MOST_COUNTED then return end
  for _, name in ipairs(names) do
    for _, id in ipairs(redis.call('ZRANGE', PREFIX .. name, 0, -1)) do
      tokens = tokens + (redis.call('HGET', PREFIX .. 'job:' .. id, 'cost') or 0)
    end
  end
  return tokens
end

local function look_at_tokens()
  local counted = tonumber(redis.call('HGET', PREFIX .. 'counts', 'queued_tokens') or 0)
  local tokens = count_queued_tokens()
  if not tokens or counted == tokens then return end
  count_tokens(tokens - counted)
  mended('tokens', 'counts')
end

local function look_at_tenants()
  local key, is_right = PREFIX .. 'running', true
  count_all()
  if not running then return end
  local fields = redis.call('HGETALL', key)
  for at = 1, #fields, 2 do
    is_right = is_right and tonumber(fields[at + 1]) == of_tenants[fields[at]]
  end
  for tenant in pairs(of_tenants) do is_right = is_right and redis.call('HEXISTS', key, tenant) == 1 end
  if is_right then return end
  redis.call('DEL', key)
  for tenant, number in pairs(of_tenants) do redis.call('HSET', key, tenant, number) end
  mended('counts', 'running')
end

if cursor == '0' then
  look_at_tokens()
  look_at_tenants()
end
local pattern = string.gsub(PREFIX, '[%*%?%[%]\\]', '\\%0') .. '*'
local found = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', most)
for _, key in ipairs(found[2]) do
  local name = string.sub(key, #PREFIX + 1)
  local id = string.match(name, '^job:([^:]+)$')
  local class, account = string.match(name, '^backlog:(%a+):(.+)$')
  local counted = string.match(name, '^account:(.+)$')
  if id then look_at_job(id) end
  if class then look_at_backlog(class, account) end
  if counted then look_at_account(counted) end
end
publish()
table.insert(reply, 1, found[1])
return reply
