"""What the tests of the protocol stand on: a world with a naive twin, tapes of shared memory, a storm of processes.

``world``  one store, its clients and what must be true of them, in this process
``tape``   every state of shared memory that an operation passes through, and readers that live in them
``storm``  real servers and clients, killed at random; ``python -m tests.storm`` runs it
"""
