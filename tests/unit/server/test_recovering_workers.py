"""A data server whose worker recovers its arena while the manager's connection breaks: it stays in its cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cluster.assignment import FENCE
from simm.dataserver import DataServer
from simm.server.children import DOWN_S, FRUITLESS_MAX, RESTARTS_MAX, WorkerSlot
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.fake_manager import INFO, House, Manager

GONE = -9


class Recovering(House):
    """A data server with two workers, of which the second can be killed. It says by itself what it joins with."""

    def __init__(self, managers: list[tuple[str, int]]) -> None:
        super().__init__(managers)
        self.slots = [WorkerSlot(number, 0, SimpleNamespace(heartbeat=lambda: 1)) for number in (0, 1)]  # type: ignore[arg-type]
        for slot in self.slots:
            vars(slot).update(worker=SimpleNamespace(child=SimpleNamespace(pid=7)), info=lambda *_: INFO)
            vars(slot).update(ready=True, current=True, stats={"pid": 7})
        self.second = self.slots[1]
        self.server: Any = object.__new__(DataServer)
        vars(self.server).update(
            slots=self.slots, loop=self.loop, member=self.member, membership=self.membership, options=None, instance=7
        )

    def infos(self) -> list[M.WorkerInfo] | None:
        found: list[M.WorkerInfo] | None = self.server.infos()
        return found

    def die(self, *, again: bool = True) -> None:
        """Kill the second worker; ``again``: a successor recovers its arena."""
        self.second.worker_died(GONE, self.loop.clock())
        self.second.worker.child = SimpleNamespace(pid=8) if again else None  # type: ignore[assignment]

    def turn(self) -> None:
        for _ in range(5):
            self.loop.run_once(0.02)


@pytest.fixture
def house(manager: Manager) -> Iterator[Recovering]:
    made = Recovering([manager.address])
    yield made
    made.loop.close()


def test_issue_a_link_that_breaks_while_a_worker_recovers_costs_no_shards(manager: Manager, house: Recovering) -> None:
    """Neither JOIN nor heartbeat followed until the worker served: the server was declared dead, and lost all."""
    house.until(lambda: house.orders and manager.of(M.Heartbeat), "a map and a heartbeat")
    house.die()
    manager.hang_up()
    house.until(lambda: house.membership.peer is None, "the loss")
    before = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > before + 1, "heartbeats go on")
    assert len(manager.of(M.Join)) == 2 and manager.of(M.Join)[1].workers == [INFO, INFO]
    assert not house.second.ready and FENCE not in house.orders


def test_a_manager_that_forgot_this_server_hears_of_it_while_a_worker_recovers(
    manager: Manager, house: Recovering
) -> None:
    house.until(lambda: house.orders, "a map")
    house.die()
    manager.answers[M.Heartbeat] = (M.Error("who?"), Status.UNKNOWN_NODE)
    house.until(lambda: FENCE in house.orders, "the fence")
    manager.answers[M.Heartbeat] = (M.HeartbeatAck(3), 0)
    house.until(lambda: house.orders[-1].epoch == 3, "the next map ends the fence")
    assert not house.second.ready and len(manager.of(M.Join)) >= 2


def test_a_worker_that_serves_again_does_not_join_twice(manager: Manager, house: Recovering) -> None:
    """The JOIN of the new link has no answer yet when it says so. Control: without one it joins at once."""
    house.until(lambda: house.membership.joined, "JOINED")
    house.die()
    manager.answers[M.Join], answer = None, manager.answers[M.Join]
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Join)) == 2, "JOIN by the new link")
    said = M.StatsReply(json.dumps({"pid": 8}).encode())
    vars(house.second).update(take_stats=lambda _stats: None)
    house.server._on_worker(house.second, said, 0)
    house.turn()
    assert house.second.ready and len(manager.of(M.Join)) == 2
    house.membership._pending.clear()
    house.second.ready, manager.answers[M.Join] = False, answer
    house.server._on_worker(house.second, said, 0)
    house.until(lambda: house.membership.joined and len(manager.of(M.Join)) == 3, "the next one")


@pytest.mark.parametrize("why", ["no process for minutes", "none that serves"])
def test_a_worker_that_does_not_come_up_is_waited_for_until_one_does(
    manager: Manager, house: Recovering, why: str
) -> None:
    house.until(lambda: house.membership.joined, "JOINED")
    if why == "none that serves":
        for _ in range(RESTARTS_MAX + 1):
            house.die()
    else:
        house.die(again=False)
        assert house.infos() is not None, "positive control: it is due"
        house.second.down_at -= DOWN_S + 1
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Hello)) == 2, "another connection")
    house.turn()
    assert len(manager.of(M.Join)) == 1 and house.infos() is None
    house.second.fruitless = 0
    house.second.worker.child = SimpleNamespace(pid=9)  # type: ignore[assignment]
    house.until(lambda: house.membership.joined, "JOINED, though no worker has said anything")
    house.turn()
    assert len(manager.of(M.Join)) == 2


def test_issue_a_worker_that_is_tried_again_is_one_of_the_workers(manager: Manager, house: Recovering) -> None:
    """After the fifth of 60 tries a link that broke cost the shards of all workers."""
    house.until(lambda: house.membership.joined, "JOINED")
    for _ in range(FRUITLESS_MAX + 2):
        house.die()
    assert house.infos() == [INFO, INFO]


def test_before_the_first_joined_all_workers_must_serve(manager: Manager, house: Recovering) -> None:
    house.die()
    house.until(lambda: manager.of(M.Hello), "HELLO")
    house.turn()
    assert not manager.of(M.Join) and house.infos() is None
    house.second.ready = True
    manager.answers[M.Join], answer = None, manager.answers[M.Join]
    house.membership.join()
    house.until(lambda: manager.of(M.Join) and not house.membership._join_due, "the end of its wait for workers")
    house.turn()
    assert len(manager.of(M.Join)) == 1, "the first has no answer yet"
    manager.answers[M.Join] = answer
    manager.hang_up()
    house.until(lambda: house.membership.joined, "JOINED")


def test_who_has_another_clusters_values_to_drop_waits_for_all_workers(manager: Manager, house: Recovering) -> None:
    house.until(lambda: house.membership.joined, "JOINED")
    house.die()
    assert house.infos() == [INFO, INFO], "the positive control"
    house.member.abandon()
    assert house.infos() is None
    house.second.current = True
    assert house.infos() is None, "it has not said that it serves"
    house.second.ready = True
    assert house.infos() == [INFO, INFO]
