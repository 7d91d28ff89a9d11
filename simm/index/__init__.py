"""The event index: which engine holds which blocks of a prompt, as far as the engines' own events tell.

An optional part, the extra ``index``. ``libraries`` loads what it needs beyond the base install. ``events`` reads
what publishers send, ``keys`` names blocks by their tokens, ``table`` holds them, ``blocks`` applies events to it,
``streams`` notices what was lost of them, ``publishers`` receives them, ``scores`` compares endpoints, and ``service``
answers by HTTP. ``rpcs`` answers by gRPC, with the messages of ``protobuf``: another extra, ``simm-store[grpc]``.
``lmcache`` takes what LMCache's servers tell their coordinator.
"""
