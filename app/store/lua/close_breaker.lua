-- close_breaker: an endpoint gets work again, as few requests as its observer said while it was away; it lets them grow.
-- KEYS: open STRING, control HASH, changes STREAM
-- ARGV: endpoint's URL, requests at first if no observer said anything, the most that it may have said, "1" to end also
--       what a person holds
-- RETURNS: 1 if it was open, 0 if it was closed already or is held
local text = redis.call('GET', KEYS[1])
if not text then return 0 end
local state = cjson.decode(text)
if state.why == 'drained' and ARGV[4] ~= '1' then return 0 end
redis.call('DEL', KEYS[1])
local said = tonumber(redis.call('HGET', KEYS[2], 'requests') or -1)
if said < 0 or said > tonumber(ARGV[3]) then redis.call('HSET', KEYS[2], 'requests', ARGV[2]) end
if state.told then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'url', ARGV[1], 'change', 'up', 'evidence', state.evidence,
    'since', string.format('%.3f', state.since))
end
return 1
