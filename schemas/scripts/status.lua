-- What is known of a job. ARGV: tenant, job
-- Returns: state, tokens, background, cancel, created_ms, started_ms, ended_ms, deadline, owner
-- (empty: none); or missing

local values = redis.call('HMGET', PREFIX .. 'job:' .. ARGV[2], 'tenant', 'state', 'position',
  'background', 'cancel', 'created_ms', 'started_ms', 'ended_ms', 'deadline', 'owner')
if values[1] ~= ARGV[1] then return {'missing'} end
local reply = {}
for at = 2, #values do reply[at - 1] = values[at] or '' end
return reply
