-- A hash as it is, with the time. ARGV: the rest of its key
-- Returns: the time in milliseconds, then field and value for each

local reply = {string.format('%.0f', NOW)}
for _, text in ipairs(redis.call('HGETALL', PREFIX .. ARGV[1])) do reply[#reply + 1] = text end
return reply
