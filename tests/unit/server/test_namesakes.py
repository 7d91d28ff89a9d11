"""Another data server has taken a server's name while that was cut off: its values are superseded, and are dropped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.fake_manager import INFO, House, Manager, make_map

TAKEN = (M.Error("'n' is running"), Status.NAME_TAKEN)


@pytest.fixture
def joined(manager: Manager) -> Iterator[House]:
    house = House([manager.address])
    house.until(lambda: house.orders, "a map")
    yield house
    house.loop.close()


def cut_off(manager: Manager, house: House, shard_map: M.MapReply) -> int:
    """Cut the server off, and let it find its name taken, and this map; return the number of its orders before."""
    manager.answers[M.Join] = TAKEN
    manager.answers[M.MapGet] = (shard_map, 0)
    before, heard = len(house.orders), len(manager.of(M.Join))
    assert house.membership.peer is not None
    house.membership.peer.close("a test")
    house.until(lambda: len(manager.of(M.Join)) > heard + 1, "it has tried twice")
    return before


def test_all_is_dropped_if_the_map_names_another_instance(manager: Manager, joined: House) -> None:
    before = cut_off(manager, joined, make_map(9)._replace(workers=[INFO._replace(instance=8)]))
    assert joined.member.displaced and joined.member.epoch == 9
    assert not np.frombuffer(joined.orders[before].roles, np.uint8).any(), "it owns nothing"
    assert not joined.membership.joined
    assert len(joined.orders) == before + 1, "once, however often its name is refused"


@pytest.mark.parametrize(
    "changes", [{}, {"workers": [INFO._replace(node="m")]}, {"workers": [INFO._replace(instance=8)], "cluster": 6}],
    ids=["its own instance", "nobody of this name", "another cluster"],
)  # fmt: skip
def test_nothing_is_dropped_else(manager: Manager, joined: House, changes: dict[str, object]) -> None:
    """Its former connection may still stand there, or the manager may have forgotten all."""
    before = cut_off(manager, joined, make_map(9)._replace(**changes))  # type: ignore[arg-type]
    assert len(joined.orders) == before and not joined.member.fenced and joined.member.epoch == 3


def test_it_joins_as_soon_as_the_name_is_free(manager: Manager, joined: House) -> None:
    cut_off(manager, joined, make_map(9)._replace(workers=[INFO._replace(instance=8)]))
    manager.answers[M.Join] = (M.Joined(10, 200, 0), 0)
    manager.answers[M.MapGet] = (make_map(10, since=10), 0)
    joined.until(lambda: joined.membership.joined and joined.member.epoch == 10, "it has joined")
    assert not joined.member.displaced
