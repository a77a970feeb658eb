-- Read the dead letters (the dead-letter queue) of a lane.
-- ARGV: job (empty: all), most letters
-- Returns how many were dropped to make room, then each letter as JSON, the newest first. For one
-- job: its letter, and the Job as JSON (empty: it was not kept)
-- Uses DEAD_TTL_S, NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local id, most = ARGV[1], tonumber(ARGV[2])
local oldest = NOW - DEAD_TTL_S * 1000
local reply = {redis.call('HGET', PREFIX .. 'counts', 'dead_dropped') or '0'}

local function letter(line)
  local told = {}
  for at = 1, #line[2], 2 do told[line[2][at]] = line[2][at + 1] end
  return cjson.encode(told)
end

if id == '' then
  for _, line in ipairs(redis.call('XREVRANGE', PREFIX .. 'dead', '+', oldest, 'COUNT', most)) do
    reply[#reply + 1] = letter(line)
  end
  return reply
end
local entry = redis.call('HGET', PREFIX .. 'job:' .. id, 'dead')
local line = entry and redis.call('XRANGE', PREFIX .. 'dead', entry, entry)[1]
if line then
  reply[2] = letter(line)
  reply[3] = redis.call('GET', PREFIX .. 'job:' .. id .. ':request') or ''
end
return reply
