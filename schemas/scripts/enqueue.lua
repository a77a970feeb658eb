-- Accept a job, or say why not. Stands alone: a plain Redis client may run it.
-- KEYS: the lane's prefix
-- ARGV: job id, class (high | normal | batch), digest of the body, the Job as JSON, tenant,
--       reply channel, background (0 | 1), timeout_ms (0: none), most jobs that may wait,
--       seconds that the result is kept
-- Returns: accepted | duplicate | mismatch | full | no_worker | invalid, then the number of jobs
--       that waited before (invalid: a sentence), then milliseconds after which to try again
-- Its first write is one that Redis refuses when memory is full, so nothing is accepted by half.

local PREFIX = KEYS[1]
local id, class, digest, request, tenant, channel = unpack(ARGV, 1, 6)
local background, timeout_ms, max_queued, ttl_s = unpack(ARGV, 7, 10)
local LOOK_MS = 2000 -- until the first look whether anybody listens

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function complaint()
  if #ARGV ~= 10 then return 'enqueue takes 10 arguments, got ' .. #ARGV end
  if not string.match(id, '^job_[a-z2-7]+[0-9]+_[a-z2-7]+$') or #id > 64 then
    return 'an id is job_<lane>_<26 letters of base32>'
  end
  if class ~= 'high' and class ~= 'normal' and class ~= 'batch' then
    return 'the class is high, normal or batch'
  end
  if digest == '' or tenant == '' or request == '' then return 'digest, tenant or job is empty' end
  if channel == '' or string.find(channel, '%c') then
    return 'the reply channel is empty or has a control character'
  end
  for _, number in ipairs({background, timeout_ms, max_queued, ttl_s}) do
    if not string.match(number, '^%d+$') then return number .. ' is not a whole number' end
  end
  if tonumber(ttl_s) < 1 then return 'the result is kept for at least 1 second' end
end

local function num_queued()
  local count = 0
  for _, ready in ipairs({'resume', 'high', 'normal', 'batch'}) do
    local key = PREFIX .. 'ready:' .. ready
    local length = redis.call('XLEN', key)
    if length > 0 then
      count = count + length
      for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
        for at = 1, #group, 2 do
          if group[at] == 'pending' then count = count - group[at + 1] end
        end
      end
    end
  end
  return count
end

local wrong = complaint()
if wrong then return {'invalid', wrong, '0'} end

local key = PREFIX .. 'job:' .. id
local known = redis.call('HMGET', key, 'digest', 'tenant')
local queued = num_queued()
if known[1] then
  local is_same = known[1] == digest and known[2] == tenant
  return {is_same and 'duplicate' or 'mismatch', tostring(queued), '0'}
end
if background == '0' and redis.call('ZCOUNT', PREFIX .. 'workers', now, '+inf') == 0 then
  return {'no_worker', tostring(queued), '0'}
end
if queued >= tonumber(max_queued) then
  local interval = tonumber(redis.call('HGET', PREFIX .. 'counts', 'interval_ms') or 1000)
  return {'full', tostring(queued), tostring(math.ceil(math.max(interval, 100)))}
end

redis.call('SET', key .. ':request', request)
local entry = redis.call('XADD', PREFIX .. 'ready:' .. class, '*', 'job', id)
redis.call('HSET', key, 'state', 'ready', 'epoch', 0, 'position', 0, 'ready', class, 'entry', entry,
  'class', class, 'digest', digest, 'tenant', tenant, 'channels', channel, 'background', background,
  'created_ms', now, 'ttl', ttl_s)
if tonumber(timeout_ms) > 0 then
  redis.call('HSET', key, 'deadline', now + timeout_ms)
  redis.call('ZADD', PREFIX .. 'deadlines', now + timeout_ms, id)
end
if background == '0' then redis.call('ZADD', PREFIX .. 'orphans', now + LOOK_MS, id) end
return {'accepted', tostring(queued), '0'}
