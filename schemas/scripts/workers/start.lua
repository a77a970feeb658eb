-- Start a claimed job under a new epoch, which is its fencing token.
-- ARGV: worker, ready, entry, job
-- Returns one of
--   'started', epoch, milliseconds left (-1: no deadline), milliseconds since its submission, class,
--     turn, tokens left of the account's budgets (-1: no budget), when the scarcest of them renews
--     (unix seconds), the position at which its trial is passed (-1: none), milliseconds from its
--     submission to its first start and to its first token (-1: none yet), its account's weight, the
--     Job as JSON (empty: lost), events of its log
--   'none': nothing is left to do
--   'lost': the worker has no lease
-- Calls functions of lane.lua, accounts.lua and waiting.lua (joined by schemas/redis/script.py).

local worker, ready, entry, id = unpack(ARGV)
write_when_full()

local function set_aside(job, fingerprint)
  unclaim(job.ready, job.entry)
  put_aside(job, fingerprint)
  redis.call('HSET', job.key, 'aside', fingerprint)
  note_history(job, 'set_aside')
  announce()
end

if not has_lease(worker) then return {'lost'} end
local job = load(id)
if not job or job.ended or not is_entry_of(job, ready, entry) then
  unclaim(ready, entry)
  return {'none'}
end
if job.running and job.owner ~= worker then return {'none'} end
local created, start_by, turn, affinity =
  unpack(redis.call('HMGET', job.key, 'created_ms', 'start_by', 'turn', 'affinity'))
if job.state == 'ready' then
  local is_late = job.deadline and NOW >= tonumber(job.deadline)
  if is_late or start_by and NOW >= tonumber(start_by) then
    settle_failed(job, 'expired', is_late and EXPIRED or NOT_STARTED)
    publish()
    return {'none'}
  end
  local own, resumes =
    unpack(redis.call('HMGET', PREFIX .. 'worker:' .. worker, 'fingerprint', 'resumes'))
  own = own or ''
  local made_by = redis.call('HGET', job.key, 'fingerprint')
  if job.position > 0 and made_by and made_by ~= own then -- another model would go on differently
    set_aside(job, made_by)
    return {'none'}
  end
  redis.call('HSET', job.key, 'fingerprint', own)
  job.epoch = job.epoch + 1
  redis.call('HSET', job.key, 'state', 'admitting', 'epoch', job.epoch, 'owner', worker)
  redis.call('HSETNX', job.key, 'started_ms', NOW)
  if resumes then redis.call('HSET', job.key, 'resumes', resumes) end
  if affinity then redis.call('SET', near_key(affinity), worker, 'EX', NEAR_TTL_S) end
  note_history(job, 'started', worker)
  if start_by then
    redis.call('HDEL', job.key, 'start_by')
    redis.call('ZREM', PREFIX .. 'deadlines', id)
    if job.deadline then redis.call('ZADD', PREFIX .. 'deadlines', job.deadline, id) end
  end
end
local left_ms = job.deadline and math.max(0, job.deadline - NOW) or -1
local account = account_of(job.account)
local left, renews_ms = budget_left(account)
if job.stop then left = job.stop - job.position end
local started, first = unpack(redis.call('HMGET', job.key, 'started_ms', 'first_ms'))
local request = redis.call('GET', job.key .. ':request') or ''
local reply = {'started', job.epoch, left_ms, NOW - created, job.class, turn or '0',
  left < math.huge and left or -1, renews_ms / 1000, job.trial or -1,
  started - created, first and first - created or -1, tostring(account.weight), request}
for _, line in ipairs(redis.call('XRANGE', job.key .. ':log', '-', '+')) do
  reply[#reply + 1] = line[2][2]
end
return reply
