-- Tell what each tenant has stored, and forget what is gone.
-- Returns (tenant, bytes, how many things they are) for each
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local reply = {}
for _, tenant in ipairs(redis.call('HKEYS', PREFIX .. 'storage_used')) do
  local used = stored_bytes(tenant)
  for _, told in ipairs({tenant, string.format('%.0f', used), redis.call('ZCARD', PREFIX .. 'storage:' .. tenant)}) do
    reply[#reply + 1] = told
  end
end
return reply
