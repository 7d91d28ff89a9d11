"""Whole clusters of real processes, and what is done to them: see docs/operations.md's table of failures.

In ``support/``: ``fleet`` starts managers and data servers, ``load`` is a client that verifies every byte, ``watch``
looks at maps and shard words from outside, ``measures`` collects the figures that the tests see.
"""
