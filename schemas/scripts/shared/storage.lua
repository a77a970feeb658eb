
-- What each tenant has stored, in Redis and on disk: one account of bytes.
--   storage:<tenant>        sorted set: what is stored, by when it is gone (unix milliseconds)
--   storage_bytes:<tenant>  hash: the bytes of each
--   storage_used            hash: of each tenant, the sum of these
-- An entry that nobody takes back goes when what it stands for does, so the account heals by itself.
-- Uses NOW and PREFIX of lane.lua (joined by schemas/redis/script.py).

local THING_BYTES = 512 -- what each takes besides: its keys, its places in lists

local MOST_PRUNED = 1000 -- in one call

-- Over maxmemory Redis refuses this, and so the script, if it has written nothing before. It changes
-- nothing.
local function refuse_when_full()
  redis.call('SETRANGE', PREFIX .. 'signature', 0, '')
end

local function give_back(tenant, name)
  redis.call('ZREM', PREFIX .. 'storage:' .. tenant, name)
  local bytes = redis.call('HGET', PREFIX .. 'storage_bytes:' .. tenant, name)
  if not bytes then return end
  redis.call('HDEL', PREFIX .. 'storage_bytes:' .. tenant, name)
  if redis.call('HINCRBY', PREFIX .. 'storage_used', tenant, -bytes) <= 0 then
    redis.call('HDEL', PREFIX .. 'storage_used', tenant)
  end
end

-- The bytes that a tenant has stored, without what is gone.
local function stored_bytes(tenant)
  local gone = redis.call('ZRANGEBYSCORE', PREFIX .. 'storage:' .. tenant, '-inf', NOW, 'LIMIT', 0, MOST_PRUNED)
  for _, name in ipairs(gone) do give_back(tenant, name) end
  return tonumber(redis.call('HGET', PREFIX .. 'storage_used', tenant) or 0)
end

-- Count something for its tenant until it is gone, in place of what was counted of it. Where the
-- tenant would have more than `most` nothing is counted, and this returns the script's reply.
local function store(tenant, name, bytes, gone_ms, most)
  local used, sizes = stored_bytes(tenant), PREFIX .. 'storage_bytes:' .. tenant
  local more = bytes + THING_BYTES - (redis.call('HGET', sizes, name) or 0)
  if more > 0 and used + more > tonumber(most) then
    return {'quota', string.format('%.0f', used), string.format('%.0f', more)}
  end
  redis.call('HINCRBY', sizes, name, more)
  redis.call('HINCRBY', PREFIX .. 'storage_used', tenant, more)
  redis.call('ZADD', PREFIX .. 'storage:' .. tenant, gone_ms, name)
end

-- What is counted already is kept until then.
local function keep_stored(tenant, name, gone_ms)
  redis.call('ZADD', PREFIX .. 'storage:' .. tenant, 'XX', gone_ms, name)
end
