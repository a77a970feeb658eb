-- List files that have expired.
-- ARGV: most files
-- Returns the record of each, or its id where the record is gone
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local reply = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'files_expire', '-inf', NOW, 'LIMIT', 0, ARGV[1])) do
  reply[#reply + 1] = redis.call('GET', PREFIX .. 'file:' .. id) or id
end
return reply
