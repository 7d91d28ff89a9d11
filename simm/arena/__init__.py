"""One worker's memory: its layout, and who may store what in which order.

Structures over a buffer, without sockets, clock or threads. The worker runs :mod:`simm.arena.store`; clients read with
:mod:`simm.arena.reader`. ``simm.table`` has the slot protocol, ``simm.slab`` the allocator.
"""
