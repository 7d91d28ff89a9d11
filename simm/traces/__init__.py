"""Traces of LLM requests, and what a cache of KV blocks would find of them under each eviction policy.

    cache      the interface of a simulated cache
    formats    requests, and their files: Mooncake's traces and a plain format for any engine's log
    generate   synthetic traces of known structure, each from a seed
    simulate   the replay of a trace through a policy, the hit measure, and the table of all policies
    queues     simulated policies: FIFO, LRU, SIEVE, S3-FIFO, unbounded
    stored     SiMM's own policies: the real allocator and eviction code, without the bytes of the values
    adaptive   simulated policies with a memory of evicted blocks: ARC, LRU-2; and MIN, which knows the future

No sockets, no clock, no threads. ``simm bench --trace`` and ``benchmarks/eviction.py`` are the commands on top. The
policies here are references; the servers' own are in ``arena/eviction.py``, and no server imports this package.
"""
