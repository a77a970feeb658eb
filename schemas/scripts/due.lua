-- Work for chores. `due:<kind>` says when to look at a unit of it, `turns:<kind>` how often one was
-- taken, `held:<kind>` until when it is its taker's, `items:<kind>:<unit>` what in it is due when.
-- ARGV: kind, most units. Returns: (unit, turn) for each that is due now, the longest waiting first

local kind, most = ARGV[1], ARGV[2]
local reply = {}
for _, unit in ipairs(redis.call('ZRANGEBYSCORE', PREFIX .. 'due:' .. kind, '-inf', NOW, 'LIMIT', 0, most)) do
  reply[#reply + 1] = unit
  reply[#reply + 1] = redis.call('HGET', PREFIX .. 'turns:' .. kind, unit) or '0'
end
return reply
