"""RDMA without a library: what a path may rely on, ports and rails, registered memory, and reading a remote arena.

Only ``simm.verbs`` knows pyverbs. The tests run everything here on a network in software.
"""
