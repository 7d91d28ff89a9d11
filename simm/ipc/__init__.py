"""A process beside its worker: the session with its grants, the commit ring, and puts by shared memory.

Used by the client, and by the server's own processes that put values (stream, endpoint, mover).
"""
