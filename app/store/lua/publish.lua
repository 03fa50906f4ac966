-- publish: a key's result enters the stream; payload, claim and lease end. All or nothing.
-- KEYS: responses STREAM, payload HASH, claims ZSET, holders HASH, published SET, leases ZSET, lease-info HASH,
--       deaths HASH
-- ARGV: key, dataset, kind ("response" | "rejected"), blob, lease id ("" if none), its name among the deaths
-- RETURNS: 1 if it entered the stream, 0 if the key is in the stream already
-- A payload that is missing while the key is not in the stream means committed, or a Redis that forgot:
-- the record goes in, the collector drops what the files have.
if ARGV[5] ~= '' then free(KEYS[6], KEYS[7], ARGV[5]) end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[8], ARGV[6])
if redis.call('SADD', KEYS[5], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[1], '*', 'key', ARGV[1], 'dataset', ARGV[2], 'kind', ARGV[3], 'blob', ARGV[4])
return 1
