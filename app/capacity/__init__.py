"""How much an endpoint can be given: expected lengths, predicted peak of its KV pool, the factor that is learned.

Pure: no clock, no Redis, no sockets. The same arithmetic decides in app/store/lua/lease.lua, over all workers.
"""
