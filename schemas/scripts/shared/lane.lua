-- The definitions that the scripts share. KEYS[1] is the lane's prefix, with which every key
-- begins, so a script touches one hash slot. Time is Redis's. Each script returns a flat list of
-- strings.
-- Parts are divided by blank lines. schemas/redis/script.py sends a part with each script that uses a
-- name which the part defines.

local PREFIX = KEYS[1]

local READY = {'suspect', 'resume', 'text', 'high', 'normal', 'batch'}

local GROUP = 'workers'

local LOG_TTL_S = 60

local DEAD_TTL_S = 7 * 24 * 3600 -- a dead letter, and the request to submit again

local ENDED_TTL_S = 3600 -- how a worker ended, and which jobs it was to stop

local ASIDE_MS = 30000 -- how long a job with tokens waits for a worker of the model that made them

local FOREIGN_TTL_S = 3600 -- a set of such jobs, which are put there again every ASIDE_MS

local FIRST_LOOK_MS = 2000 -- at a foreground job, whether anybody listens

local RATE_MS = 30000 -- ends count for the drain rate for about as long

local CANCELLED = '"state":"cancelled","error":{"code":"cancelled",'
  .. '"message":"the job was cancelled","status":499}'

local EXPIRED = '"state":"expired","error":{"code":"deadline_exceeded",'
  .. '"message":"timeout_ms: the job waited in the queue until its time was up","status":504}'

local NOT_STARTED = '"state":"expired","error":{"code":"queue_timeout","message":'
  .. '"queue_timeout_ms: the job was not started in time","status":504,"retryable":true}'

local OVER_BUDGET = '"state":"failed","error":{"code":"budget_exceeded",'
  .. '"message":"the token budget was used up before the job began","status":429,"reset_at":%d}'

-- Read for each job of each step: what is needed seldom is read where it is needed.
local FIELDS = {
  'state', 'epoch', 'owner', 'position', 'ready', 'entry', 'channels', 'cancel', 'deadline',
  'tenant', 'account', 'class', 'stop', 'prompt', 'trial', 'drawn',
}

local vacate -- in waiting.lua

local time = redis.call('TIME')
local NOW = time[1] * 1000 + math.floor(time[2] / 1000)
local NOW_US = time[1] * 1000000 + time[2]

-- Over maxmemory Redis refuses a script whose first write could grow memory, and lets one that has
-- written run to its end. What ends or frees jobs must run to its end: it calls this first.
local function write_when_full()
  redis.call('ZREM', PREFIX .. 'deadlines', '')
end

-- Redis's clock may be set back, or a new primary's be behind the old one's. What then lies further
-- ahead than it is ever put is brought nearer, a few at a time.
local function bring_near(name, most_ms)
  local key, latest = PREFIX .. name, NOW + most_ms
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, latest + 1, '(9e15', 'LIMIT', 0, 64)) do
    redis.call('ZADD', key, latest, member)
  end
end

-- Set aside until a worker of the model comes.
local function put_aside(job, fingerprint)
  local key = PREFIX .. 'foreign:' .. fingerprint
  redis.call('ZADD', PREFIX .. 'foreign', NOW + ASIDE_MS, job.id)
  redis.call('SADD', key, job.id)
  redis.call('EXPIRE', key, FOREIGN_TTL_S)
end

local function ready_key(name)
  return PREFIX .. 'ready:' .. name
end

local function attention_key(worker)
  return PREFIX .. 'worker:' .. worker .. ':attention'
end

-- What a worker told of its prefix cache goes with its lease.
local function forget_worker(worker)
  local key = PREFIX .. 'worker:' .. worker
  redis.call('DEL', key, attention_key(worker), key .. ':kv_events', key .. ':kv_blocks')
end

-- A lease without the record of its worker is none, since nobody knows of which model it is. It ends
-- here and blames no job; the worker is told that it has none, and begins anew under another name.
local function has_lease(worker)
  local leases = PREFIX .. 'workers'
  if not redis.call('ZSCORE', leases, worker) then return false end
  if redis.call('HGET', PREFIX .. 'worker:' .. worker, 'fingerprint') then return true end
  redis.call('ZREM', leases, worker)
  forget_worker(worker)
  redis.call('SET', PREFIX .. 'ended:' .. worker, 'left', 'EX', ENDED_TTL_S)
  return false
end

local function load(id)
  local key = PREFIX .. 'job:' .. id
  local values = redis.call('HMGET', key, unpack(FIELDS))
  if not values[1] then return nil end
  local job = {id = id, key = key}
  for at = 1, #FIELDS do job[FIELDS[at]] = values[at] end
  job.epoch, job.position = tonumber(job.epoch), tonumber(job.position)
  job.stop = job.stop and tonumber(job.stop)
  job.drawn = tonumber(job.drawn or 0)
  job.running = job.state == 'admitting' or job.state == 'decoding'
  job.ended = not job.running and job.state ~= 'ready'
  return job
end

