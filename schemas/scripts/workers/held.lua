-- List jobs that a worker claimed at least `idle_ms` ago, started or not.
-- ARGV: worker, idle_ms
-- Returns their ids
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local worker, idle_ms = unpack(ARGV)
local MOST = 1000
local held = {}
for _, ready in ipairs(READY) do
  local key = ready_key(ready)
  local lines = redis.pcall('XPENDING', key, GROUP, 'IDLE', idle_ms, '-', '+', MOST, worker)
  for _, line in ipairs(lines.err and {} or lines) do
    local entry = redis.call('XRANGE', key, line[1], line[1])[1]
    if entry then held[#held + 1] = entry[2][2] end
  end
end
return held
