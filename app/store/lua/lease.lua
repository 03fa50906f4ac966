-- lease: one decision, over all workers, about who may send to which endpoint now.
-- KEYS: epoch STRING, expected HASH, then per endpoint: leases ZSET, lease-info HASH, open STRING, control HASH,
--       reserved STRING
-- ARGV: ttl_ms, settle_ms, number of endpoints E,
--       per endpoint: ceiling of requests, of short, of long, KV tokens, requests per minute (each -1: none),
--       then per request, eldest first: lease id, lane, prompt tokens, allowance, curve, endpoints it may use as a
--       string of "0"/"1" per endpoint, urgent "0"/"1", company (most requests at its endpoint, itself included; 0: any)
-- RETURNS: {settling_ms left, granted_ms, ms until it may ask again, then per request: index of its endpoint from 1,
--           or 0 if it waits}
-- A request joins an endpoint if the predicted peak of all that its pool will hold stays within f * KV (the arithmetic
-- of app/capacity/peak.py and lengths.py), of several the one with the largest free share; an empty one takes any.
-- Nobody joins an endpoint at which an elder of its lane was refused. What does not fit while others do becomes
-- urgent by waiting and reserves its place: for two seconds, renewed by asking, others must fit beside it.
-- A suspect (company > 0) joins only where it has no more company than that, and nobody joins it beyond that; while it
-- waits it stands in nobody's way, until it is urgent: then an endpoint empties for it.
local SLOTS, MARGIN, CLIP, LEAST, RARE, STALE_MS, RESERVED_MS = 64, 3, 4096, 256, 0.005, 10000, 2000
local GRAIN_MS, GRAIN_MOST_MS = 128, 512
local GATHER_MS, GATHER_MS_PER_LEASE, GATHER_MOST_MS, GATHER_SHARE, TURN_MOST_MS = 3, 0.04, 43, 0.01, 500
local REFUSED, NO_ROOM = -1, -2
local ceil, floor, max, min, sqrt = math.ceil, math.floor, math.max, math.min, math.sqrt
local ttl, settle, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local born = redis.call('GET', KEYS[1])
if not born then
  born = now
  redis.call('SET', KEYS[1], born)
end
local first = 4 + 5 * count
local answer = { max(0, tonumber(born) + settle - now), now, 0 }
for e = 1, waking > 0 and count or 0 do
  if redis.call('ZCOUNT', KEYS[5 * e - 2], '-inf', now) > 0 then answer[1] = max(answer[1], waking) end
end
if answer[1] > 0 then
  for _ = first, #ARGV, 8 do answer[#answer + 1] = 0 end
  return answer
end

-- how long answers get: the share that gets so far; horizon: how far ahead of now anybody makes it necessary to look

