-- Let no job of the lane begin or go on elsewhere, or let them again. What runs, runs on.
-- ARGV: 1 to pause, 0 to resume
-- Returns 'ok'
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

if ARGV[1] == '1' then
  redis.call('SET', PREFIX .. 'paused', NOW)
else
  redis.call('DEL', PREFIX .. 'paused')
  announce()
end
return {'ok'}
