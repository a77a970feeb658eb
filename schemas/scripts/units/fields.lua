-- Read a hash, with the time.
-- ARGV: its key without the prefix
-- Returns the unix time in milliseconds, then each field and its value
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local reply = {string.format('%.0f', NOW)}
for _, text in ipairs(redis.call('HGETALL', PREFIX .. ARGV[1])) do reply[#reply + 1] = text end
return reply
