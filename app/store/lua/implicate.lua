-- implicate: an endpoint died; whatever held a lease there was in flight at its death. Once per death, over all workers.
-- KEYS: open STRING, control HASH, leases ZSET, deaths HASH
-- ARGV: name among the deaths of the task that asks ("run:key")
-- RETURNS: the deaths that this task was in flight at, as "100,57": requests at the endpoint each time; "" for none
-- A death is known by the moment at which the breaker opened. A lease's id ends with ":run:key".
local text = redis.call('GET', KEYS[1])
local state = text and cjson.decode(text) or {}
local death = string.format('%.6f', state.since or 0)
if (state.why == 'died' or state.why == 'stalled') and redis.call('HGET', KEYS[2], 'implicated') ~= death then
  redis.call('HSET', KEYS[2], 'implicated', death)
  local t = redis.call('TIME')
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  local there = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. string.format('%.0f', now), '+inf')
  for _, lease in ipairs(there) do
    local name = string.match(lease, '([^:]+:[^:]+)$')
    local before = redis.call('HGET', KEYS[4], name)
    redis.call('HSET', KEYS[4], name, (before and before .. ',' or '') .. #there)
  end
end
return redis.call('HGET', KEYS[4], ARGV[1]) or ''
