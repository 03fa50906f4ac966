-- advance: chats that waited for their next prompt have it, and are payloads again.
-- KEYS: turned HASH, payload HASH
-- ARGV: key, blob, key, blob, ...
-- RETURNS: list of 1 (advanced) or 0 (it did not wait any more), in order
local advanced = {}
for i = 1, #ARGV, 2 do
  local waited = redis.call('HDEL', KEYS[1], ARGV[i])
  if waited == 1 then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
  advanced[#advanced + 1] = waited
end
return advanced
