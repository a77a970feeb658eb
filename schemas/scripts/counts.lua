-- How full the lane is, from the streams themselves. Returns: waiting, claimed or running, ended so
-- far, average milliseconds between two ends

local held, pending = 0, 0
for _, ready in ipairs(READY) do
  held = held + redis.call('XLEN', ready_key(ready))
  local groups = redis.call('EXISTS', ready_key(ready)) == 1
    and redis.call('XINFO', 'GROUPS', ready_key(ready)) or {}
  for _, group in ipairs(groups) do
    for at = 1, #group, 2 do
      if group[at] == 'pending' then pending = pending + group[at + 1] end
    end
  end
end
local pace = redis.call('HMGET', PREFIX .. 'counts', 'ended', 'interval_ms')
return {held - pending, pending, pace[1] or '0', pace[2] or '0'}
