"""The client library under :mod:`simm.client`: routing, the paths to a worker, batches, replicas.

Nothing here raises into the engine for a cache problem, and every call has a deadline.
"""
