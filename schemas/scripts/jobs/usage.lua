-- Tell how the accounts stand that submitted jobs last.
-- ARGV: most accounts
-- Returns for each: name, tenant, jobs queued, jobs running, why it is blocked (empty: it is not),
-- tokens of this day, tokens of this month, its limits as JSON
-- Calls functions of accounts.lua and uses PREFIX of lane.lua (joined by schemas/redis/script.py).

local reply = {}
for _, name in ipairs(redis.call('ZREVRANGE', PREFIX .. 'accounts', 0, ARGV[1] - 1)) do
  local account, limits = account_of(name), {}
  for _, field in ipairs(LIMITS) do limits[field] = account[field] end
  for _, value in ipairs({name, account.tenant, account.queued, account.running,
    account.blocked or '', spent(DAY_NAME, account), spent(MONTH_NAME, account),
    cjson.encode(limits)}) do
    reply[#reply + 1] = value
  end
end
return reply
