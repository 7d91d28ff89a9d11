"""A whole cluster on a fake network and clock: thousands of nodes, hours in minutes, every run again by its seed.

What is real: ``cluster/machine.py`` (the manager's decisions, its state file's contents included),
``cluster/assignment.py`` (what a map means for a server), ``arena/shard_words.py`` (a worker's shard words),
``arena/marks/`` (groups, and what outranks a mover's marks), ``sdk/calls/groups.py`` and ``sdk/large/`` (groups and
values in parts at a client), ``cluster/epochs.py`` with ``control/epochs.py``, ``arena/namespaces.py`` and
``sdk/ops/epochs.py`` (namespaces that advance) and ``cluster/shard_map.py``. What is played: processes, connections,
clocks, the disk, the mover's and the client's exchanges, and what a store holds (digests with version numbers).

    net      the clock, the events, hosts and processes, the network and what is wrong with it
    manager  cluster/machine.py as manager.py drives it
    arena    what a worker leaves to its successor, and what readers see of it
    server   cluster/assignment.py and arena/shard_words.py as server/membership.py, server/worker.py and
    arena/store.py drive them
    mover    what server/migration.py exchanges with a previous owner and its own worker
    client   where a client looks, as sdk/reads.py and sdk/writes.py have it
    whole    how a client runs the product's code for groups and values in parts
    load     operations on those
    pins     sessions with pinned values, and ranges of values
    epochs   operations on a namespace that advances
    oracle   what must never happen
    faults   what goes wrong when, from a seed
    world    all of that together; a run and its report

Everything random comes from one generator, everything happens in one queue: the same seed gives the same trace.
"""
