"""A whole cluster on a fake network and clock: thousands of nodes, hours in minutes, every run again by its seed.

What is real: ``cluster.py`` (the manager's decisions, its state file's contents included), ``member.py`` (what a map
means for a server), ``shards.py`` (a worker's shard words) and ``shardmap.py``. What is played: processes, connections,
clocks, the disk, the mover's and the client's exchanges, and what a store holds (digests with version numbers).

    net      the clock, the events, hosts and processes, the network and what is wrong with it
    manager  cluster.py as manager.py drives it
    server   member.py and shards.py as membership.py, worker.py and store.py drive them
    mover    what mover.py exchanges with a previous owner and its own worker
    client   where a client looks, as gets.py and puts.py have it
    oracle   what must never happen
    faults   what goes wrong when, from a seed
    world    all of that together; a run and its report

Everything random comes from one generator, everything happens in one queue: the same seed gives the same trace.
"""
