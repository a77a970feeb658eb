-- with lane
-- A worker's lease ends now; `reap` hands on what it holds. ARGV: worker

write_when_full()
redis.call('ZREM', PREFIX .. 'workers', ARGV[1])
redis.call('DEL', PREFIX .. 'worker:' .. ARGV[1], attention_key(ARGV[1]))
return {'ok'}
