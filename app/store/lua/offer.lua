-- offer: payloads become outstanding unless their key is so already.
-- KEYS: payload HASH, published SET
-- ARGV: key, blob, key, blob, ...
-- RETURNS: list of 1 (accepted) or 0 (known already), in order
local accepted = {}
for i = 1, #ARGV, 2 do
  if redis.call('SISMEMBER', KEYS[2], ARGV[i]) == 1 then
    accepted[#accepted + 1] = 0
  else
    accepted[#accepted + 1] = redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return accepted
