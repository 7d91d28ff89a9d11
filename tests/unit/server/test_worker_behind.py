"""What a supervisor sends to a worker that reads nothing: one map, and the newest as soon as it reads again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cluster.assignment import DROP_ALL
from simm.dataserver import DataServer
from simm.net import loop as loops
from simm.net.loop import Loop
from simm.net.peer import STALL_S
from simm.net.process import Child
from simm.rpc import Connection, decode
from simm.server.children import Children, Supervised, WorkerSlot
from simm.server.slots.epochs import send_lease
from simm.wire import messages as M
from simm.wire.epoch_messages import EpochLease, Epochs

MAPS = 100


class World:
    """A supervisor with one worker, whose end of the socket pair is ``theirs``, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = Loop(lambda: self.now)
        children = Children(self.loop, lambda: ())
        self.slot = WorkerSlot(0, 0, None)  # type: ignore[arg-type]
        self.slot.worker = self.worker = Supervised(children, "worker 0", lambda _: None, ())
        self.kills = 0
        self.worker.kill = self._kill  # type: ignore[method-assign]
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.worker.child = child = Child(os.getpid(), ours)
        self.peer = child.peer = self.loop.adopt(ours, self.worker, "worker 0")
        self.peer.patient = True
        self.server: Any = object.__new__(DataServer)
        vars(self.server).update(
            slots=[self.slot], loop=self.loop, _retiring=False, reports=SimpleNamespace(detail=0),
            membership=SimpleNamespace(heartbeat_s=1.0, joined=True, join=lambda: None),
            member=SimpleNamespace(
                epoch=0, epochs=None, order=lambda _: DROP_ALL._replace(epoch=self.server.member.epoch),
                abandoned=False, fenced=True,
            ),
        )  # fmt: skip

    def _kill(self) -> None:
        self.kills += 1

    def map(self, epoch: int) -> None:
        self.server.member.epoch = epoch
        self.server.send_shards(self.slot)

    def read(self) -> list[tuple[Any, int]]:
        """What the worker reads until there is no more."""
        connection, found = Connection(), []
        for _ in range(200):
            self.loop.run_once(0)
            try:
                data = self.theirs.recv(1 << 20)
            except BlockingIOError:
                break
            connection.receive_data(memoryview(data))
            while (frame := connection.next_frame()) is not None:
                found.append((decode(frame), frame.request_id))
        return found


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.worker.child = None
    made.theirs.close()
    made.loop.close()


def test_maps_do_not_pile_up_and_the_newest_goes_when_it_reads_again(world: World) -> None:
    for epoch in range(1, MAPS + 1):
        world.map(epoch)
        world.server._poll_stats()
    assert world.peer.out_bytes < 300_000 and not world.peer.closed
    sent = [msg.epoch for msg, _ in world.read() if isinstance(msg, M.Shards)]
    assert sent == [1, 2] and not world.slot.current
    stats = {"data_bytes": 1, "incarnation": 1, "pid": 1, "counted": {}}
    world.slot.take_stats = lambda _: None  # type: ignore[method-assign]
    world.slot.ready = True
    world.server._on_worker(world.slot, M.StatsReply(json.dumps(stats)), 1)
    ((newest, number),) = [each for each in world.read() if isinstance(each[0], M.Shards)]
    assert newest.epoch == MAPS and number == world.slot.order_id
    world.server._on_worker(world.slot, M.Done(0), number)
    assert world.slot.current and not world.slot.order_waits


def test_a_map_with_epochs_asks_at_once_whether_they_are_stored(world: World) -> None:
    """Counters were a heartbeat old, and an advance within that time kept the next heartbeat from extending a lease."""
    world.map(1)
    assert not any(isinstance(msg, M.Stats) for msg, _ in world.read())
    world.server.member.epochs = Epochs(2, 0, 1000, [])
    world.server.membership.lease = SimpleNamespace(until=lambda _: 7)
    world.server.reports.detail = 2
    world.map(2)
    kinds = [type(msg) for msg, _ in world.read()]
    assert kinds == [Epochs, M.Shards, M.Stats, EpochLease], "in this order it is answered after they are stored"


def test_the_answer_to_an_older_map_is_not_one_to_the_newest(world: World) -> None:
    for epoch in range(1, 6):
        world.map(epoch)
    number = world.slot.order_id
    world.read()
    world.server._on_worker(world.slot, M.Done(0), number)
    assert not world.slot.current, "that was the second map"
    assert [msg.epoch for msg, _ in world.read() if isinstance(msg, M.Shards)] == [5]


def test_an_answer_while_it_is_still_behind_is_not_one_to_the_newest(world: World) -> None:
    """Only a part of what was queued has gone: the second map's answer comes, and the third has not been sent."""
    for epoch in range(1, 4):
        world.map(epoch)
    world.peer.out.append(b"x" * 100)  # what else was queued, and has not gone
    world.peer.out_bytes += 100
    world.server._on_worker(world.slot, M.Done(0), world.slot.order_id)
    assert world.slot.order_waits and not world.slot.current


def test_no_leases_pile_up(world: World) -> None:
    for epoch in range(1, 4):
        world.map(epoch)
    before = world.peer.out_bytes
    for number in range(1000):
        send_lease([world.slot], number)
    assert world.peer.out_bytes == before


@pytest.mark.parametrize("patient", [True, False], ids=["a process of the server", "control"])
def test_a_process_of_the_server_may_stand_still(world: World, patient: bool) -> None:
    world.peer.patient = patient
    for epoch in range(1, 4):
        world.map(epoch)
    for _ in range(4):
        world.now += STALL_S / 2 + loops.MAINTENANCE_S
        world.loop.run_once(0)
    assert world.peer.closed is not patient
    assert world.kills == (0 if patient else 1), "one that is cut off all the same is ended"
