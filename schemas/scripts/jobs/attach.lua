-- Add a reader's channel to a job and give the log after its cursor, with no gap between the two.
-- ARGV: tenant, job, channel, cursor, most events[, most bytes]
-- Returns one of
--   state, 'log', events
--   state, 'result', the result as JSON: the log is gone
--   'missing'
--   'gone': both log and result are gone
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local tenant, id, channel, cursor, most, most_bytes = unpack(ARGV)
local AT_ONCE = 64 -- events that are copied out of the log, so that few beyond `most_bytes` are
write_when_full()
local job = load(id)
if not job or job.tenant ~= tenant then return {'missing'} end
local log = job.key .. ':log'
if job.ended and redis.call('EXISTS', log) == 0 then
  local result = redis.call('GET', job.key .. ':result')
  return result and {job.state, 'result', result} or {'gone'}
end
if not job.ended and not string.find('\n' .. job.channels .. '\n', '\n' .. channel .. '\n', 1, true) then
  redis.call('HSET', job.key, 'channels', job.channels .. '\n' .. channel)
end

-- The last event that begins at the cursor or below; ids are epoch-position, and epochs are few.
local first = '-'
for epoch = job.epoch, 1, -1 do
  local line = redis.call('XREVRANGE', log, epoch .. '-' .. cursor, epoch .. '-0', 'COUNT', 1)[1]
  if line then
    first = line[1]
    break
  end
end
-- The bytes of the first event do not count: the reader may have it, and must come further.
local reply, num_bytes, bound = {job.state, 'log'}, 0, tonumber(most_bytes) or math.huge
local num_left = tonumber(most)
while num_left > 0 and num_bytes < bound do
  local lines = redis.call('XRANGE', log, first, '+', 'COUNT', math.min(AT_ONCE, num_left))
  for _, line in ipairs(lines) do
    if num_bytes >= bound then break end
    if #reply > 2 then num_bytes = num_bytes + #line[2][2] end
    reply[#reply + 1] = line[2][2]
  end
  if #lines < AT_ONCE then break end
  num_left, first = num_left - AT_ONCE, '(' .. lines[AT_ONCE][1]
end
return reply
