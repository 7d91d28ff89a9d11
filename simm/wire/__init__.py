"""The messages between processes, their fields, and the handshake that opens a connection.

No I/O: bytes in, tuples out. ``simm.rpc`` has codec and frames; docs/protocol.md specifies every byte.
"""
