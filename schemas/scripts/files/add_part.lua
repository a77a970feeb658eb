-- Record a part of an upload, which is on disk.
-- ARGV: upload, part, its bytes, most parts, bytes of the whole file
-- Returns 'ok', also for a part that is there already; 'parts': there are too many; 'bytes': they
-- would be more than the file; or 'missing': the upload was forgotten
-- Its first write is one that Redis refuses when memory is full.
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local upload, part, bytes, most, whole = unpack(ARGV)
local key = PREFIX .. 'upload:' .. upload
if redis.call('EXISTS', key) == 0 then return {'missing'} end
if redis.call('HEXISTS', key, part) == 1 then return {'ok'} end
local num_parts, sum = 0, tonumber(bytes)
local fields = redis.call('HGETALL', key)
for at = 1, #fields, 2 do
  if string.sub(fields[at], 1, 5) == 'part_' then
    num_parts, sum = num_parts + 1, sum + fields[at + 1]
  end
end
if num_parts >= tonumber(most) then return {'parts'} end
if sum > tonumber(whole) then return {'bytes'} end
redis.call('HSET', key, part, bytes)
return {'ok'}
