-- Renew a lease where no step has anything to commit.
-- ARGV: worker, lease_ms, statistics as JSON (empty: as before)
-- Returns 'ok', two orders of tell.lua, each '<time> <order>' or empty, then (job, its JobSignal) for
-- each held job that must stop; or 'lost': it has no lease
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, lease_ms, stats = unpack(ARGV)
write_when_full()
if not renew(worker, lease_ms) then return {'lost'} end
local worker_key = PREFIX .. 'worker:' .. worker
if stats ~= '' then redis.call('HSET', worker_key, 'stats', stats) end
local orders = redis.call('HMGET', worker_key, 'told', 'reset')
local reply = {'ok', orders[1] or '', orders[2] or ''}
for _, id in ipairs(redis.call('SMEMBERS', attention_key(worker))) do
  local job = load(id)
  reply[#reply + 1] = id
  if not job or job.owner ~= worker or not job.running then
    redis.call('SREM', attention_key(worker), id)
    reply[#reply + 1] = 'F'
  else
    reply[#reply + 1] = job.cancel and 'C' or 'X'
  end
end
return reply
