-- Claim at most `count` jobs: resume, high, normal, batch. ARGV: worker, ticket, count
-- Returns: entries, then (ready, entry, job) for each; or idle, then the last id of each stream, to
-- wait for newer ones; or lost, when the worker has no lease.
-- The answer is kept under the caller's ticket: repeated, because the reply was lost on the way, the
-- call gives the same entries, and none is left claimed and unknown.

local worker, ticket, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local worker_key = PREFIX .. 'worker:' .. worker
write_when_full()
if not redis.call('ZSCORE', PREFIX .. 'workers', worker) then return {'lost'} end
local last = redis.call('HMGET', worker_key, 'ticket', 'taken')
if last[1] == ticket then return cjson.decode(last[2]) end

local function claim(key, most)
  local command = {'XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', most, 'STREAMS', key, '>'}
  local reply = redis.pcall(unpack(command))
  if reply and reply.err then -- the first read of this stream: no group yet
    redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    reply = redis.call(unpack(command))
  end
  return reply and reply[1][2] or {}
end

local taken = {'entries'}
for _, ready in ipairs(READY) do
  if count <= 0 then break end
  for _, entry in ipairs(claim(ready_key(ready), count)) do
    local id, fields = entry[1], entry[2]
    if fields[1] == 'job' then
      taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = ready, id, fields[2]
      count = count - 1
    else
      unclaim(ready, id) -- not an entry of ours
    end
  end
end
if #taken > 1 then
  redis.call('HSET', worker_key, 'ticket', ticket, 'taken', cjson.encode(taken))
  return taken
end

local idle = {'idle'}
for _, ready in ipairs(READY) do
  local stream = redis.pcall('XINFO', 'STREAM', ready_key(ready))
  local id = '0-0'
  for at = 1, #stream, 2 do
    if stream[at] == 'last-generated-id' then id = stream[at + 1] end
  end
  idle[#idle + 1] = id
end
return idle
