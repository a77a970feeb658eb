-- Write all that a turn made of a batch, or nothing.
-- ARGV: id, turn, seconds that the batch is kept after its end (0: it has not ended), changed
-- fields as a JSON object (the value true: the time now), opened lines as a JSON object, closed
-- lines as a list
-- Returns 'ok', or 'gone': the turn is over
-- Uses NOW and PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local id, turn, kept_s = unpack(ARGV, 1, 3)
local fields, opened, closed = cjson.decode(ARGV[4]), cjson.decode(ARGV[5]), cjson.decode(ARGV[6])
if redis.call('HGET', PREFIX .. 'turns:batches', id) ~= turn then return {'gone'} end
local key, open, items = PREFIX .. 'batch:' .. id, PREFIX .. 'batch_lines:' .. id, PREFIX .. 'items:batches:' .. id
for field, value in pairs(fields) do
  redis.call('HSET', key, field, value == true and NOW or value)
end
local tenant, asked, account, written, errors = unpack(redis.call('HMGET', key, 'tenant', 'asked',
  'account', 'output_bytes', 'errors_bytes'))
local bytes = #asked + #(account or '')
local has_ended = tonumber(kept_s) > 0
if has_ended then -- what it wrote is files of its own
  store(tenant, id, bytes, NOW + kept_s * 1000, math.huge)
elseif fields.output_bytes or fields.errors_bytes then
  local gone_ms = redis.call('ZSCORE', PREFIX .. 'storage:' .. tenant, id)
  if gone_ms then store(tenant, id, bytes + (written or 0) + (errors or 0), gone_ms, math.huge) end
end
for line, place in pairs(opened) do redis.call('HSET', open, line, place) end
for _, line in ipairs(closed) do
  redis.call('HDEL', open, line)
  redis.call('ZREM', items, line)
end
if has_ended then
  redis.call('SREM', PREFIX .. 'batches_open:' .. tenant, id)
  redis.call('DEL', open, items)
  redis.call('EXPIRE', key, kept_s)
end
return {'ok'}
