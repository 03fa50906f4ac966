-- Begins every script that gives or ends a lease: its expiry, its share, and the sums of all shares change together.
-- A share is "lane prompt allowance granted_ms kind [company]". Shares that differ only in their prompt are one group
-- of the sums: a HASH "granted_ms lane allowance kind [company]" → "how many, their prompts, the squares of those", so
-- that a decision looks at groups instead of leases. Which is one is lease.lua's doing: it rounds the moment of the grant.
local function add_share(info, share, sign)
  local lane, prompt, allowance, granted, kind = string.match(share, '^(%S+) (%d+) (%d+) (%d+) (.+)$')
  if not lane then return end
  local group = table.concat({ granted, lane, allowance, kind }, ' ')
  local sums, count, prompts, squares = info .. '-sums', 0, 0, 0
  local text = redis.call('HGET', sums, group)
  if text then count, prompts, squares = string.match(text, '^(%d+) (%d+) (%d+)$') end
  count = count + sign
  if count > 0 then
    text = string.format('%.0f %.0f %.0f', count, prompts + sign * prompt, squares + sign * prompt * prompt)
    redis.call('HSET', sums, group, text)
  else
    redis.call('HDEL', sums, group)
  end
end

local function hold(leases, info, id, expiry, share)
  redis.call('ZADD', leases, expiry, id)
  local before = redis.call('HGET', info, id)
  if before == share then return end
  if before then add_share(info, before, -1) end
  redis.call('HSET', info, id, share)
  add_share(info, share, 1)
end

local function free(leases, info, id)
  redis.call('ZREM', leases, id)
  local share = redis.call('HGET', info, id)
  if not share then return end
  redis.call('HDEL', info, id)
  add_share(info, share, -1)
end