local curves, horizon = {}, 1
local function curve_of(name)
  local curve = curves[name]
  if curve == nil then
    local text = redis.call('HGET', KEYS[2], name)
    curve = false
    if text then
      curve = { made = {}, share = {} }
      for made, share in string.gmatch(text, '(%d+):([%d.]+)') do
        curve.made[#curve.made + 1] = tonumber(made)
        curve.share[#curve.share + 1] = tonumber(share)
      end
      curve.last = curve.made[#curve.made]
      horizon = max(horizon, curve.last)
    end
    curves[name] = curve
  end
  return curve
end

local function most_left(curve, made, allowance)
  if curve and made < curve.last then return max(1, allowance - made) end -- the curve says the rest
  return max(1, min(max(LEAST, (curve and curve.last or min(allowance, CLIP)) - made), allowance - made))
end

-- the requests

local requests = {}
for r = first, #ARGV, 8 do
  local request = {
    id = ARGV[r], lane = ARGV[r + 1], prompt = tonumber(ARGV[r + 2]), allowance = tonumber(ARGV[r + 3]),
    curve = ARGV[r + 4], may = ARGV[r + 5], urgent = ARGV[r + 6] == '1', company = tonumber(ARGV[r + 7]),
  }
  request.left = most_left(curve_of(request.curve), 0, request.allowance)
  if not curves[request.curve] then horizon = max(horizon, request.left) end
  requests[#requests + 1] = request
end

-- what each endpoint holds

local function drop_expired(leases, info)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do free(leases, info, id) end
end

local function controlled(key, endpoint)
  local said = redis.call('HMGET', key, 'f', 'rate', 'foreign', 'requests', 'tokens', 'at', 'rpm_left', 'rpm_at', 'turn')
  endpoint.f, endpoint.rate = tonumber(said[1] or 1), tonumber(said[2] or 0)
  endpoint.foreign = tonumber(said[3] or 0)
  if now - tonumber(said[6] or 0) > STALE_MS then endpoint.f = min(1, endpoint.f) end
  local most = tonumber(said[4] or -1)
  if most >= 0 and (endpoint.all < 0 or most < endpoint.all) then endpoint.all = most end
  endpoint.most_tokens, endpoint.turn = tonumber(said[5] or -1), tonumber(said[9] or 0)
  if endpoint.rpm > 0 then
    local burst = max(1, endpoint.rpm / 60)
    endpoint.rpm_left = min(burst, tonumber(said[7] or burst) + (now - tonumber(said[8] or now)) * endpoint.rpm / 60000)
  end
end

local function add_up(info) -- anew: an older version, or a person, wrote leases without their sums
  redis.call('DEL', info .. '-sums')
  for _, share in ipairs(redis.call('HVALS', info)) do add_share(info, share, 1) end
end

local sorts = {} -- of leases: what the names of their groups say beside the moment of the grant, taken apart once
local function sort_of(text)
  local lane, allowance, kind, company = string.match(text, '^(%a+) (%d+) (%S+) ?(%d*)$')
  if not lane then return nil end
  local sort = { lane = lane, allowance = allowance + 0, curve = curve_of(kind), company = tonumber(company) or math.huge }
  sorts[text] = sort
  return sort
end

local function shares_of(endpoint) -- the hot loop: over groups of leases
  local match, rate, entries, n = string.match, endpoint.rate, {}, 0
  local held = { all = 0, short = 0, long = 0, tokens = 0, age = 0 }
  endpoint.held, endpoint.entries, endpoint.company = held, entries, math.huge
  local sums = redis.call('HGETALL', endpoint.info .. '-sums')
  for i = 1, #sums, 2 do
    local granted, text = match(sums[i], '^(%d+) (.+)$')
    local number, prompts, squares = match(sums[i + 1], '^(%d+) (%d+) (%d+)$')
    local sort = sorts[text] or sort_of(text or '')
    if not sort then break end -- an older version wrote it
    local lane, allowance, curve, made = sort.lane, sort.allowance, sort.curve, (now - granted) * rate
    if sort.company < endpoint.company then endpoint.company = sort.company end
    number, prompts = number + 0, prompts + 0
    if made > allowance - 1 then made = allowance - 1 end
    if made < 0 then made = 0 end
    local left = most_left(curve, made, allowance)
    held[lane], held.all, held.age = held[lane] + number, held.all + number, held.age + number * (now - granted)
    held.tokens = held.tokens + prompts + number * made
    entries[n + 1] = {
      curve = curve, made = made, left = left, count = number, held = prompts + number * made,
      squares = squares + 2 * made * prompts + number * made * made,
    }
    n = n + 1
    if not curve and left > horizon then horizon = left end
  end
end

local function reserved_at(key)
  local text = redis.call('GET', key)
  if not text then return nil end
  local id, lane, prompt, left, curve, company = string.match(text, '^(%S+) (%a+) (%d+) (%S+) (%S+) (%d+)$')
  left = tonumber(left)
  if not curve_of(curve) then horizon = max(horizon, left) end
  return { id = id, lane = lane, prompt = tonumber(prompt), left = left, curve = curve, company = tonumber(company) }
end

local endpoints = {}
for e = 1, count do
  local key, at = 5 * e - 2, 4 + 5 * (e - 1)
  local endpoint = {
    leases = KEYS[key], info = KEYS[key + 1], closed = redis.call('EXISTS', KEYS[key + 2]) == 0,
    control = KEYS[key + 3], reservation = KEYS[key + 4],
    all = tonumber(ARGV[at]), short = tonumber(ARGV[at + 1]), long = tonumber(ARGV[at + 2]),
    tokens = tonumber(ARGV[at + 3]), rpm = tonumber(ARGV[at + 4]),
    wanted = false, mean = {}, variance = {}, most = {},
  }
  drop_expired(endpoint.leases, endpoint.info)
  controlled(endpoint.control, endpoint)
  shares_of(endpoint)
  if endpoint.held.all ~= redis.call('HLEN', endpoint.info) then
    add_up(endpoint.info)
    shares_of(endpoint)
  end
  endpoint.reserved = reserved_at(endpoint.reservation)
  endpoints[e] = endpoint
end

-- the forecast: expectation and variance of what all hold at moment k * step, k from 0, and what they held if none had
-- ended; those of a kind and about an age are counted together

local step = max(1, horizon / SLOTS)

-- the moment written into grants is rounded, by a quarter of a step of the fastest endpoint at most either way
local fastest, grain = 0, GRAIN_MS
for _, endpoint in ipairs(endpoints) do fastest = max(fastest, endpoint.rate) end
if fastest > 0 then grain = GRAIN_MOST_MS end
while fastest > 0 and grain > 1 and grain * fastest > step / 2 do grain = grain / 2 end
answer[2] = floor(now / grain + 0.5) * grain

local function slot_of(left) return min(SLOTS, max(1, ceil(left / step))) end

local function fill_grid(curve) -- share of answers that get to slot * step
  local xs, ys, grid, i = curve.made, curve.share, {}, 1
  for slot = 0, 2 * SLOTS + 2 do
    local x = slot * step
    while xs[i + 1] and xs[i + 1] <= x do i = i + 1 end
    grid[slot] = xs[i + 1] and ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i]) or 0
  end
  curve.grid = grid
end

local function present_of(curve, made) -- share that got so far; 0 where the curve says nothing of those
  if not curve then return 0 end
  if not curve.grid then fill_grid(curve) end
  local first = floor(made / step)
  if first > SLOTS then return 0 end
  local low = curve.grid[first]
  local present = low + (curve.grid[first + 1] - low) * (made / step - first)
  return present > RARE / 2 and present or 0
end

local function alive_of(curve, made, last) -- share still there at moments 0 to `last`
  local alive, present = { [0] = 1 }, present_of(curve, made)
  if present > 0 then
    local grid, first = curve.grid, floor(made / step)
    for k = 1, last do
      local low = grid[first + k]
      local share = (low + (grid[first + k + 1] - low) * (made / step - first)) / present
      if share <= 0 then break end
      alive[k] = share
    end
    return alive
  end
  if curve then last = min(last, ceil(LEAST / step)) end
  for k = 1, last do alive[k] = 1 end
  return alive
end

local fresh = {} -- those that join now, by kind and farthest end
local function alive_of_fresh(request)
  local slot = slot_of(request.left)
  local key = slot .. ' ' .. request.curve
  if not fresh[key] then fresh[key] = alive_of(curves[request.curve], 0, slot) end
  return fresh[key]
end

local function join(endpoint, alive, count, held, squares)
  local mean, variance, most = endpoint.mean, endpoint.variance, endpoint.most
  for k = 0, SLOTS do
    local share, steps = alive[k], k * step
    if not share then return end
    most[k] = most[k] + held + count * steps
    mean[k] = mean[k] + (held + count * steps) * share
    variance[k] = variance[k] + (squares + 2 * held * steps + count * steps * steps) * share * (1 - share)
  end
end

-- the same for those who are there, in one loop, without `most`; returns the last moment that any of them may see
local function spread(endpoint, curve, group, present)
  local mean, variance, grid, last = endpoint.mean, endpoint.variance, curve.grid, group.slot
  local count, first = group.count, floor(group.made / step)
  local part = (group.made / step - first) / present -- both shares of a moment, divided by those present
  local rest = 1 / present - part
  local grow, total, bend = count * step, group.held, 2 * count * step * step
  local square, slope, share, high = group.squares, 2 * group.held * step + bend / 2, 1, grid[first + 1]
  for k = 0, last do -- total: what they held if none had ended; square: the same for the sum of their squares
    local sum = square * share
    mean[k], variance[k] = mean[k] + total * share, variance[k] + sum - sum * share
    total, square, slope = total + grow, square + slope, slope + bend
    local low = high
    high = grid[first + k + 2]
    share = low * rest + high * part
    if share <= 0 then return k end
  end
  return last
end

for _, endpoint in ipairs(endpoints) do
  for k = 0, SLOTS do endpoint.mean[k], endpoint.variance[k], endpoint.most[k] = 0, 0, 0 end
  local groups = {}
  for _, entry in ipairs(endpoint.entries) do
    local slot = slot_of(entry.left)
    local of_curve = groups[entry.curve] or {}
    groups[entry.curve] = of_curve
    local key = floor(entry.made / step) * (SLOTS + 1) + slot
    local group = of_curve[key]
    if not group then
      group = { count = 0, made = 0, held = 0, squares = 0, slot = slot }
      of_curve[key] = group
    end
    group.count, group.made = group.count + entry.count, group.made + entry.count * entry.made
    group.held, group.squares = group.held + entry.held, group.squares + entry.squares
  end
  local held_until, count_until = {}, {}
  for k = 0, SLOTS do held_until[k], count_until[k] = 0, 0 end
  for curve, of_curve in pairs(groups) do
    for _, group in pairs(of_curve) do
      group.made = group.made / group.count
      local present = present_of(curve, group.made)
      if present > 0 then
        local last = spread(endpoint, curve, group, present)
        held_until[last], count_until[last] = held_until[last] + group.held, count_until[last] + group.count
      else
        join(endpoint, alive_of(curve, group.made, group.slot), group.count, group.held, group.squares)
      end
    end
  end
  local held, count = 0, 0
  for k = SLOTS, 0, -1 do
    held, count = held + held_until[k], count + count_until[k]
    endpoint.most[k] = endpoint.most[k] + held + count * k * step
  end
end

local function peak_with(endpoint, request, other)
  local mean, variance, most, peak = endpoint.mean, endpoint.variance, endpoint.most, 0
  local alive, alive_other = alive_of_fresh(request), other and alive_of_fresh(other) or {}
  for k = 0, SLOTS do
    local m, v, all, share, share_other = mean[k], variance[k], most[k], alive[k], alive_other[k]
    if share then
      local size = request.prompt + k * step
      m, v, all = m + size * share, v + size * size * share * (1 - share), all + size
    end
    if share_other then
      local size = other.prompt + k * step
      m, v, all = m + size * share_other, v + size * size * share_other * (1 - share_other), all + size
    end
    local sum = min(all, m + MARGIN * sqrt(v))
    if sum > peak then peak = sum end
  end
  return peak
end

-- free share of an endpoint if this request joined it; negative: it does not
local function room(endpoint, request)
  local held, lane, other = endpoint.held, request.lane, endpoint.reserved
  if other and other.id == request.id then other = nil end
  local others, of_lane = other and 1 or 0, other and other.lane == lane and 1 or 0
  if not endpoint.closed or (endpoint.rpm > 0 and endpoint.rpm_left < 1) then return REFUSED end
  if endpoint[lane] >= 0 and held[lane] + of_lane >= endpoint[lane] then return REFUSED end
  if endpoint.all >= 0 and held.all + others >= endpoint.all then return NO_ROOM end
  local company = endpoint.company
  if request.company > 0 then company = min(company, request.company) end
  if other and other.company > 0 then company = min(company, other.company) end
  if held.all + others >= company then return NO_ROOM end
  if endpoint.tokens <= 0 then
    return endpoint.all > 0 and 1 - held.all / endpoint.all or 1 / (1 + held.all)
  end
  local budget = endpoint.f * endpoint.tokens
  local peak = peak_with(endpoint, request, other) + endpoint.foreign
  local above = endpoint.most_tokens >= 0 and held.tokens + endpoint.foreign + request.prompt > endpoint.most_tokens
  if (held.all > 0 or other) and (peak > budget or above) then
    endpoint.wanted = true
    return NO_ROOM
  end
  return max(0, 1 - peak / budget)
end

local function grant(endpoint, request)
  local granted = string.format('%.0f', answer[2])
  local share = table.concat({ request.lane, request.prompt, request.allowance, granted, request.curve }, ' ')
  if request.company > 0 then
    share = share .. ' ' .. request.company
    endpoint.company = min(endpoint.company, request.company)
  end
  hold(endpoint.leases, endpoint.info, request.id, now + ttl, share)
  endpoint.held.all = endpoint.held.all + 1
  endpoint.held[request.lane] = endpoint.held[request.lane] + 1
  endpoint.held.tokens = endpoint.held.tokens + request.prompt
  join(endpoint, alive_of_fresh(request), 1, request.prompt, request.prompt * request.prompt)
  if endpoint.rpm > 0 then endpoint.rpm_left = endpoint.rpm_left - 1 end
  for _, any in ipairs(endpoints) do
    if any.reserved and any.reserved.id == request.id then
      redis.call('DEL', any.reservation)
      any.reserved = nil
    end
  end
end

local function reserve(endpoint, request)
  if endpoint.reserved and endpoint.reserved.id ~= request.id then return false end
  endpoint.reserved = request
  local words = { request.id, request.lane, request.prompt, request.left, request.curve, request.company }
  local text = table.concat(words, ' ')
  redis.call('SET', endpoint.reservation, text, 'PX', RESERVED_MS)
  return true
end

local refused, waits = { short = {}, long = {} }, false -- per lane: endpoints at which an elder waits
for _, request in ipairs(requests) do
  local best, chosen, roomless = -1, 0, nil
  for e = 1, count do
    if string.sub(request.may, e, e) == '1' and (request.company > 0 or not refused[request.lane][e]) then
      local free = room(endpoints[e], request)
      if free > best then best, chosen = free, e end
      if free == NO_ROOM and (not roomless or endpoints[e].reserved and endpoints[e].reserved.id == request.id) then
        roomless = e
      end
    end
  end
  if chosen > 0 then
    grant(endpoints[chosen], request)
  else
    waits = true
    if request.urgent and roomless then reserve(endpoints[roomless], request) end
    for e = 1, count do
      if request.company == 0 and string.sub(request.may, e, e) == '1' then refused[request.lane][e] = true end
    end
  end
  answer[#answer + 1] = chosen
end
for _, endpoint in ipairs(endpoints) do
  if endpoint.wanted then redis.call('HSET', endpoint.control, 'wanted', string.format('%.0f', now)) end
  if endpoint.rpm > 0 then
    redis.call('HSET', endpoint.control, 'rpm_left', tostring(endpoint.rpm_left), 'rpm_at', string.format('%.0f', now))
  end
end

-- when to ask again: what comes free, or arrives, until then shares one decision. The longer the more leases there are,
-- and no longer than a hundredth of their age. Whoever still waits takes the next turn of all that wait, so that each
-- finds what came free since the turn before, and a fleet asks no more often than one worker would.
local held, age, turn = 0, 0, now
for _, endpoint in ipairs(endpoints) do
  held, age, turn = held + endpoint.held.all, age + endpoint.held.age, max(turn, endpoint.turn)
end
local gather = min(GATHER_MS + GATHER_MS_PER_LEASE * held, GATHER_MOST_MS, GATHER_SHARE * age / max(1, held))
answer[3] = ceil(max(GATHER_MS, gather))
if waits then
  turn = min(turn + answer[3], now + TURN_MOST_MS)
  answer[3] = turn - now
  for _, endpoint in ipairs(endpoints) do redis.call('HSET', endpoint.control, 'turn', string.format('%.0f', turn)) end
end
return answer
