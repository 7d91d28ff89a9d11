"""Publish what this host's workers tell (``arena/events``) as KV cache events over ZMQ: ``simm events``.

``claims`` adds the workers' records up, ``tabled`` has what is claimed of slots, ``host`` finds the workers,
``messages`` has the forms of events, ``outlet`` the stream and the replays of one form, ``peers`` their connections,
and ``zmtp`` what is said on those.
"""
