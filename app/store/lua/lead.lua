-- lead: one worker at a time does a job for all; its right expires with it.
-- KEYS: leader STRING
-- ARGV: name, ttl_ms
-- RETURNS: 1 if it is the leader now, else 0
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
