"""Peers of a publisher that lie, stall, ask without end or come in crowds: what is kept of them; others go on."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.errors import SimmError, UsageError  # noqa: E402
from simm.index.publish import outlet as outlet_module  # noqa: E402
from simm.index.publish import peers as peers_module  # noqa: E402
from simm.index.publish import zmtp  # noqa: E402
from simm.index.publish.messages import message  # noqa: E402
from simm.index.publish.outlet import Outlet  # noqa: E402
from simm.index.publish.peers import Door, Peer  # noqa: E402
from simm.net.loop import Loop  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402


class World:
    """An outlet that the test drives, and peers of every kind."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.at = f"{folder}/stream", f"{folder}/replay"
        self.outlet = Outlet(self.loop, "rfc1527", *(f"ipc://{each}" for each in self.at), "n", list)
        self.context = zmq.Context()
        self.raw: list[socket.socket] = []

    def turn(self) -> None:
        self.loop.run_once(0.001)
        self.outlet.publish([], time.monotonic())
        self.outlet.answer()

    def connect(self, replay: bool = False, said: bytes = b"") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.raw.append(sock)
        sock.connect(self.at[replay])
        sock.sendall(said)
        return sock

    def stall(self) -> socket.socket:
        """Subscribe, and read nothing."""
        return self.connect(said=zmtp.GREETING + zmtp.ready("SUB") + zmtp.frames(b"\1"))

    def wait(self, condition: Any, what: str) -> None:
        def done() -> Any:
            self.turn()
            return condition()

        wait_until(done, what)

    def close(self) -> None:
        for sock in self.raw:
            sock.close()
        self.context.destroy(0)
        self.outlet.close()
        self.loop.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Its peers are closed for slowness where a test says so: here a busy machine is the slow one."""
    monkeypatch.setattr(peers_module, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(peers_module, "STALL_S", 3600.0)
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def subscriber(world: World) -> Iterator[Any]:
    """A subscriber that is there, of a real library."""
    sub = world.context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, 0)
    sub.subscribe(b"")
    sub.connect(f"ipc://{world.at[0]}")
    before = sum(bool(each.topics) for each in world.outlet.stream.peers)
    world.wait(lambda: sum(bool(each.topics) for each in world.outlet.stream.peers) > before, "the subscriber")
    yield sub
    sub.close(0)


def numbers(sub: Any) -> list[int]:
    found = []
    while sub.poll(0):
        found.append(int.from_bytes(sub.recv_multipart()[1], "big"))
    return found


def held(door: Door) -> int:
    """Bytes that are kept for all peers, beside what is kept once."""
    return sum(len(each) for peer in door.peers for each in peer.out)


@pytest.mark.full
def test_subscribers_that_read_nothing_cost_little_and_stop_nobody(world: World) -> None:
    for _ in range(40):
        world.stall()
    world.wait(lambda: sum(bool(each.topics) for each in world.outlet.stream.peers) == 40, "the crowd")
    with subscriber(world) as sub:
        first, got = world.outlet.number, []
        body = message([{"event_type": "stored", "seq_hashes": list(range(1 << 40, (1 << 40) + 4000))}])
        for sent in range(4000):  # 144 MB, more than is kept
            world.outlet._send(body)
            world.wait(lambda sent=sent: got.extend(numbers(sub)) or len(got) > sent - 500, "the one that reads")  # type: ignore[misc]
        world.wait(lambda: got.extend(numbers(sub)) or len(got) >= 4000, "all messages")
    assert got[:4000] == list(range(first, first + 4000)), "each of them, in order"
    assert held(world.outlet.stream) < 40 * (256 << 10)
    assert world.outlet.kept_bytes <= outlet_module.KEPT_BYTES


def test_a_subscriber_that_was_slow_sees_a_gap_and_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outlet_module, "KEPT_MESSAGES", 20)
    monkeypatch.setattr(peers_module, "_SEND_BYTES", 4096)
    sock = world.stall()
    world.wait(lambda: any(each.topics for each in world.outlet.stream.peers), "the subscriber")
    with caplog.at_level(logging.WARNING, "simm.index.publish"):
        for _ in range(3):
            for _ in range(100):
                world.outlet._send(b"x" * 20_000)
                world.turn()
            sock.settimeout(0)
            read = 0
            while read < 200_000:
                with contextlib.suppress(BlockingIOError):
                    read += len(sock.recv(65_536))
                world.turn()
    assert world.outlet.skipped > 20
    assert [each.message.count("too slow") for each in caplog.records] == [1], "said once"


def test_a_peer_that_asks_again_and_again_and_reads_nothing_is_bounded(world: World) -> None:
    for _ in range(1000):
        world.outlet._send(b"x" * 10_000)
    first = world.outlet.number - 1000
    question = zmtp.frames(b"", first.to_bytes(8, "big"))
    patient = world.connect(True, zmtp.GREETING + zmtp.ready("DEALER") + question * 4)
    world.wait(lambda: any(each.writing for each in world.outlet.replay.peers), "the first answer")
    assert world.outlet.replays == 1 and held(world.outlet.replay) < 256 << 10
    greedy = world.connect(True, zmtp.GREETING + zmtp.ready("DEALER") + question * 40)
    world.wait(lambda: world.outlet.replay.dropped == 1, "the end of the one that asks for too much")
    assert len(world.outlet.replay.peers) == 1
    dealer = world.context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{world.at[1]}")
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    got: list[bytes] = []

    def answered() -> bool:
        while dealer.poll(0):
            got.append(dealer.recv_multipart()[1])
        return got[-1:] == [b"\xff" * 8]

    world.wait(answered, "the answer for another one")
    # And what the outlet has sent meanwhile, by its clock.
    assert len(got) > 1000
    assert [int.from_bytes(each, "big") for each in got[:-1]] == list(range(first, first + len(got) - 1))
    assert first + len(got) - 1 <= world.outlet.number
    assert patient.fileno() >= 0 and greedy.fileno() >= 0


def test_snapshots_for_those_that_lie_are_few(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number just before the first that is kept needs a new snapshot each time."""
    monkeypatch.setattr(outlet_module, "KEPT_MESSAGES", 3)
    for _ in range(5):
        world.outlet._send(message([]))
    dealer = world.context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{world.at[1]}")

    def ask() -> None:
        for _ in range(10):
            world.outlet._send(message([]))
        before = world.outlet.replays
        start = world.outlet.number - len(world.outlet._kept) - 1
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        world.wait(lambda: world.outlet.replays > before, "the question")

    ask()
    assert world.outlet.snapshots == 1
    world.outlet._next_snapshot = time.monotonic() + 3600
    for _ in range(3):
        ask() if world.outlet.replays < 2 else world.turn()
    assert world.outlet.snapshots == 1, "it waits"
    world.outlet._next_snapshot = 0.0
    world.wait(lambda: world.outlet.snapshots == 2, "the next one")


