-- renew_claims: a heartbeat asserts claims anew (a Redis that lost everything learns them again).
-- KEYS: claims ZSET, holders HASH
-- ARGV: ttl_ms, key, holder, key, holder, ...
-- RETURNS: list of keys that a live foreign holder has meanwhile
local lost = {}
for i = 2, #ARGV, 2 do
  local holder = redis.call('HGET', KEYS[2], ARGV[i])
  local expiry = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if holder and holder ~= ARGV[i + 1] and expiry and tonumber(expiry) > now then
    lost[#lost + 1] = ARGV[i]
  else
    redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i])
    if holder ~= ARGV[i + 1] then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
  end
end
return lost
