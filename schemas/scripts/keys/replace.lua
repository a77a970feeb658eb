-- Change the record of an API key, if it is still as it was read.
-- KEYS: the hash of keys
-- ARGV: id, the record as it was read, the record as it is to be
-- Returns 'ok' or 'stale'

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return {'stale'} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return {'ok'}
