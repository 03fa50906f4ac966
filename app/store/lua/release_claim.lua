-- release_claim: the holder gives a key back undone; its payload stays outstanding.
-- KEYS: claims ZSET, holders HASH
-- ARGV: key, holder
-- RETURNS: 1 if it was ours
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
