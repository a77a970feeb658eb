-- Tell what an account has left of its minute in this lane.
-- ARGV: account
-- Returns requests left, tokens left (each empty: no limit), milliseconds until the minute ends
-- Calls functions of accounts.lua and uses NOW of lane.lua (joined by schemas/redis/script.py).

local account = account_of(ARGV[1])
roll(account)

local function left(most, used)
  return most and math.max(0, most - used) or ''
end

return {
  left(account.requests_per_minute, account.requests),
  left(account.tokens_per_minute, account.tokens),
  math.max(0, account.minute + MINUTE_MS - NOW),
}
