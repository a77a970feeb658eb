
-- The log of a job, which is also what the job is charged for.
-- Calls functions of lane.lua and accounts.lua (joined by schemas/redis/script.py).

-- A job's prompt counts once, with the first tokens after it. `text`: tokens:cached; empty: none yet.
local function note_prompt(job, account, text)
  if job.prompt or text == '' then return end
  local prompt, cached = string.match(text, '^(%d+):(%d+)$')
  local guess = redis.call('HGET', job.key, 'cost') -- the turns were charged with it at the claim
  redis.call('HSET', job.key, 'prompt', text)
  charge(job, account, tonumber(prompt), tonumber(cached), 0, prompt - cached - guess)
  job.prompt = text
end

-- Tokens that the job may still log. Out of budget, it has the rest for itself, and must stop there.
local function room_of(job, account)
  if job.stop then return job.stop - job.position end
  return math.max(0, (budget_left(account)))
end

local function stop_after(job, account, room)
  charge(job, account, 0, 0, room, room)
  job.stop = job.position + room
  redis.call('HSET', job.key, 'stop', job.stop)
end

-- Answers that were drawn and are not shown were computed too, as of `best_of` or a search.
local function charge_unshown(job, tokens)
  if tokens <= 0 then return end
  charge(job, account_of(job.account), 0, 0, tokens, tokens)
  job.unshown = tokens
  book()
end

-- Appends `count` events from ARGV[at] on, three arguments each: position, tokens, JSON. Those that
-- the log has are skipped. A worker that does not continue the log cannot go on with the job, so
-- another gets it. Returns K, D or F; or B: it was appended as far as the budget goes.
local function append(job, prompt, count, at)
  local account, letter, is_cut = account_of(job.account), count > 0 and 'D' or 'K', false
  note_prompt(job, account, prompt)
  for _ = 1, count do
    local position, tokens, event = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), ARGV[at + 2]
    at = at + 3
    if position == job.position then
      local room = room_of(job, account)
      if tokens > room then
        if not job.stop then stop_after(job, account, room) end
        is_cut = true
        break
      end
      redis.call('XADD', job.key .. ':log', job.epoch .. '-' .. position, 'e', event)
      say(job, event)
      if not job.stop then charge(job, account, 0, 0, tokens, tokens) end
      job.position = position + tokens
      letter = 'K'
    elseif position + tokens > job.position then
      redis.call('HSET', job.key, 'position', job.position)
      requeue(job, 'log_differs')
      return 'F'
    end
  end
  if letter == 'K' then
    redis.call('HSET', job.key, 'position', job.position, 'state', 'decoding')
    if job.state == 'admitting' and count > 0 then
      redis.call('HSETNX', job.key, 'first_ms', NOW)
      note_history(job, 'first_token')
    end
    if job.trial and job.position >= tonumber(job.trial) then redis.call('HDEL', job.key, 'trial') end
  end
  return (is_cut or room_of(job, account) == 0) and 'B' or letter
end
