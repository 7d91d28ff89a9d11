"""Which connection is a data server's."""

from __future__ import annotations

from typing import Any, cast

from simm.control.links import ServerLinks
from simm.net.peer import Peer


def peer() -> Peer:
    return cast(Peer, object())


def held(value: Any) -> int:
    """How many objects it holds, in all."""
    if isinstance(value, dict):
        return len(value) + sum(map(held, value.values()))
    return len(value) if isinstance(value, set) else 0


def test_the_last_join_of_a_name_counts() -> None:
    links, one, two = ServerLinks(), peer(), peer()
    links.bind(one, ("a", 1))
    links.bind(two, ("a", 2))
    assert not links.speaks_for(one, ("a", 1)) and not links.speaks_for(two, ("a", 1))
    assert links.speaks_for(two, ("a", 2)) and links.has_joined(two) and not links.has_joined(one)
    assert links.closed(one) == [] and links.closed(two) == [("a", 2)] == [("a", 2), *links.closed(two)]


def test_joining_and_leaving_leaves_nothing() -> None:
    links, one = ServerLinks(), peer()
    for number in range(100):
        links.bind(one, ("a", number))
        links.bind(one, (f"b{number}", 1))
        links.unbind(f"b{number}")
    assert sum(map(held, vars(links).values())) == 3
    links.unbind("a")
    assert sum(map(held, vars(links).values())) == 0 and not links.has_joined(one)