class Messages(list[bytes]):
    """A snapshot that has weak references."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Messages]]]:
    """Return the snapshots that are made, while the cycle collector is off."""
    found: list[weakref.ref[Messages]] = []

    def snapshot(*_: Any) -> Messages:
        one = Messages(b"x" * 100_000 for _ in range(30))
        found.append(weakref.ref(one))
        return one

    monkeypatch.setattr(outlet_module, "SNAPSHOT_PAUSE", 0.0)
    monkeypatch.setattr(outlet_module, "snapshot", snapshot)
    gc.disable()
    yield found
    gc.enable()


def alive(made: list[weakref.ref[Messages]]) -> int:
    return sum(each() is not None for each in made)


@pytest.mark.parametrize("bounded", [True, False], ids=["as it is", "positive control"])
def test_few_snapshots_are_held_for_those_that_read_slowly(
    world: World, made: list[weakref.ref[Messages]], monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """Each of them gets one of its own by a number just before the first that is kept, and reads none of it."""
    most = outlet_module.SNAPSHOTS_HELD + 1 if bounded else 6
    living: list[int] = []
    everything = world.outlet._everything
    monkeypatch.setattr(world.outlet, "_everything", lambda: living.append(alive(made)) or everything())
    if not bounded:
        monkeypatch.setattr(world.outlet, "_let_go", lambda: None)
    monkeypatch.setattr(outlet_module, "KEPT_MESSAGES", 3)
    door = world.outlet.replay
    for number in range(6):
        for _ in range(40):
            world.outlet._send(message([]))
        start = world.outlet.number - 4
        question = zmtp.frames(b"", start.to_bytes(8, "big"))
        world.connect(True, zmtp.GREETING + zmtp.ready("DEALER") + question)
        world.wait(lambda number=number: world.outlet.snapshots > number, "its snapshot")  # type: ignore[misc]
    held = {each.snapshot[0] for each in door.peers if each.snapshot is not None}
    assert len(held) == len(door.peers) == alive(made) == most
    assert max(living) == most - 1, "room is made before there is another one"


@pytest.mark.parametrize("end", ["it closes", "it stalls", "the outlet closes"])
def test_a_peer_that_goes_takes_its_snapshot_along(
    world: World, made: list[weakref.ref[Messages]], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its feed and it held each other, so the snapshot stayed in memory until the cycle collector ran."""
    sock = world.connect(True, zmtp.GREETING + zmtp.ready("DEALER") + zmtp.frames(b"", bytes(8)))
    door = world.outlet.replay
    world.wait(lambda: any(each.writing for each in door.peers), "the begin of its snapshot")
    world.outlet._snapshot = None
    assert alive(made) == 1
    if end == "it closes":
        sock.close()
        world.wait(lambda: not door.peers, "its end")
    elif end == "it stalls":
        monkeypatch.setattr(peers_module, "STALL_S", -1.0)
        door._maintain()
    else:
        world.outlet.close()
    assert not door.peers and alive(made) == 0


