-- with lane, accounts
-- What an account has left of its minute in this lane. ARGV: account
-- Returns: requests, tokens (each empty: no limit), milliseconds until the minute ends

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
