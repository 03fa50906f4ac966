-- orphaned: keys that are outstanding and that nobody works on: their claim expired, or (if asked) they have none.
-- KEYS: payload HASH, claims ZSET, holders HASH
-- ARGV: include unclaimed (1 | 0), limit
-- RETURNS: list of keys; expired claims are removed
local limit, found = tonumber(ARGV[2]), {}
if waking > 0 then return found end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)) do
  redis.call('ZREM', KEYS[2], key)
  redis.call('HDEL', KEYS[3], key)
  if redis.call('HEXISTS', KEYS[1], key) == 1 then found[#found + 1] = key end
end
if ARGV[1] == '1' then
  for _, key in ipairs(redis.call('HKEYS', KEYS[1])) do
    if #found >= limit then break end
    if not redis.call('ZSCORE', KEYS[2], key) then found[#found + 1] = key end
  end
end
return found
