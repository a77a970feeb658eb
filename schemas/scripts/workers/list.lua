-- List the workers that have a lease, or had one that lapsed and was not reaped.
-- Returns (worker, milliseconds left, card, statistics) for each
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local reply = {}
local leases = redis.call('ZRANGE', PREFIX .. 'workers', 0, -1, 'WITHSCORES')
for at = 1, #leases, 2 do
  local told = redis.call('HMGET', PREFIX .. 'worker:' .. leases[at], 'card', 'stats')
  reply[#reply + 1] = leases[at]
  reply[#reply + 1] = leases[at + 1] - NOW
  reply[#reply + 1] = told[1] or ''
  reply[#reply + 1] = told[2] or ''
end
return reply
