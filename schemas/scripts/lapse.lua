-- When the next lease of a worker ends, if it is not renewed. Returns: milliseconds; -1: none runs

local next = redis.call('ZRANGE', PREFIX .. 'workers', 0, 0, 'WITHSCORES')
return {next[1] and math.max(0, next[2] - NOW) or -1}
