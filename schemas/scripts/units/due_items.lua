-- List the items of a unit that are due. see units/due.lua for units.
-- ARGV: kind, unit, most items
-- Returns the items, the longest waiting first
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local key = PREFIX .. 'items:' .. ARGV[1] .. ':' .. ARGV[2]
return redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, ARGV[3])