def test_a_peer_that_cannot_be_served_ends_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.outlet._everything
    monkeypatch.setattr(world.outlet, "_everything", lambda: 1 / 0)
    world.connect(True, zmtp.GREETING + zmtp.ready("DEALER") + zmtp.frames(b"", bytes(8)))
    world.wait(lambda: world.outlet.replay.dropped == 1, "its end")
    monkeypatch.setattr(world.outlet, "_everything", real)
    with subscriber(world) as sub:
        world.outlet._send(message([]))
        world.wait(lambda: sub.poll(0), "messages for another one")


def test_crowds_of_one_host_give_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many peers the silent go, then those of the host that has the most; peers of others stay."""
    monkeypatch.setattr(peers_module, "PEERS_MAX", 8)
    origins = iter([b"honest", *[b"crowd"] * 30, b"other", *[b"crowd"] * 5])
    monkeypatch.setattr(peers_module, "origin_of", lambda *_: next(origins))
    door = world.outlet.stream

    def come(silent: bool) -> None:
        known = set(door.peers)
        refused = door.refused
        sock = world.connect() if silent else world.stall()
        world.wait(lambda: set(door.peers) - known or door.refused > refused, "the connection")
        if not silent:
            world.wait(lambda: all(each.decoder.open for each in door.peers) or sock.fileno() < 0, "its handshake")

    come(silent=False)
    for _ in range(15):
        come(silent=True)
    assert len(door.peers) == 8 and [each.origin for each in door.peers].count(b"honest") == 1
    for sock in world.raw[1:]:
        sock.close()
    world.wait(lambda: len(door.peers) == 1, "the end of the crowd")
    for _ in range(15):
        come(silent=False)
    come(silent=False)
    assert [each.origin for each in door.peers].count(b"other") == 1, "a newcomer is let in"
    for _ in range(5):
        come(silent=False)
    counted = [each.origin for each in door.peers]
    assert counted.count(b"honest") == counted.count(b"other") == 1 and len(counted) == 8


def test_a_crowd_keeps_nobody_out_who_has_just_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is in its handshake does not give way to a host that has all the others."""
    monkeypatch.setattr(peers_module, "PEERS_MAX", 8)
    origins = iter([*[b"crowd"] * 7, b"honest", *[b"crowd"] * 3, b"third"])
    monkeypatch.setattr(peers_module, "origin_of", lambda *_: next(origins))
    door = world.outlet.stream
    for _ in range(7):
        world.stall()
    world.wait(lambda: len(door.peers) == 7 and all(each.decoder.open for each in door.peers), "the crowd")
    world.connect()
    world.wait(lambda: len(door.peers) == 8, "the honest one")
    for number in range(3):
        world.connect()
        world.wait(lambda number=number: door.refused == number + 1, "one more of the crowd")
    assert [each.origin for each in door.peers].count(b"honest") == 1
    world.connect()
    world.wait(lambda: door.refused == 4, "the positive control")
    assert [each.origin for each in door.peers].count(b"third") == 1


def test_silent_and_stalled_peers_are_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, stalled = world.connect(), world.stall()
    world.wait(lambda: sum(bool(each.topics) for each in world.outlet.stream.peers) == 1, "both")
    for _ in range(100):
        world.outlet._send(b"x" * 20_000)
    world.wait(lambda: any(each.writing for each in world.outlet.stream.peers), "the one that reads nothing")
    world.outlet.stream._maintain()
    assert len(world.outlet.stream.peers) == 2, "not yet"
    monkeypatch.setattr(peers_module, "HANDSHAKE_S", -1.0)
    world.outlet.stream._maintain()
    assert len(world.outlet.stream.peers) == 1
    monkeypatch.setattr(peers_module, "STALL_S", -1.0)
    world.outlet.stream._maintain()
    assert not world.outlet.stream.peers and world.outlet.stream.dropped == 1
    assert silent.recv(1000) and stalled.recv(1000), "they had a greeting"


