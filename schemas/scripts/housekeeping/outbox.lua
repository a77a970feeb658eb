-- Read the notes that ended jobs left, the oldest first, and forget those handed on.
-- ARGV: most entries, then the ids of entries that were handed on
-- Returns for each entry: its id, job, tenant, state, ended_ms, usage as JSON, note, what cut the
-- answer short ('length', 'budget' or empty), and the bytes of what is kept of it
-- Uses PREFIX of lane.lua (joined by schemas/redis/script.py).

for at = 2, #ARGV do redis.call('XDEL', PREFIX .. 'outbox', ARGV[at]) end
local reply = {}
for _, entry in ipairs(redis.call('XRANGE', PREFIX .. 'outbox', '-', '+', 'COUNT', ARGV[1])) do
  local told = {}
  for at = 1, #entry[2], 2 do told[entry[2][at]] = entry[2][at + 1] end
  reply[#reply + 1] = entry[1]
  for _, name in ipairs({'job', 'tenant', 'state', 'ended_ms', 'usage', 'note', 'cut', 'bytes'}) do
    reply[#reply + 1] = told[name] or ''
  end
end
return reply
