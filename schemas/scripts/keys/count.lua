-- Count a request that writes and runs no job, against the requests that its account has a minute.
-- ARGV: account, most in a minute
-- Returns 'ok' or 'limited', the requests left, and milliseconds until the minute ends
-- Uses PREFIX of lane.lua and MINUTE_MS of accounts.lua (joined by schemas/redis/script.py).

local key, most = PREFIX .. 'writes:' .. ARGV[1], tonumber(ARGV[2])
local used, left_ms = tonumber(redis.call('GET', key) or 0), redis.call('PTTL', key)
if left_ms > MINUTE_MS then -- the clock was set back
  redis.call('PEXPIRE', key, MINUTE_MS)
  left_ms = MINUTE_MS
end
if used >= most then return {'limited', 0, left_ms} end
if left_ms > 0 then
  redis.call('INCR', key)
else
  redis.call('SET', key, 1, 'PX', MINUTE_MS)
  used, left_ms = 0, MINUTE_MS
end
return {'ok', most - used - 1, left_ms}
