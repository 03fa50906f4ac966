-- turned: a turn of a chat is made, others may follow; claim and lease end, the chat waits for its next prompt.
-- KEYS: turned HASH, payload HASH, claims ZSET, holders HASH, published SET, sent HASH, charges HASH, leases ZSET, lease-info HASH,
--       deaths HASH
-- ARGV: key, holder, blob, lease id, its name among the deaths
-- RETURNS: 1 if it waits now, 0 if a live foreign holder has the key, or it is in the stream already
-- A payload that is missing while the key is not in the stream means committed, or a Redis that forgot: the chat is kept,
-- and the producer drops what the files have. Requests, charges and deaths are counted anew for each turn.
free(KEYS[8], KEYS[9], ARGV[4])
local holder, expiry = redis.call('HGET', KEYS[4], ARGV[1]), redis.call('ZSCORE', KEYS[3], ARGV[1])
if holder and holder ~= ARGV[2] and expiry and (tonumber(expiry) > now or waking > 0) then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then return 0 end
redis.call('HDEL', KEYS[6], ARGV[1])
redis.call('HDEL', KEYS[7], ARGV[1])
redis.call('HDEL', KEYS[10], ARGV[5])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
