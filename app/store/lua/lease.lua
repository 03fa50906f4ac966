-- lease: one decision, over all workers, about who may send to which endpoint now.
-- KEYS: epoch STRING, then per endpoint: leases ZSET, lease-info HASH, open STRING
-- ARGV: ttl_ms, settle_ms, number of endpoints E,
--       per endpoint: ceiling of requests, of short, of long, budget in tokens (each -1: none),
--       then per request: lease id, lane, weight in tokens, endpoints it may use as a string of "0"/"1" per endpoint
-- RETURNS: {settling_ms left, then per request: index of its endpoint from 1, or 0 if it waits}
-- Requests are granted in order, each to the endpoint with the largest free share; a request that does not fit does
-- not hold up those behind it that do, unless it is the first of its lane (no lane member overtakes a waiting elder).
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ttl, settle, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local born = redis.call('GET', KEYS[1])
if not born then
  born = now
  redis.call('SET', KEYS[1], born)
end
local first = 4 + 4 * count
local answer = { math.max(0, tonumber(born) + settle - now) }
if answer[1] > 0 then
  for _ = first, #ARGV, 4 do answer[#answer + 1] = 0 end
  return answer
end

local endpoints = {}
for e = 1, count do
  local leases, info = KEYS[3 * e - 1], KEYS[3 * e]
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
    redis.call('ZREM', leases, id)
    redis.call('HDEL', info, id)
  end
  local at = 4 + 4 * (e - 1)
  local held = { all = 0, short = 0, long = 0, tokens = 0 }
  for _, share in ipairs(redis.call('HVALS', info)) do
    local lane, weight = string.match(share, '^(%a+) (%d+)$')
    held.all = held.all + 1
    held[lane] = held[lane] + 1
    held.tokens = held.tokens + tonumber(weight)
  end
  endpoints[e] = {
    leases = leases, info = info, held = held, closed = redis.call('EXISTS', KEYS[3 * e + 1]) == 0,
    all = tonumber(ARGV[at]), short = tonumber(ARGV[at + 1]), long = tonumber(ARGV[at + 2]),
    tokens = tonumber(ARGV[at + 3]),
  }
end

-- free share of an endpoint if this request joined it; negative: it does not fit. An empty endpoint takes any request.
local function room(endpoint, lane, weight)
  local held = endpoint.held
  if not endpoint.closed then return -1 end
  if endpoint.all >= 0 and held.all >= endpoint.all then return -1 end
  if endpoint[lane] >= 0 and held[lane] >= endpoint[lane] then return -1 end
  if endpoint.tokens > 0 then
    if held.all > 0 and held.tokens + weight > endpoint.tokens then return -1 end
    return math.max(0, 1 - (held.tokens + weight) / endpoint.tokens)
  end
  if endpoint.all > 0 then return 1 - held.all / endpoint.all end
  return 1 / (1 + held.all)
end

local blocked = {}
for r = first, #ARGV, 4 do
  local id, lane, weight, may = ARGV[r], ARGV[r + 1], tonumber(ARGV[r + 2]), ARGV[r + 3]
  local best, chosen = -1, 0
  if not blocked[lane .. may] then
    for e = 1, count do
      if string.sub(may, e, e) == '1' then
        local free = room(endpoints[e], lane, weight)
        if free > best then best, chosen = free, e end
      end
    end
    if chosen == 0 then blocked[lane .. may] = true end
  end
  if chosen > 0 then
    local endpoint = endpoints[chosen]
    redis.call('ZADD', endpoint.leases, now + ttl, id)
    redis.call('HSET', endpoint.info, id, lane .. ' ' .. weight)
    endpoint.held.all = endpoint.held.all + 1
    endpoint.held[lane] = endpoint.held[lane] + 1
    endpoint.held.tokens = endpoint.held.tokens + weight
  end
  answer[#answer + 1] = chosen
end
return answer
