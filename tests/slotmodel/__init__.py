"""Small models of SiMM's two protocols, searched exhaustively: every interleaving there is.

``slot``: the table's slots and chunks under readers that never ask, single loads and stores as steps.
``move``: a shard that moves from one worker to another, with the real ``simm.shards.ShardWords``.
``python -m tests.slotmodel`` runs them and prints what they find.
"""
