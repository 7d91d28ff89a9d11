"""Publish what this host's workers tell (``arena/events``) as KV cache events over ZMQ: ``simm events``.

``claims`` adds the workers' records up, ``host`` finds the workers, ``messages`` has the forms on the wire, ``outlet``
the sockets.
"""
