-- commit: the files have these entries; Redis forgets their keys.
-- KEYS: responses STREAM, sent HASH, charges HASH, then one published SET per dataset
-- ARGV: group, then per dataset: number of entries n, n entry ids, n keys
-- RETURNS: number of entries acknowledged
local at, total = 2, 0
for d = 4, #KEYS do
  local n = tonumber(ARGV[at])
  redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, at + 1, at + n))
  redis.call('XDEL', KEYS[1], unpack(ARGV, at + 1, at + n))
  redis.call('SREM', KEYS[d], unpack(ARGV, at + n + 1, at + 2 * n))
  redis.call('HDEL', KEYS[2], unpack(ARGV, at + n + 1, at + 2 * n))
  redis.call('HDEL', KEYS[3], unpack(ARGV, at + n + 1, at + 2 * n))
  at, total = at + 2 * n + 1, total + n
end
return total
