-- release_lease: a holder gives its share back.
-- KEYS: leases ZSET, lease-info HASH
-- ARGV: lease id
-- RETURNS: nothing
free(KEYS[1], KEYS[2], ARGV[1])
