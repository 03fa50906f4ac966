-- open_breaker: an endpoint gets nothing new, and why.
-- KEYS: open STRING, control HASH, changes STREAM
-- ARGV: endpoint's URL, why, evidence, "1" if this reason replaces the one known
-- RETURNS: 1 if it was closed, 2 if the reason changed, 0 if nothing did
-- What a person holds stays held. A loss is told once until the breaker closes, also where a milder reason came first.
local LOSS = { died = true, stalled = true, differs = true }
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
local url, why, evidence = ARGV[1], ARGV[2], ARGV[3]
local text = redis.call('GET', KEYS[1])
local state = text and cjson.decode(text) or { since = now, told = false }
if text then
  if state.why == 'drained' or (why ~= 'drained' and ARGV[4] ~= '1') then return 0 end
  if state.why == why and state.evidence == evidence then return 0 end
end
state.why, state.evidence = why, evidence
if LOSS[why] and not state.told then
  state.told = true
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'url', url, 'change', 'down', 'evidence', evidence,
    'since', string.format('%.3f', state.since))
end
redis.call('SET', KEYS[1], cjson.encode(state))
redis.call('HSET', KEYS[2], 'why', why)
if why == 'died' then redis.call('HDEL', KEYS[2], 'ready') end
if text then return 2 end
redis.call('HINCRBY', KEYS[2], 'opens', 1)
return 1
