"""The Redis room: connections, the name and owner of every key, the Lua scripts, the private server.

Redis is a conveyor belt, never the truth: whatever it forgets is found again from the files.
"""
