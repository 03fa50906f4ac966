-- claim: one delivery gets the right to work on a key.
-- KEYS: payload HASH, claims ZSET, holders HASH, halt STRING, deaths HASH
-- ARGV: key, holder, ttl_ms, its name among the deaths
-- RETURNS: {"claimed", blob, deaths it was in flight at} | {"gone"} (published or committed) | {"held"} (a live foreign claim) | {"halted"}
if redis.call('EXISTS', KEYS[4]) == 1 then return {'halted'} end
local blob = redis.call('HGET', KEYS[1], ARGV[1])
if not blob then return {'gone'} end
local expiry = redis.call('ZSCORE', KEYS[2], ARGV[1])
local lives = expiry and (tonumber(expiry) > now or waking > 0)
if lives and redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then return {'held'} end
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return {'claimed', blob, redis.call('HGET', KEYS[5], ARGV[4]) or ''}
