-- Count something that is about to be stored. A repeated call changes nothing.
-- ARGV: tenant, its name, bytes, seconds until it is gone, most bytes of the tenant
-- Returns 'ok'; 'known': it was counted before; or 'quota', bytes that the tenant has, bytes more
-- Uses PREFIX of lane.lua and calls storage.lua (joined by schemas/redis/script.py).

local tenant, name, bytes, kept_s, most = unpack(ARGV)
refuse_when_full()
stored_bytes(tenant)
if redis.call('HEXISTS', PREFIX .. 'storage_bytes:' .. tenant, name) == 1 then return {'known'} end
return store(tenant, name, tonumber(bytes), NOW + kept_s * 1000, most) or {'ok'}