@pytest.mark.parametrize("replay", [False, True])
def test_strangers_are_closed_and_said_once(world: World, caplog: pytest.LogCaptureFixture, replay: bool) -> None:
    door = world.outlet.replay if replay else world.outlet.stream
    topics = zmtp.GREETING + zmtp.ready("SUB") + b"".join(zmtp.frames(b"\1%d" % each) for each in range(70))
    with caplog.at_level(logging.WARNING, "simm.index.publish"):
        for number, said in enumerate((b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, topics), 1):
            world.connect(replay, said)
            world.wait(lambda number=number: door.dropped == number, "its end")  # type: ignore[misc]
    assert not door.peers and len(caplog.records) == 1


def test_a_sign_of_life_is_answered_between_messages(world: World) -> None:
    sub = world.context.socket(zmq.SUB)
    sub.setsockopt(zmq.HEARTBEAT_IVL, 20)
    sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    sub.subscribe(b"")
    sub.connect(f"ipc://{world.at[0]}")
    seen: list[Any] = []
    door = world.outlet.stream

    def asked() -> bool:
        for peer in door.peers:
            real = peer.decoder.feed

            def feed(data: bytes, real: Any = real) -> Iterator[Any]:
                for each in real(data):
                    seen.append(each)
                    yield each

            if not getattr(peer.decoder, "watched", False):
                peer.decoder.feed = feed  # type: ignore[method-assign]
                peer.decoder.watched = True  # type: ignore[attr-defined]
        world.outlet._send(b"x")
        return sum(isinstance(each, zmtp.Pong) for each in seen) >= 3

    world.wait(asked, "signs of life")
    world.wait(lambda: sub.poll(0), "messages all the same")
    sub.close(0)


def test_addresses(tmp_path: Path) -> None:
    loop = Loop()

    def nothing(_peer: Peer, *_said: Any) -> list[bytes]:
        return []

    def door(address: str) -> Door:
        return Door(loop, address, "PUB", nothing, nothing)

    try:
        with contextlib.closing(door("tcp://*:*")) as made:
            assert made.address.startswith("tcp://0.0.0.0:") and not made.address.endswith(":0")
            with pytest.raises(SimmError, match="cannot publish at") as taken:
                door(made.address)
            assert not isinstance(taken.value, UsageError), "a unit would not try it again"
        path = tmp_path / "socket"
        with contextlib.closing(door(f"ipc://{path}")) as made:
            assert made.address == f"ipc://{path}"
            with pytest.raises(SimmError, match="another process listens") as taken:
                door(f"ipc://{path}")
            assert not isinstance(taken.value, UsageError)
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        door(f"ipc://{path}").close()  # what a process that was killed has left
        path.write_text("a file")
        with pytest.raises(UsageError, match="no socket"):
            door(f"ipc://{path}")
        assert path.read_text() == "a file"
        long = "ipc:///" + "a" * 200
        for wrong in (
            "udp://1.2.3.4:5", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "x", long,
            f"tcp://127.0.0.1:{'9' * 5000}", f"tcp://{chr(0xFC) * 70}:1", f"tcp://{'a' * 70}:1",
        ):  # fmt: skip
            with pytest.raises(UsageError, match="cannot publish at"):
                door(wrong)
    finally:
        loop.close()


@pytest.mark.parametrize(
    "why",
    [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
     *[OSError(code, os.strerror(code)) for code in (errno.EMFILE, errno.ENOBUFS, errno.ENOMEM)]],
    ids=str,
)  # fmt: skip
def test_issue_what_the_next_start_may_find_mended_is_no_wrong_usage(
    why: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit stayed stopped for ever if names could not be resolved yet, or no descriptor was left."""

    def fail(*_: Any) -> Any:
        raise why

    def refused(address: str) -> SimmError:
        with pytest.raises(SimmError, match=f"cannot publish at {address}: .*{why.strerror}") as found:
            Door(loop, address, "PUB", fail, fail)
        return found.value

    with contextlib.closing(Loop()) as loop:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "bind", fail)
            assert not isinstance(refused("tcp://nosuch:1"), UsageError)
            why = OSError(errno.EACCES, os.strerror(errno.EACCES))
            assert isinstance(refused("tcp://127.0.0.1:1"), UsageError), "it is the same at each start"
