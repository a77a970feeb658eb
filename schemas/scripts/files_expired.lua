-- Files whose time is over. ARGV: most. Returns: their records, or their ids where those are gone

local reply = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'files_expire', '-inf', NOW, 'LIMIT', 0, ARGV[1])) do
  reply[#reply + 1] = redis.call('GET', PREFIX .. 'file:' .. id) or id
end
return reply
