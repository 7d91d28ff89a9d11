"""Which connection is a data server's."""

from __future__ import annotations

from typing import Any, cast

from simm.control.links import PRUNE_AT_LEAST, ConnectionState, ServerLinks
from simm.net.peer import Peer
from simm.wire.admin_messages import SUBSCRIBE_ORDERS
from simm.wire.auth import Gate
from simm.wire.epoch_messages import SUBSCRIBE_EPOCHS, SUBSCRIBE_LEASES, SUBSCRIBE_MAPS
from simm.wire.messages import Service
from simm.wire.trace_messages import SUBSCRIBE_TRACES


def peer() -> Peer:
    return cast(Peer, object())


def held(value: Any) -> int:
    """How many objects it holds, in all."""
    if isinstance(value, dict):
        return len(value) + sum(map(held, value.values()))
    return len(value) if isinstance(value, set) else 0


def test_the_last_join_of_a_name_counts() -> None:
    links, one, two = ServerLinks(set), peer(), peer()
    links.bind(one, ("a", 1))
    links.bind(two, ("a", 2))
    assert not links.speaks_for(one, ("a", 1)) and not links.speaks_for(two, ("a", 1))
    assert links.speaks_for(two, ("a", 2)) and links.has_joined(two) and not links.has_joined(one)
    assert links.closed(one) == [] and links.closed(two) == [("a", 2)] == [("a", 2), *links.closed(two)]


def test_joining_and_leaving_leaves_nothing() -> None:
    links, one = ServerLinks(set), peer()
    for number in range(100):
        links.bind(one, ("a", number))
        links.bind(one, (f"b{number}", 1))
        links.unbind(f"b{number}")
    assert sum(map(held, vars(links).values())) == 3
    links.unbind("a")
    assert sum(map(held, vars(links).values())) == 0 and not links.has_joined(one)


def test_names_that_the_cluster_forgets_leave_nothing() -> None:
    """One connection joins by name after name and lets each die; another's servers live."""
    living = {f"alive{number}" for number in range(2 * PRUNE_AT_LEAST)}
    dying: set[str] = set()
    links, one, two = ServerLinks(lambda: living | dying), peer(), peer()
    for name in living:
        links.bind(two, (name, 1))
    for number in range(10 * PRUNE_AT_LEAST):
        dying = {f"dead{number - 1}", f"dead{number}"}
        links.bind(one, (f"dead{number}", 1))
        assert links.speaks_for(one, (f"dead{number}", 1))
        assert len(vars(links)["_links"]) <= 2 * len(living | dying)
    assert links.names(two) == living
    assert links.names(one) >= dying and len(links.closed(one)) <= 2 * PRUNE_AT_LEAST + 2
    assert sum(map(held, vars(links).values())) == 2 * len(living) + 1


def test_what_a_connection_asks_for_holds_until_it_asks_for_something_else() -> None:
    """A mere question, 0, ended what comes beside the maps, but not the maps."""
    state = ConnectionState(Gate(Service.MANAGER, ()))

    def asked() -> tuple[bool, bool, bool, bool, bool | None]:
        return state.epochs, state.leases, state.orders, state.traces, state.follows

    state.asks(0)
    assert asked() == (False, False, False, False, None)
    state.asks(SUBSCRIBE_MAPS | SUBSCRIBE_EPOCHS | SUBSCRIBE_LEASES | SUBSCRIBE_ORDERS | SUBSCRIBE_TRACES)
    state.stale = True
    for _ in range(2):
        assert asked() == (True, True, True, True, True) and state.stale
        state.asks(0)
    state.asks(SUBSCRIBE_MAPS)
    assert asked() == (False, False, False, False, False) and state.stale
    state.asks(SUBSCRIBE_EPOCHS)
    assert asked() == (True, False, False, False, None) and not state.stale, "no map is pushed to it"
