-- Read the end of a job.
-- ARGV: tenant, job
-- Returns one of
--   state, 'result', the result as JSON
--   state, 'log', events: no worker ended the job
--   state, 'running'
--   'missing'
--   'gone'
-- Calls functions of lane.lua (joined by schemas/redis/script.py).

local job = load(ARGV[2])
if not job or job.tenant ~= ARGV[1] then return {'missing'} end
if not job.ended then return {job.state, 'running'} end
local result = redis.call('GET', job.key .. ':result')
if result then return {job.state, 'result', result} end
local events = redis.call('XRANGE', job.key .. ':log', '-', '+')
if #events == 0 then return {'gone'} end
local reply = {job.state, 'log'}
for _, line in ipairs(events) do reply[#reply + 1] = line[2][2] end
return reply
