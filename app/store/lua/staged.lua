-- staged: a stage of an answer is made and others follow: the payload has it from now on. The lease ends, the claim stays.
-- KEYS: payload HASH, claims ZSET, holders HASH, published SET, leases ZSET, lease-info HASH
-- ARGV: key, holder, blob, lease id
-- RETURNS: 1 if its holder goes on, 0 if a live foreign holder has the key, or it is in the stream already
-- A payload that is missing while the key is not in the stream means committed, or a Redis that forgot: the answer goes
-- on, and the collector drops what the files have.
free(KEYS[5], KEYS[6], ARGV[4])
if redis.call('SISMEMBER', KEYS[4], ARGV[1]) == 1 then return 0 end
local holder, expiry = redis.call('HGET', KEYS[3], ARGV[1]), redis.call('ZSCORE', KEYS[2], ARGV[1])
if holder and holder ~= ARGV[2] and expiry and (tonumber(expiry) > now or waking > 0) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
