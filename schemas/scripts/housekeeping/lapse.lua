-- Tell when the first lease of a worker ends, if it is not renewed.
-- Returns the milliseconds until then, or -1: no lease runs
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local next = redis.call('ZRANGE', PREFIX .. 'workers', 0, 0, 'WITHSCORES')
return {next[1] and math.max(0, next[2] - NOW) or -1}
