"""What the backend for SGLang's HiCache is made of, besides the backend (``connectors/sglang.py``).

    host_pools       an engine's host pools, and what they say of the form of their pages
    facts            which of the engine's settings decide what its pages hold
    weight_versions  which weights each of the engine's threads works for
    hit_policies     how much of a prefix can be restored

Nothing here imports an engine.
"""
