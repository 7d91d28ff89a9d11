"""STOREs of a client that speaks the protocol itself, to a stream in a thread."""

from __future__ import annotations

from itertools import islice

from simm.arena.hashing import Hasher
from simm.net.channel import Channel
from simm.wire import messages as M

digest_of = Hasher("default")


def begin(channel: Channel, values: dict[str, bytes], sent: int | None = None) -> int:
    """Begin a STORE; return its request id. ``sent``: how many of the values are sent; None: all."""
    number = channel.submit(M.Store([(digest_of(key), len(value), 0, 0, 0) for key, value in values.items()]))
    channel.sock.sendall(b"".join(islice(values.values(), sent)))
    return number


def end(channel: Channel, number: int) -> list[int]:
    """Wait for the statuses that answer a request."""
    statuses: list[int] = channel.result(channel.wait(number)).statuses
    return statuses


def store(channel: Channel, values: dict[str, bytes]) -> list[int]:
    """Do a STORE; return the statuses."""
    return end(channel, begin(channel, values))
