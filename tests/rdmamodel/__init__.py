"""Exhaustive models of what RDMA adds: reads of a slot whose words come in any order, and grants across a network.

``get.py``: a value read over a network, against everything that a worker and its writers do meanwhile. ``grants.py``:
WRITEs under way, lanes that close, processes that die. ``python -m rdmamodel`` in tests/ runs all of it.
"""
