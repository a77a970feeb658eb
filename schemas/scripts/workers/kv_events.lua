-- Tell how a worker's prefix cache changed, and keep what was told for as long as its lease.
-- ARGV: worker, number of the entry, begins (1: what was told before counts no more; or empty), most
-- entries of the stream, events as JSON (empty: none, and the number is that of the last entry),
-- number of removed blocks, their hashes, then for each stored block: hash, JSON
-- Returns 'ok'; 'behind': the entry before is not here; or 'lost': the worker has no lease
-- Calls functions of lane.lua (joined by schemas/redis/script.py).
--
-- The stream has the changes, under NUMBER-0. The hash has all blocks as of its field `seq`, the
-- number of the last entry.

local worker, number, begins, most, events, num_removed = unpack(ARGV, 1, 6)
local key = PREFIX .. 'worker:' .. worker
local stream, blocks = key .. ':kv_events', key .. ':kv_blocks'
if not has_lease(worker) then return {'lost'} end
local lease_end = redis.call('ZSCORE', PREFIX .. 'workers', worker)

local last = tonumber(redis.call('HGET', blocks, 'seq') or 0)
if last ~= tonumber(number) then
  if begins == '' and (events == '' or last ~= number - 1) then return {'behind'} end
  redis.call('XADD', stream, 'MAXLEN', most, number .. '-0',
    'ts', string.format('%.3f', NOW / 1000), 'events', events)
  if begins ~= '' then redis.call('DEL', blocks) end
  local stored = 7 + num_removed
  if num_removed ~= '0' then redis.call('HDEL', blocks, unpack(ARGV, 7, stored - 1)) end
  redis.call('HSET', blocks, 'seq', number, unpack(ARGV, stored))
end
redis.call('PEXPIREAT', stream, lease_end)
redis.call('PEXPIREAT', blocks, lease_end)
return {'ok'}
