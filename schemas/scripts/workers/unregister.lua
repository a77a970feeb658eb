-- End a worker's lease now. `reap` hands on what it holds.
-- ARGV: worker, how (left | crashed). Jobs are blamed for a crash, which the worker's supervisor
-- saw; a worker that left blames none
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, how = unpack(ARGV)
write_when_full()
if redis.call('ZREM', PREFIX .. 'workers', worker) == 1 and how == 'crashed' then
  redis.call('HINCRBY', PREFIX .. 'counts', 'crashed', 1)
end
forget_worker(worker)

local function holds_something()
  for _, ready in ipairs(READY) do
    if #redis.pcall('XPENDING', ready_key(ready), GROUP, '-', '+', 1, worker) == 1 then return true end
  end
end

if holds_something() then redis.call('SET', PREFIX .. 'ended:' .. worker, how, 'EX', ENDED_TTL_S) end
return {'ok'}
