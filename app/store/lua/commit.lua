-- commit: the files have these entries; Redis forgets their keys.
-- KEYS: responses STREAM, sent HASH, charges HASH, then one published SET per dataset
-- ARGV: group, number of datasets D, then D times: number of entries n, n times (entry id, key)
-- RETURNS: number of entries acknowledged
local group, datasets, at, total = ARGV[1], tonumber(ARGV[2]), 3, 0
for d = 1, datasets do
  local n = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, n do
    local entry, key = ARGV[at], ARGV[at + 1]
    redis.call('XACK', KEYS[1], group, entry)
    redis.call('XDEL', KEYS[1], entry)
    redis.call('SREM', KEYS[3 + d], key)
    redis.call('HDEL', KEYS[2], key)
    redis.call('HDEL', KEYS[3], key)
    at = at + 2
    total = total + 1
  end
end
return total