-- What is to be published, by channel: one message a channel and call.
local channels, lines = {}, {}

local function say(job, event)
  local line = '{"job_id":"' .. job.id .. '","event":' .. event .. '}'
  for channel in string.gmatch(job.channels, '[^\n]+') do
    if not lines[channel] then
      channels[#channels + 1] = channel
      lines[channel] = {}
    end
    table.insert(lines[channel], line)
  end
end

local function publish()
  for _, channel in ipairs(channels) do
    redis.call('PUBLISH', channel, table.concat(lines[channel], '\n'))
  end
end

-- Acknowledged entries are deleted with it: a stream holds what waits or runs, nothing else.
local function unclaim(ready, entry)
  redis.call('XACK', ready_key(ready), GROUP, entry)
  redis.call('XDEL', ready_key(ready), entry)
end

-- Two streams may give one id in the same millisecond.
local function is_entry_of(job, ready, entry)
  return job.ready == ready and job.entry == entry
end

local function renew(worker, lease_ms)
  if not has_lease(worker) then return false end
  redis.call('ZADD', PREFIX .. 'workers', NOW + lease_ms, worker)
  return true
end

-- Whether a worker lives that takes new jobs. The first one is, but for a roll-out.
local function is_staffed()
  local at = 0
  repeat
    local workers = redis.call('ZRANGEBYSCORE', PREFIX .. 'workers', NOW, '+inf', 'LIMIT', at, 16)
    for _, worker in ipairs(workers) do
      if not redis.call('HGET', PREFIX .. 'worker:' .. worker, 'draining') then return true end
    end
    at = at + 16
  until #workers == 0
  return false
end

-- Epoch and owner for equality, and the state for the time between two owners.
local function is_fenced(job, worker, epoch)
  return not job or not job.running or job.owner ~= worker or job.epoch ~= epoch
end

-- Keeps the last members of a set that is looked at by people, the latest of all for a day. Scores
-- are milliseconds with a fraction: several members may change in one.
local function keep_last(name, member, most)
  local key = PREFIX .. name
  redis.call('ZADD', key, string.format('%.3f', NOW_US / 1000), member)
  redis.call('ZREMRANGEBYRANK', key, 0, -most - 1)
  redis.call('EXPIRE', key, 86400)
end

local RECENT = 100 -- jobs of a tenant that are listed

local function list_recent(tenant, id, class)
  if class == 'text' then return end -- they are many, and nothing befalls them
  keep_last('recent:' .. tenant, id, RECENT)
end

local HISTORY_BYTES = 4000

-- What befell a job, as JSON lists divided by commas: when, what, and the worker or the reason.
local function note_history(job, what, detail)
  list_recent(job.tenant, job.id, job.class)
  local told = redis.call('HGET', job.key, 'history')
  if told and #told > HISTORY_BYTES then return end
  local line = cjson.encode({NOW, what, detail})
  redis.call('HSET', job.key, 'history', told and told .. ',' .. line or line)
end

local function erase(job)
  local key = job.key
  local letter = redis.call('HGET', key, 'dead')
  if letter then redis.call('XDEL', PREFIX .. 'dead', letter) end
  redis.call('ZREM', PREFIX .. 'recent:' .. job.tenant, job.id)
  redis.call('DEL', key, key .. ':request', key .. ':log', key .. ':result')
end

-- Wakes the workers that wait for something to read, if there are any.
local function announce()
  if redis.call('DEL', PREFIX .. 'idle') == 1 then
    redis.call('XADD', PREFIX .. 'news', 'MAXLEN', 1, '*', 'n', 1)
  end
end

local function num_pending(ready)
  local groups = redis.pcall('XINFO', 'GROUPS', ready_key(ready))
  local pending = 0
  for _, group in ipairs(groups.err and {} or groups) do
    for at = 1, #group, 2 do
      if group[at] == 'pending' then pending = pending + group[at + 1] end
    end
  end
  return pending
end

-- The drain rate while the lane is busy: ends, and the milliseconds they took, fading alike.
local function note_end()
  local key = PREFIX .. 'counts'
  local ends, took_ms, since = unpack(redis.call('HMGET', key, 'ends', 'took_ms', 'busy_since_ms'))
  local gap = math.max(0, NOW - (since or NOW))
  local kept = math.exp(-gap / RATE_MS)
  redis.call('HSET', key, 'ends', (ends or 0) * kept + 1, 'took_ms', (took_ms or 0) * kept + gap,
    'busy_since_ms', NOW)
  redis.call('HINCRBY', key, 'ended', 1)
end

-- Milliseconds between two ends, and of how many ends that is known.
local function pace()
  local key = PREFIX .. 'counts'
  local ends, took_ms = unpack(redis.call('HMGET', key, 'ends', 'took_ms'))
  if not ends then return 1000, 0 end
  return took_ms / ends, tonumber(ends)
end

-- When so many places in the queue should be free.
local function retry_ms(places)
  return math.ceil(math.min(math.max((pace()) * places, 100), 60000))
end

-- Whether a choice ended at a limit: length or budget. No text holds this: its quotes are escaped.
local function cut_by(result)
  for _, reason in ipairs({'budget', 'length'}) do
    if result and string.find(result, '"finish_reason":"' .. reason .. '"', 1, true) then
      return reason
    end
  end
  return ''
end

-- Whoever asked for a note finds here that a job ended: what it cost, and nothing of what it said.
local function leave_note(job, state, event, note, result, bytes)
  local is_read, told = pcall(cjson.decode, event)
  local usage = is_read and type(told) == 'table' and told.usage or nil
  redis.call('XADD', PREFIX .. 'outbox', '*', 'job', job.id, 'tenant', job.tenant, 'state', state,
    'ended_ms', NOW, 'usage', usage and cjson.encode(usage) or '{}', 'note', note,
    'cut', cut_by(result), 'bytes', bytes)
end

local TOLD_BYTES = 16384 -- what is kept with its result, and has more, is told to its tenant's account

-- The one place where jobs end. Without a result of its own the log is kept as long as one.
local function settle(job, epoch, state, event, result)
  redis.call('XADD', job.key .. ':log', epoch .. '-' .. job.position, 'e', event)
  say(job, event)
  vacate(job)
  redis.call('ZREM', PREFIX .. 'deadlines', job.id)
  redis.call('ZREM', PREFIX .. 'orphans', job.id)
  redis.call('ZREM', PREFIX .. 'foreign', job.id)
  if job.owner then redis.call('SREM', attention_key(job.owner), job.id) end
  note_end()
  local values = redis.call('HMGET', job.key, 'erase', 'ttl', 'note', 'remember', 'keeps')
  local erases, ttl, note, remember, keeps = unpack(values)
  local bytes = keeps and result and redis.call('STRLEN', job.key .. ':request') + #result or 0
  if note or bytes > TOLD_BYTES then leave_note(job, state, event, note or '{}', result, bytes) end
  if erases then return erase(job) end
  list_recent(job.tenant, job.id, job.class)
  redis.call('HSET', job.key, 'state', state, 'epoch', epoch, 'ended_ms', NOW)
  if state == 'dead' then
    redis.call('EXPIRE', job.key .. ':request', DEAD_TTL_S)
  elseif keeps then
    redis.call('EXPIRE', job.key .. ':request', ttl)
  else
    redis.call('DEL', job.key .. ':request')
  end
  if result then redis.call('SET', job.key .. ':result', result, 'EX', ttl) end
  redis.call('EXPIRE', job.key .. ':log', result and LOG_TTL_S or ttl)
  -- It remembers that there was a result, and what its idempotency key stands for.
  redis.call('EXPIRE', job.key, math.max(ttl * 2, remember or 0, state == 'dead' and DEAD_TTL_S or 0))
end

-- What it used, as its account was charged; nothing where it never began.
local function usage_of(job)
  if not job.prompt and job.position == 0 then return '' end
  local prompt, cached = string.match(job.prompt or '0:0', '^(%d+):(%d+)$')
  return string.format(',"usage":{"prompt_tokens":%s,"completion_tokens":%d,"cached_tokens":%s}',
    prompt, job.position, cached)
end

-- Ends a job that no worker answers for; a new epoch, so that none can add to it.
local function settle_failed(job, state, tail)
  local event = '{"type":"failed","position":' .. job.position .. ',' .. tail .. usage_of(job) .. '}'
  settle(job, job.epoch + 1, state, event, nil)
end

-- The owner's next beat says how the job stands.
local function ask_attention(job)
  redis.call('SADD', attention_key(job.owner), job.id)
  redis.call('EXPIRE', attention_key(job.owner), ENDED_TTL_S)
end

local function cancel(job)
  if job.running then
    redis.call('HSET', job.key, 'cancel', 1)
    ask_attention(job)
    redis.call('PUBLISH', PREFIX .. 'worker:' .. job.owner .. ':control', 'C ' .. job.id)
  else
    settle_failed(job, 'cancelled', CANCELLED)
  end
end

-- Back to the queue, before everything that waits and with its slot; a cancelled job has nothing to
-- wait for. One with a trial to pass is a suspect: it waits for a worker that has nothing else.
-- `why` goes into its history, if it had begun.
local function requeue(job, why)
  if job.cancel then return settle_failed(job, 'cancelled', CANCELLED) end
  if job.owner then redis.call('SREM', attention_key(job.owner), job.id) end
  unclaim(job.ready, job.entry)
  local ready = job.trial and 'suspect' or 'resume'
  local entry = redis.call('XADD', ready_key(ready), '*', 'job', job.id)
  redis.call('HSET', job.key, 'state', 'ready', 'ready', ready, 'entry', entry)
  redis.call('HDEL', job.key, 'owner')
  if job.running then note_history(job, 'requeued', why) end
  redis.call('HINCRBY', PREFIX .. 'counts', 'requeued', 1)
  announce()
end

