-- Name what a request under an idempotency key makes.
-- ARGV: the key's place, digest of the body, a name, seconds that it is remembered
-- Returns 'ok' and the name: the one that the first request gave; or 'mismatch': that one had
-- another body
-- Its first write is one that Redis refuses when memory is full.
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local place, digest, name, remember_s = unpack(ARGV)
local key = PREFIX .. 'idempotency:' .. place
if redis.call('SET', key, digest .. ' ' .. name, 'NX', 'EX', remember_s) then return {'ok', name} end
local known, named = string.match(redis.call('GET', key), '^(%S+) (%S+)$')
if known ~= digest then return {'mismatch'} end
return {'ok', named}
