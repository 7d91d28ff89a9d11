"""Positive controls: what the tests of some faults rely on is taken away, and then they must see the harm.

Each runs a fault's scene in this process, small: as it is, and without the check. Other faults have theirs beside them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import dataserver
from simm.cluster import placement
from simm.constants import SHARD_COUNT
from simm.control.state_file import StateFile
from simm.control.state_keeper import StateKeeper
from simm.dataserver import DataServer
from simm.errors import TransportError
from simm.net.channel import Channel
from simm.net.listeners import listen_tcp
from simm.net.loop import MAINTENANCE_S, Loop
from simm.net.peer import OUT_PAUSE_BYTES, STALL_S, Peer, Service
from simm.rpc import Frame, encode
from simm.sdk.routing import RetryPolicy
from simm.wire import messages as M
from tests.support.cluster_clients import full, value_of
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.machine import DEFAULT, arrive, attentive, join, run, states
from tests.support.shards import shards_held
from tests.support.standing import opened
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import WorkerThread

with_and_without = pytest.mark.parametrize("checked", [True, False], ids=["", "control"])
#: How long what must not happen is waited for, seconds.
NEVER_S = 0.5


def ends(work: Callable[[], object], checked: bool, release: Callable[[], object]) -> None:
    """Do something in a thread. It ends by itself if it is ``checked``; otherwise only once it is released."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        thread.join(WAIT_S if checked else NEVER_S)
        assert thread.is_alive() != checked
    finally:
        release()
        thread.join(WAIT_S)
    assert not thread.is_alive()


