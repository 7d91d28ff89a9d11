"""LMCache's multi-process servers tell the index themselves what they hold, as they tell LMCache's own coordinator.

``messages`` reads what a server sends, ``placements`` holds which parts of a chunk are where, ``servers`` keeps the
order of each server's events and puts what is whole into :mod:`simm.index.blocks`, and ``hashes`` names the chunks of a
prompt as LMCache does.
"""
