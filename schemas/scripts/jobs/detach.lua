-- Take a reader's channel from a job.
-- ARGV: job, channel
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local id, channel = unpack(ARGV)
write_when_full()
local job = load(id)
if job and not job.ended then
  local rest = {}
  for name in string.gmatch(job.channels, '[^\n]+') do
    if name ~= channel then rest[#rest + 1] = name end
  end
  redis.call('HSET', job.key, 'channels', table.concat(rest, '\n'))
end
return {'ok'}