@with_and_without
def test_f06_calls_to_a_stopped_worker_end_by_their_deadline(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, thaw = threading.Event(), threading.Event()
    failed: list[str] = []

    def call() -> None:
        try:
            session.ask([(64, 1)])
        except TransportError as exc:
            failed.append(str(exc))

    with WorkerThread() as worker:
        session = worker.session(ring=False)
        session.channel.deadline_s = 0.2  # not that of the connection, which a busy machine may keep waiting
        if not checked:
            monkeypatch.setattr(Channel, "begin", lambda self: setattr(self, "until", time.monotonic() + WAIT_S))

        def stopped() -> None:
            with worker.frozen():
                frozen.set()
                assert thaw.wait(WAIT_S)

        holder = threading.Thread(target=stopped)
        holder.start()
        assert frozen.wait(WAIT_S)
        ends(call, checked, thaw.set)
        holder.join(WAIT_S)
        session.close(clean=False)
    assert bool(failed) == checked


class Generous(Service):
    """Answers each message with a MiB."""

    answer = bytes(1 << 20)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        peer.send(self.answer)


@pytest.fixture
def slow() -> Iterator[tuple[Loop, SimpleNamespace, Peer]]:
    """A loop, its clock, and a peer that has asked a hundred times and takes nothing."""
    clock = SimpleNamespace(now=100.0)
    loop = Loop(lambda: clock.now)
    near, far = socket.socketpair()
    near.setblocking(False)
    with near:
        peer = loop.adopt(far, Generous(), "slow")
        near.send(encode(M.Ping(0), 1) * 100)
        for _ in range(20):
            loop.run_once(0)
        yield loop, clock, peer
        loop.close()


@with_and_without
def test_f10_who_reads_nothing_is_closed(
    slow: tuple[Loop, SimpleNamespace, Peer], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, clock, peer = slow
    if not checked:
        monkeypatch.setattr(Peer, "stalled", lambda *_: False)
    for _ in range(int((STALL_S + 2 * MAINTENANCE_S) / MAINTENANCE_S) + 1):
        assert not peer.closed or clock.now - 100.0 > STALL_S * 0.9, "who is slow for a moment is not closed"
        clock.now += MAINTENANCE_S
        loop.run_once(0)
    assert peer.closed == checked


@with_and_without
def test_f10_who_reads_nothing_costs_bounded_memory(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not checked:
        monkeypatch.setattr(Peer, "held_back", lambda _: False)
    loop = Loop()
    near, far = socket.socketpair()
    with near:
        peer = loop.adopt(far, Generous(), "slow")
        near.send(encode(M.Ping(0), 1) * 100)
        for _ in range(20):
            loop.run_once(0)
        # Without it the queue grows until the last bound closes the connection, which is no way to treat who is slow.
        assert (not peer.closed and peer.out_bytes <= OUT_PAUSE_BYTES + len(Generous.answer)) == checked
        loop.close()


@with_and_without
def test_f14_who_has_gone_leaves_no_descriptor(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[int] = []
    forget = Loop.unregister

    def leak(loop: Loop, peer: Peer) -> None:
        leaked.append(os.dup(peer.sock.fileno()))
        forget(loop, peer)

    if not checked:
        monkeypatch.setattr(Loop, "unregister", leak)
    loop = Loop()
    with listen_tcp("127.0.0.1", 0) as listener:
        loop.listen(listener, Generous())
        before = set(opened(os.getpid()))
        connections = [socket.create_connection(listener.getsockname()[:2]) for _ in range(20)]
        wait_until(lambda: loop.run_once(0.01) or len(loop.peers) == 20, "all are accepted")  # type: ignore[func-returns-value]
        # By what they lead to: other tests' leftovers may be closed meanwhile.
        assert len(set(opened(os.getpid())) - before) >= 40
        for each in connections:
            each.close()
        wait_until(lambda: loop.run_once(0.01) or not loop.peers, "all are closed")  # type: ignore[func-returns-value]
        assert (set(opened(os.getpid())) <= before) == checked
        loop.close()
    for fd in leaked:
        os.close(fd)


@with_and_without
def test_f16_a_state_that_cannot_be_stored_is_counted(
    checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    keeper = StateKeeper(loop, StateFile(tmp_path, "manager"), 8, lambda: (1, {}), lambda: None, lambda _: None)
    if not checked:
        monkeypatch.setattr(StateKeeper, "failures", property(lambda _: 0, lambda *_: None), raising=False)
    keeper.begin(0)
    assert keeper.save_now()
    before = keeper.failures

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        keeper.changed()
        assert not keeper.save_now() and keeper.trouble
    assert (keeper.failures > before) == checked
    loop.close()


@with_and_without
def test_f17_a_jump_of_the_wall_clock_kills_nobody(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data server whose timers went by it would send no heartbeat for an hour."""
    offset, wall = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: wall() + offset[0])
    loop = Loop() if checked else Loop(time.time)
    beats: list[float] = []
    loop.call_every(0.01, lambda: beats.append(time.monotonic()))
    wait_until(lambda: loop.run_once(0.01) or beats, "heartbeats")  # type: ignore[func-returns-value]
    offset[0] = -3600.0
    beats.clear()
    until = time.monotonic() + (WAIT_S if checked else NEVER_S)
    while not beats and time.monotonic() < until:
        loop.run_once(0.01)
    cluster = attentive(1, 0.0, DEFAULT)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
    arrive(cluster)
    alive = ("a", "b") if beats else ("b",)
    run(cluster, 0.0, 7.0, lambda now: [cluster.heartbeat(now, name, 1) for name in alive])
    assert (states(cluster)["a"] == "running") == checked and states(cluster)["b"] == "running"
    loop.close()


@with_and_without
def test_f19_puts_go_on_to_the_next_owner(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As during a rolling restart: the owner has given its shards up, and the next one takes them over."""
    if not checked:
        monkeypatch.setattr(RetryPolicy, "wait", lambda *_: False)
    with FakeCluster(2) as cluster:
        client = full(cluster, "tcp")
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        done: list[bool] = []

        def put() -> None:
            done.append(client.put("k0", value_of("k0", 9)))

        thread = threading.Thread(target=put)
        thread.start()
        wait_until(lambda: client.counters["redirects"] > 0 or done, "the put is refused once")
        cluster.publish()
        cluster.nodes[1].adopt(cluster.epoch, ALL)
        thread.join(WAIT_S)
        failed = done.count(False)
        assert (failed < 0.001 * len(done)) == checked


@with_and_without
def test_f25_the_end_waits_for_no_silent_manager(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped manager is connected, and never answers LEAVE."""
    monkeypatch.setattr(dataserver, "HAND_OVER_S", 0.2 if checked else float("inf"))
    loop = Loop()
    membership = SimpleNamespace(leave=lambda *, warm: True, peer=True, all_answered=False)
    server: Any = SimpleNamespace(
        options=SimpleNamespace(warm=True), member=SimpleNamespace(), membership=membership, slots=[], loop=loop
    )
    server._serve_until = lambda condition, seconds: DataServer._serve_until(server, condition, seconds)
    ends(lambda: DataServer._hand_over(server), checked, lambda: setattr(membership, "all_answered", True))
    loop.close()


@with_and_without
def test_f25_the_end_waits_for_no_manager_that_has_gone(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed manager closes the connection, and no map can come that gives the shards to others."""
    monkeypatch.setattr(dataserver, "HAND_OVER_S", float("inf"))
    loop = Loop()
    owned = [True]
    membership = SimpleNamespace(leave=lambda *, warm: True, peer=None if checked else True, all_answered=True)
    server: Any = SimpleNamespace(
        options=SimpleNamespace(warm=False), membership=membership, slots=[], loop=loop,
        member=SimpleNamespace(map=None, workers=[0], owned=lambda _: owned[0]),
    )  # fmt: skip
    server._serve_until = lambda condition, seconds: DataServer._serve_until(server, condition, seconds)
    ends(lambda: DataServer._hand_over(server), checked, lambda: owned.__setitem__(0, False))
    loop.close()


#: Who does not answer -> what an end may wait for in all, seconds.
WAITS_S = {"a dead manager": 4.0, "a silent manager": 6.0, "a silent manager, and workers": 8.0}


@pytest.mark.parametrize("who", WAITS_S)
@with_and_without
def test_f25_all_waits_of_an_end_are_seconds(checked: bool, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 9.3 s beside a dead manager. Each wait is added up, unless what it waits for is there, or cannot come."""
    waits: list[float] = []
    monkeypatch.setattr(dataserver, "end_children", lambda _children, seconds, _killed_s: waits.append(seconds))
    if not checked:
        for name in ("HAND_OVER_S", "STOP_S"):
            monkeypatch.setattr(dataserver, name, 2 * getattr(dataserver, name))
    there = who != "a dead manager"
    does_nothing = lambda *_, **__: None  # noqa: E731
    server: Any = SimpleNamespace(
        _stopping=False, _retiring=False, _shared=[], _web=None, _lock=None, failed="", slots=[],
        children=SimpleNamespace(), growth=SimpleNamespace(stop=does_nothing),
        notify=SimpleNamespace(stopping=does_nothing, extend=does_nothing),
        options=SimpleNamespace(warm=False), on_map=does_nothing, _processes=list,
        membership=SimpleNamespace(
            joined=there, leave=lambda *, warm: there, all_answered=False, peer="the manager" if there else None
        ),
        member=SimpleNamespace(workers=["a"], owned=bool, map=SimpleNamespace(owners=[0])),
        endpoints=SimpleNamespace(close=does_nothing), loop=SimpleNamespace(close=does_nothing),
        _serve_until=lambda condition, seconds: condition() or waits.append(seconds),
    )  # fmt: skip

    def retire() -> bool:
        if "workers" not in who:
            return DataServer._retire(server)
        waits.append(dataserver.HAND_OVER_S)
        return False

    server._retire = retire
    server._hand_over = lambda: DataServer._hand_over(server)
    DataServer.stop(server)
    assert waits and (sum(waits) <= WAITS_S[who]) == checked, waits


@with_and_without
def test_f31_an_empty_server_gets_its_share(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = attentive(1, 0.0)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    if not checked:  # shards with an owner stay where they are
        monkeypatch.setattr(placement, "_move", lambda *_: 0)
    cluster.join(1.0, join("new", 1))
    arrive(cluster, 1.0)
    held = shards_held(cluster)
    assert sum(held.values()) == SHARD_COUNT
    assert (held["new", 0] > 0.5 * max(held["a", 0], held["b", 0])) == checked
