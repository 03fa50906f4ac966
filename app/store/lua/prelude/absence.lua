-- Begins every script that judges what has expired: was Redis itself away (frozen, suspended, cut off from everybody)?
-- Then nobody could renew anything, and what expired meanwhile proves nobody's death: holders get two heartbeats.
-- GIVES: now (ms), waking (ms left of those two heartbeats, 0 if Redis was not away)
local now, waking = redis.call('TIME'), 0
now = now[1] * 1000 + math.floor(now[2] / 1000)
do
  local AWAY_MS, SETTLE_MS = 10000, 10000 -- somebody who holds something renews it every 5 s
  local known = redis.call('MGET', '{SEEN}', '{WOKE}')
  local seen, woke = known[1], known[2]
  if seen and now - seen > AWAY_MS then
    woke = now
    redis.call('SET', '{WOKE}', string.format('%.0f', now), 'PX', SETTLE_MS)
  end
  redis.call('SET', '{SEEN}', string.format('%.0f', now))
  if woke then waking = math.max(0, woke + SETTLE_MS - now) end
end
