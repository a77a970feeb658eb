-- with lane, accounts, waiting
-- Hand on what is held by workers whose lease lapsed, or who have none. ARGV: most entries
-- Returns: how many it was

local budget, count = tonumber(ARGV[1]), 0
write_when_full()

-- Gone from here a worker is fenced as a whole, however many calls its entries take.
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'workers', '-inf', NOW)) do
  redis.call('ZREM', PREFIX .. 'workers', worker)
  redis.call('DEL', PREFIX .. 'worker:' .. worker, attention_key(worker))
end

local function hand_on(ready, entry)
  local key = ready_key(ready)
  local line = redis.call('XRANGE', key, entry, entry)[1]
  local job = line and load(line[2][2])
  if job and not job.ended and is_entry_of(job, ready, entry) then
    requeue(job)
  else
    unclaim(ready, entry)
  end
end

local function reap_stream(ready)
  local key = ready_key(ready)
  if redis.call('EXISTS', key) == 0 then return end
  for _, consumer in ipairs(redis.pcall('XINFO', 'CONSUMERS', key, GROUP)) do
    local name, pending = consumer[2], consumer[4]
    if not redis.call('ZSCORE', PREFIX .. 'workers', name) then
      local most = math.min(pending, budget - count)
      if most > 0 then
        for _, held in ipairs(redis.call('XPENDING', key, GROUP, '-', '+', most, name)) do
          hand_on(ready, held[1])
          count = count + 1
        end
      end
      if most == pending then redis.call('XGROUP', 'DELCONSUMER', key, GROUP, name) end
    end
  end
end

for _, ready in ipairs(READY) do reap_stream(ready) end
publish()
return {count}
