-- End an upload, unless it has ended.
-- ARGV: id, tenant, its end
-- Returns the end that it has, or 'missing': it was forgotten
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local id, tenant, ending = unpack(ARGV)
local key = PREFIX .. 'upload:' .. id
if redis.call('EXISTS', key) == 0 then return {'missing'} end
redis.call('HSETNX', key, 'end', ending)
if redis.call('HGET', key, 'end') == ending then
  redis.call('ZREM', PREFIX .. 'uploads:' .. tenant, id)
end
return {redis.call('HGET', key, 'end')}
