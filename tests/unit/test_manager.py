"""The manager in this process: what it sends."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm import manager as manager_module
from simm.cluster.machine import Cluster
from simm.control import activity
from simm.control.links import ConnectionState
from simm.control.state_file import StateFile
from simm.control.state_keeper import PATIENCE_S
from simm.control.waiting import MAPS_PER_TURN
from simm.manager import Manager
from simm.net.loop import Loop
from simm.rpc import Connection, Encoded, Frame, decode, encode, reply
from simm.tools import nodes
from simm.wire import messages as M
from simm.wire.auth import Gate
from simm.wire.epoch_messages import SUBSCRIBE_EPOCHS, SUBSCRIBE_MAPS, Advance, Epochs
from simm.wire.hello import client_hello
from simm.wire.messages import WorkerInfo
from simm.wire.report_messages import SUBSCRIBE_REPORTS, ReportEvery
from tests.support.manager_client import instance, joining
from tests.support.reports import report
from tests.support.waiting import WAIT_S, wait_until

INFO = WorkerInfo(0, 0, 1, 0, 1 << 30, "", "", "127.0.0.1", 1)


class Talk:
    """One connection to a manager on a loop."""

    def __init__(self, loop: Loop, manager: Manager) -> None:
        self.loop = loop
        self.sock, other = socket.socketpair()
        self.sock.setblocking(False)
        self.conn = Connection()
        loop.adopt(other, manager, "here")

    def ask(self, msg: Any, number: int) -> None:
        """Send a request."""
        self.sock.sendall(encode(msg, number))

    def hear(self) -> Frame:
        """Run the loop until a frame has come."""
        while (frame := self.conn.next_frame()) is None:
            self.loop.run_once(0.01)
            with contextlib.suppress(BlockingIOError):
                self.conn.receive_data(self.sock.recv(1 << 16))
        return frame


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(lambda: 1000.0)  # no server falls silent while this machine is busy
    with contextlib.closing(made):
        yield made


def test_a_map_is_encoded_once_for_all_who_ask(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand servers that join ask at the same time, and a map of theirs takes milliseconds to encode."""
    encoded: list[Any] = []

    class Counted(Encoded):
        def __init__(self, msg: Any) -> None:
            encoded.append(msg)
            super().__init__(msg)

    monkeypatch.setattr(manager_module, "Encoded", Counted)
    manager = Manager(loop)
    talks = [Talk(loop, manager) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for talk in talks:
            stack.enter_context(talk.sock)
        for number in range(1, 5):
            for talk in talks:
                talk.ask(M.MapGet(0, 0), number)
            for talk in talks:
                assert talk.hear() == frame_of(reply(manager.cluster.map_reply(), number))
        assert len(encoded) == 1

        talks[0].ask(joining(7, "a", [INFO]), 9)
        assert isinstance(decode(talks[0].hear()), M.Joined)
        for talk in talks:
            talk.ask(M.MapGet(0, 1), 10)
        for talk in talks:
            found = decode(talk.hear())
            assert found.epoch == manager.cluster.epoch and [info.node for info in found.workers] == ["a"]
        assert len(encoded) == 2


def frame_of(data: bytes) -> Frame:
    """The frame in some bytes."""
    conn = Connection()
    conn.receive_data(data)
    frame = conn.next_frame()
    assert frame is not None
    return frame


def test_silence_is_not_counted_faster_than_time_passes() -> None:
    """In a long turn of a busy manager servers join in between others' messages: 20 of them take a second here."""
    now = 1000.0

    def slow() -> float:
        nonlocal now
        now += 0.05
        return now

    loop = Loop(slow)
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        manager = Manager(loop)
        talks = [Talk(loop, manager) for _ in range(20)]
        for talk in talks:
            stack.enter_context(talk.sock)
        began = slow()
        for number, talk in enumerate(talks):
            talk.ask(joining(number + 1, f"s{number}", [INFO]), 1)
        for talk in talks:
            assert isinstance(decode(talk.hear()), M.Joined)
        for turn in range(2, 7):
            for number, talk in enumerate(talks):
                talk.ask(joining(number + 1, f"s{number}", [INFO]) if number % 2 else M.MapGet(0, 0), turn)
            for talk in talks:
                talk.hear()
        manager.cluster.maintain(loop.now)
        silent = {node["name"]: node["silent_s"] for node in manager.cluster.status(loop.now)["nodes"]}
        assert manager.cluster._observed <= slow() - began, "observed time runs ahead of the clock"
        assert len(silent) == 20 and max(silent.values()) <= slow() - began


@pytest.mark.parametrize("role", [M.Role.SUPERVISOR, M.Role.CLIENT, M.Role.ADMIN])
def test_issue_a_client_s_word_does_not_answer_a_warm_server(role: int) -> None:
    """The manager has lost its state. A server that asks which cluster this is, before it joins, hears the right one.

    It was answered at once by the new manager's own if a client had named an epoch. Others still are.
    """
    known = Cluster(77, 0.0)
    known.join(0.0, joining(1, "a", [INFO]))
    for _ in range(5):
        known.advance(0.0, "name")
    newest, now = known.map_reply(), [1000.0]
    loop = Loop(lambda: now[0])
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        manager = Manager(loop)
        own = manager.cluster.cluster

        def talk(role: int) -> Talk:
            made = Talk(loop, manager)
            stack.enter_context(made.sock)
            made.ask(client_hello(role), 1)
            assert isinstance(decode(made.hear()), M.Welcome)
            return made

        def turns(seconds: float) -> None:
            for _ in range(round(seconds * 10)):
                now[0] += 0.1
                loop.run_once(0.0)

        client, first, asker = talk(M.Role.CLIENT), talk(M.Role.SUPERVISOR), talk(role)
        client.ask(M.MapGet(newest.epoch, 0), 2)
        turns(1.0)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        turns(1.6)
        assert decode(client.hear()).cluster == own != 77
        asker.ask(M.MapGet(newest.epoch, 0), 2)
        turns(0.3)
        waits = not select.select([asker.sock], [], [], 0)[0]
        assert waits == (role == M.Role.SUPERVISOR)
        if not waits:
            assert decode(asker.hear()).cluster == own
            return
        first.ask(joining(1, "a", [INFO], epoch=newest.epoch), 2)
        assert decode(first.hear()).wants_map == 1
        first.ask(M.MapOffer(*newest), 3)
        assert decode(first.hear()) == M.Done(1)
        turns(2.3)
        assert decode(asker.hear()).cluster == 77


class Stored:
    """A manager with a state file on a disk that the test stops, and on a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.loop = Loop(lambda: self.now)
        self.file = StateFile(folder, "manager")
        self.manager = Manager(self.loop, store=self.file)
        self.manager.state.save_now()
        self.manager.state.save_in_background()
        self.open = threading.Event()
        self.open.set()
        fsync = os.fsync

        def when_open(fd: int) -> None:
            assert self.open.wait(WAIT_S)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", when_open)

    def draining(self) -> list[str]:
        """Return the servers that are to be drained by what is on the disk."""
        nodes = self.file.load()["cluster"]["nodes"]
        return [node["name"] for node in nodes if node["draining"]]

    def turns(self, seconds: float) -> None:
        """Let so much time pass."""
        for _ in range(10):
            self.now += seconds / 10
            self.loop.run_once(0.0)

    def close(self) -> None:
        self.open.set()
        self.manager.state.close()
        self.loop.close()
        self.file.close()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    with contextlib.closing(Stored(tmp_path / "state", monkeypatch)) as made:
        yield made


@pytest.mark.parametrize("answer", ["when it is stored", "when the disk takes too long"])
def test_issue_an_order_is_confirmed_when_it_is_stored(stored: Stored, answer: str) -> None:
    """A manager that was killed within moments forgot that a drain had ended, which it had confirmed."""
    talk = Talk(stored.loop, stored.manager)
    with contextlib.closing(talk.sock):
        for number, name in enumerate(("a", "b"), 1):
            talk.ask(joining(number, name, [INFO]), number)
            assert isinstance(decode(talk.hear()), M.Joined)
        stored.turns(1.0)
        wait_until(lambda: stored.loop.run_once(0.0) or stored.manager.state.up_to_date, "it is stored")
        for on in (1, 0):
            stored.open.clear()
            talk.ask(M.Drain(on, "b"), 9)
            for _ in range(3):
                stored.turns(0.1)
                with pytest.raises(BlockingIOError):
                    talk.sock.recv(1)
            assert stored.draining() == ["b"] * (1 - on)
            if answer == "when it is stored":
                stored.open.set()
                assert isinstance(decode(talk.hear()), M.Done)
                assert stored.draining() == ["b"] * on
            else:
                stored.turns(1.0)
                assert isinstance(decode(talk.hear()), M.Done)
                assert stored.manager.status()["manager"]["trouble"] == "the state is not stored yet"
                stored.open.set()
                wait_until(lambda: stored.loop.run_once(0.0) or stored.manager.state.up_to_date, "it is stored")
        talk.ask(M.Drain(0, "b"), 10)  # nothing to store
        assert isinstance(decode(talk.hear()), M.Done)
        talk.ask(M.Drain(0, "unknown"), 11)
        assert talk.hear().status == M.Status.UNKNOWN_NODE


def test_issue_an_order_after_the_patience_is_over_waits_for_its_save(stored: Stored) -> None:
    """It was confirmed at once, and no trouble was shown when the save had ended that did not contain it."""
    talk = Talk(stored.loop, stored.manager)
    with contextlib.closing(talk.sock):
        for number, name in enumerate(("a", "b"), 1):
            talk.ask(joining(number, name, [INFO]), number)
            assert isinstance(decode(talk.hear()), M.Joined)
        stored.turns(1.0)
        wait_until(lambda: stored.loop.run_once(0.0) or stored.manager.state.up_to_date, "it is stored")
        stored.open.clear()
        talk.ask(joining(3, "c", [INFO]), 3)
        assert isinstance(decode(talk.hear()), M.Joined)
        stored.turns(0.1)
        stored.turns(PATIENCE_S)
        assert stored.manager.state.trouble, "the new server is in a map that is not stored"
        talk.ask(M.Drain(1, "b"), 9)
        stored.turns(0.2)
        with pytest.raises(BlockingIOError):
            talk.sock.recv(1)
        stored.open.set()
        assert stored.manager.state.wait(WAIT_S)
        stored.open.clear()
        stored.turns(0.1)  # the save that contains it is under way
        with pytest.raises(BlockingIOError):
            talk.sock.recv(1)
        assert stored.draining() == []
        stored.open.set()
        assert isinstance(decode(talk.hear()), M.Done) and stored.draining() == ["b"]


def test_issue_maps_are_sent_as_they_are_stored_though_changes_never_stop(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asked for one waited for a second, and the log called a disk slow that took milliseconds."""
    monkeypatch.setattr(os, "fsync", lambda _fd: stored.open.wait(WAIT_S))
    manager, asker, server = stored.manager, Talk(stored.loop, stored.manager), Talk(stored.loop, stored.manager)
    with contextlib.closing(asker.sock), contextlib.closing(server.sock):

        def joins(number: int) -> None:
            server.ask(joining(number, f"s{number}", [INFO]), number)
            assert isinstance(decode(server.hear()), M.Joined)

        stored.open.clear()
        joins(1)
        stored.turns(0.1)
        asked: list[int] = []
        for number in range(2, 14):
            joins(number)
            if number % 2 == 0:
                asked.append(manager.cluster.epoch)
                asker.ask(M.MapGet(0, 0), number)
            stored.turns(0.1)
            assert not select.select([asker.sock], [], [], 0)[0], "the save under way may not contain what it must have"
            stored.open.set()
            assert manager.state.wait(WAIT_S)
            stored.open.clear()
            stored.loop.run_once(0.0)
            assert not manager.state.up_to_date, "the next save is under way"
            if number % 2:
                assert select.select([asker.sock], [], [], 0)[0], "the next save contains it"
                found = decode(asker.hear())
                assert found.epoch == manager.state.stored >= asked.pop()
        assert "service goes on" not in caplog.text


class Follower:
    """A connection that follows the map and its EPOCHS, and keeps what is pushed to it."""

    closed, out = False, b""

    def __init__(self) -> None:
        self.context = ConnectionState(Gate(M.Service.MANAGER, ()))
        self.context.asks(SUBSCRIBE_MAPS | SUBSCRIBE_EPOCHS)
        self.conn = Connection()

    def send(self, data: bytes) -> None:
        self.conn.receive_data(data)


@pytest.mark.parametrize("by", ["turns", "on_drain"])
def test_issue_no_epochs_are_pushed_that_are_not_stored(by: str) -> None:
    """EPOCHS were those of the present map, before the map that was stored: 172 of 300 subscribers had them."""
    coordinator = Stuck()
    with contextlib.closing(Loop(lambda: 1000.0)) as loop:
        manager = Manager(loop, coordinator=coordinator)  # type: ignore[arg-type]
        manager.poll()
        peers: list[Any] = [Follower() for _ in range(2 * MAPS_PER_TURN)]
        manager._subscribers.update(peers)
        manager.cluster.advance(1000.0, "n")
        first = manager.cluster.epoch
        manager.state.changed()
        manager._settled()
        assert sum(peer.context.stale for peer in peers) == MAPS_PER_TURN, "half of them have it in this turn"
        coordinator.full = True
        manager._apply(manager.cluster.advance(1000.0, "n"))
        manager.state.save()
        assert manager.cluster.epoch > first and manager.state.holds_back
        if by == "on_drain":
            for peer in peers:
                manager.on_drain(peer)
        for _ in range(3):
            loop.run_once(0.0)
        for peer in peers:
            epochs, found = [decode(frame) for _ in range(2) if (frame := peer.conn.next_frame())]
            assert epochs.epoch == found.epoch == epochs.namespaces[0].epoch == first


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_issue_what_is_confirmed_while_the_disk_fails_is_called_so(
    stored: Stored, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Service goes on: servers join and are emptied. Who ordered it is told that a restart forgets it."""
    talk = Talk(stored.loop, stored.manager)
    failing = [True]
    fsync = os.fsync

    def fails(fd: int) -> None:
        if failing[0]:
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)

    class Link:
        """What `simm node drain` asks, at this manager."""

        def drain(self, name: str, on: bool) -> int:
            talk.ask(M.Drain(on, name), 9)
            wait_until(lambda: stored.turns(0.1) or stored.manager.state._thread is None, "a save has ended")
            stored.turns(1.0)
            answer = decode(talk.hear())
            assert isinstance(answer, M.Done)
            return answer.items

        def status(self) -> dict[str, Any]:
            return stored.manager.status()

    link: Any = Link()
    with contextlib.closing(talk.sock):
        for at, name in enumerate(("a", "b"), 1):
            talk.ask(joining(at, name, [INFO]), at)
            assert isinstance(decode(talk.hear()), M.Joined)
        wait_until(lambda: stored.turns(0.1) or stored.manager.state.failures, "a save fails")
        nodes.request(link, "b", True)
        assert "the state cannot be stored: a manager that restarts now forgets this order" in capsys.readouterr().err
        status = stored.manager.status()["manager"]
        assert (status["trouble"], status["state_stored"]) == ("the state cannot be stored", False)
        assert stored.file.load()["cluster"]["nodes"] == [], "nothing of it is on the disk"
        failing[0] = False
        wait_until(lambda: stored.turns(1.0) or stored.manager.state.up_to_date, "it is stored")
        assert stored.draining() == ["b"] and stored.manager.status()["manager"]["trouble"] == ""
        nodes.request(link, "b", False)
        assert capsys.readouterr().err == "" and stored.draining() == []


def test_issue_the_report_of_a_server_that_leaves_is_not_kept(loop: Loop) -> None:
    """Who joins by name after name, reports and leaves, filled the memory: a report has thousands of numbers."""
    manager = Manager(loop)
    talk = Talk(loop, manager)
    with contextlib.closing(talk.sock):
        for number, warm in enumerate((0, 1), 1):
            name = f"s{number}"
            talk.ask(joining(number, name, [INFO]), 1)
            assert isinstance(decode(talk.hear()), M.Joined)
            talk.ask(report(name, instance=instance(number, name)), 2)
            assert decode(talk.hear()) == M.Done(1) and set(manager.activity._servers) == {name}
            talk.ask(M.Leave(7, name, warm), 3)
            assert talk.hear().status == M.Status.UNKNOWN_NODE and manager.activity._servers
            talk.ask(M.Leave(instance(number, name), name, warm), 4)
            assert decode(talk.hear()) == M.Done(1) and not manager.activity._servers


def test_issue_servers_that_have_not_reported_yet_count_for_how_often_all_do(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a manager's restart each of 1,500 was told to report like one of a few."""
    monkeypatch.setattr(activity, "REPORT_S_A_SERVER", 1.0)
    manager = Manager(loop)
    talk = Talk(loop, manager)
    with contextlib.closing(talk.sock):
        for number in range(1, 5):
            talk.ask(joining(number, f"s{number}", [INFO]), number)
            assert isinstance(decode(talk.hear()), M.Joined)
        talk.ask(M.Leave(instance(1, "s1"), "s1", 0), 5)
        assert decode(talk.hear()) == M.Done(1)
        talk.ask(M.MapGet(0, SUBSCRIBE_REPORTS), 6)
        assert decode(talk.hear()) == ReportEvery(3000)


class Stuck:
    """A coordinator that leads and takes no state any more, as etcd that has no room."""

    ttl_s = 5
    term, leader, trouble, where = 1, None, "", "etcd"
    full = False

    def load(self) -> None:
        return None

    def save(self, _state: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no room")

    def resign(self, _state: Any) -> None:
        pass


def test_requests_for_a_map_that_cannot_be_stored_do_not_pile_up() -> None:
    """Servers ask again with each heartbeat, and clients give up, close and connect again: for hours."""
    now, coordinator = [1000.0], Stuck()
    loop = Loop(lambda: now[0])
    manager = Manager(loop, coordinator=coordinator)  # type: ignore[arg-type]
    with contextlib.closing(loop), contextlib.ExitStack() as stack:

        def talk() -> Talk:
            made = Talk(loop, manager)
            stack.enter_context(made.sock)
            return made

        def turns(count: int = 3) -> None:
            for _ in range(count):
                now[0] += 0.1
                loop.run_once(0)

        manager.poll()
        assert manager.leading
        coordinator.full = True
        asker, joiner = talk(), talk()
        joiner.ask(joining(1, "a", [INFO]), 1)
        turns()
        assert manager.state.holds_back
        for number in range(1, 31):
            asker.ask(M.MapGet(0, 0), number)
            turns()
        for number in range(30):
            client = talk()
            client.ask(M.MapGet(0, 0), 1)
            turns()
            if number:  # the first one stays
                client.sock.close()
        turns()
        assert len(manager._waiting) == 8 + 1 and not any(peer.closed for peer in manager._waiting._of)
        refused = [asker.hear() for _ in range(22)]
        assert {frame.status for frame in refused} == {M.Status.BUSY} and refused[0].request_id == 9
        coordinator.full = False
        wait_until(lambda: turns() or not manager._waiting, "the map is stored")
        answered = [asker.hear().request_id for _ in range(8)]
        assert answered == list(range(1, 9))


def test_a_manager_stores_its_lease_and_knows_that_of_the_one_before(tmp_path: Path) -> None:
    """An advance must wait for the longest lease that was given."""
    stored = []
    for lease_s in (30.0, 2.0, 0.0, 5.0):
        with contextlib.closing(Loop(lambda: 1000.0)) as loop, contextlib.closing(StateFile(tmp_path, "m")) as file:
            manager = Manager(loop, store=file, lease_s=lease_s)
            assert manager.state.save_now(last=True)
            stored.append(file.load()["lease_ms"])
            manager.state.close()
    assert stored == [30_000, 30_000, 0, 0], "what may still run; 0: for ever"


def test_no_advance_is_made_while_nothing_can_be_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a coordinator. Else tenants would use up the epochs that are reserved, and servers get no answer then."""
    now = [1000.0]
    loop = Loop(lambda: now[0])
    with contextlib.closing(loop), contextlib.closing(StateFile(tmp_path, "m")) as file:
        manager = Manager(loop, store=file)
        monkeypatch.setattr(type(manager.state), "refuses", property(lambda _: "the state cannot be stored"))
        talk = Talk(loop, manager)
        with contextlib.closing(talk.sock):
            talk.ask(Advance("n", 1000), 1)
            before = manager.cluster.epoch
            answer = talk.hear()
            assert answer.status == M.Status.BUSY and manager.cluster.epoch == before
        manager.state.close()


def test_who_waits_for_the_map_gets_it_once() -> None:
    """Those beyond the first part of the answers got it by a push as well."""
    now = [1000.0]
    loop = Loop(lambda: now[0])
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        manager = Manager(loop)
        server, *talks = [Talk(loop, manager) for _ in range(1 + MAPS_PER_TURN + 20)]
        for talk in (server, *talks):
            stack.enter_context(contextlib.closing(talk.sock))
        manager.cluster._recovery.until = 1e9  # a lost map is collected: all wait
        for talk in talks:
            talk.ask(M.MapGet(0, SUBSCRIBE_MAPS), 1)
        for _ in range(10):
            loop.run_once(0.0)
        assert len(manager._waiting) == len(talks)
        manager.cluster._recovery.until = None
        server.ask(joining(1, "a", [INFO]), 1)
        for _ in range(30):
            now[0] += 0.1
            loop.run_once(0.0)
        assert manager.counts["maps_sent"] == len(talks) and manager.own()["pushes"] == 0


def test_issue_only_who_asks_for_maps_gets_them_and_a_question_changes_nothing() -> None:
    """Any set but 0 subscribed. 0 ended EPOCHS, and the maps went on without them."""
    now = [1000.0]
    loop = Loop(lambda: now[0])
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        manager = Manager(loop)
        others, follows, ends, advances = [Talk(loop, manager) for _ in range(4)]
        for talk in (others, follows, ends, advances):
            stack.enter_context(contextlib.closing(talk.sock))
        both = SUBSCRIBE_MAPS | SUBSCRIBE_EPOCHS
        asked = ((others, SUBSCRIBE_EPOCHS), (follows, both), (follows, 0), (ends, both), (ends, SUBSCRIBE_EPOCHS))
        for number, (talk, subscribe) in enumerate(asked, 1):
            talk.ask(M.MapGet(0, subscribe), number)
            assert isinstance(decode(talk.hear()), M.MapReply)
        assert manager.own()["subscribers"] == 1
        advances.ask(Advance("namespace", 1000), 1)
        for _ in range(20):
            now[0] += 0.02
            loop.run_once(0.0)
        assert [type(decode(follows.hear())) for _ in range(2)] == [Epochs, M.MapReply]
        assert manager.own()["pushes"] == 1
        for talk in (others, ends):
            with pytest.raises(BlockingIOError):
                talk.sock.recv(1)
