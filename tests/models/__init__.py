"""Models that are searched exhaustively or by seed. ``python -m tests.models`` runs the exhaustive ones.

``slot``: the table's slots and chunks under readers that never ask, single loads and stores as steps.
``shard_move``: a shard that moves from one worker to another, with the real ``simm.arena.shard_words.ShardWords``.
``marks``: kept values and groups through such a move, evictions and deaths, with the real ``simm.arena.store.Store``.
``large``: values in parts, with the real ``simm.sdk.large.values.Large``.
``rdma_get``: a value read over a network, against everything that a worker and its writers do meanwhile.
``rdma_grants``: WRITEs under way, lanes that close, processes that die. ``python -m tests.models.rdma_searches`` runs
both. ``etcd``: etcd under a network that fails by a seed.
"""
