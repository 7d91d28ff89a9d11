"""Marks of entries: what a caller has said about a key that changes when its entry may be evicted.

A slot's last word has them (``arena/layout.py``). They are in shared memory so that a worker's successor finds them;
while the worker lives, its private state decides. Nothing here reads a clock: time is an argument, in whole seconds of
CLOCK_BOOTTIME, which no change of the wall clock moves.
"""
