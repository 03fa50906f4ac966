-- renew_leases: a heartbeat asserts leases anew (set, not only prolonged).
-- KEYS: leases ZSET, lease-info HASH
-- ARGV: ttl_ms, lease id, share, lease id, share, ...
-- RETURNS: number of leases renewed
for i = 2, #ARGV, 2 do
  hold(KEYS[1], KEYS[2], ARGV[i], now + ARGV[1], ARGV[i + 1])
end
return (#ARGV - 1) / 2
