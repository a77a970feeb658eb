-- What is due in a unit. ARGV: kind, unit, most. Returns: the items, the longest waiting first

local key = PREFIX .. 'items:' .. ARGV[1] .. ':' .. ARGV[2]
return redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, ARGV[3])
