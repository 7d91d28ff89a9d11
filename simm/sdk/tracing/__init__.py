"""A client's calls with spans: what takes the place of its parts while it traces.

    parts      the parts: reads and puts by shared memory and TCP that note their segments
    stand_ins  a reader, a session and a connection that note when they are asked what
    switch     the calls of a client that traces, and the switch

A client that does not trace has none of this, not even a branch: see ``switch``.
"""
