"""Real ZMQ sockets: messages, a hole that is replayed, a publisher that is restarted, leases, and hostile frames."""

from __future__ import annotations

import contextlib
import errno
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.errors import UsageError  # noqa: E402
from simm.index import publishers as publishers_module  # noqa: E402
from simm.index import streams as streams_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.keys import request_keys  # noqa: E402
from simm.index.publishers import Publishers, check_endpoint  # noqa: E402
from simm.index.scores import score  # noqa: E402
from simm.index.service import Service  # noqa: E402
from simm.index.sources import Registration, Space  # noqa: E402
from simm.index.streams import Stream  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

SPACE = Space("m", "", "default", "", 1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay waits for this thread, which is the engine's, as long as a busy machine takes."""
    monkeypatch.setattr(publishers_module, "REPLAY_IDLE_S", 60.0)


class Engine:
    """An engine's publisher: PUB and ROUTER, and the messages that it keeps. ``topic``: replays have one too."""

    def __init__(self, folder: Path, *, topic: bool = False) -> None:
        self.topics = [[b"kv@A@m"], [b""]] if topic else [[], []]
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.endpoint, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.pub.bind(self.endpoint)
        self.router.bind(self.replay)
        self.log: list[bytes] = []

    def tell(self, *events: Any, sent: bool = True) -> None:
        self.log.append(msgspec.msgpack.encode([0.0, list(events), 0]))
        if sent:
            self.pub.send_multipart([b"kv@A@m", (len(self.log) - 1).to_bytes(8, "big"), self.log[-1]])

    def answer(self) -> int:
        """Answer the replays that were asked for. Return their number."""
        count = 0
        while self.router.poll(0):
            peer, empty, start = self.router.recv_multipart()
            begin, end = ([peer, empty, *topic] for topic in self.topics)
            for wrong in ([], [b"1", b""], [b"x", b"x", bytes(8), b""]):
                self.router.send_multipart([peer, empty, *wrong])
            for number in range(int.from_bytes(start, "big"), len(self.log)):
                self.router.send_multipart([*begin, number.to_bytes(8, "big"), self.log[number]])
            self.router.send_multipart([*end, b"\xff" * 8, b""])
            count += 1
        return count

    def close(self) -> None:
        self.context.destroy(0)


def stored(*tokens: int) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [each + 1 for each in tokens], "parent_block_hash": None,
            "token_ids": list(tokens), "block_size": 1}  # fmt: skip


@contextlib.contextmanager
def _publishers() -> Iterator[Publishers]:
    publishers = Publishers(Blocks())
    try:
        yield publishers
    finally:
        publishers.close()


def _has(publishers: Publishers, *tokens: int) -> int:
    match = score(publishers.index, SPACE, request_keys(list(tokens), 1)).matches.get("A")
    return match.blocks if match else 0


def _register(publishers: Publishers, engine: Engine, *, replay: bool = True, **more: Any) -> Any:
    told = Registration(
        "A", "m", block_size=1, endpoint=engine.endpoint, replay=engine.replay if replay else "", **more
    )
    return publishers.register(told)


@pytest.mark.parametrize("topic", [False, True])
def test_messages_come_and_a_hole_is_replayed(tmp_path: Path, topic: bool) -> None:
    engine = Engine(tmp_path, topic=topic)
    with _publishers() as publishers:
        engine.tell(stored(1, 2))  # before anybody listens
        source = _register(publishers, engine)
        wait_until(lambda: (engine.answer(), _has(publishers, 1, 2) == 2)[1], "the replay of what came before")
        engine.tell(stored(3, 4), sent=False)
        numbers = iter(range(100, 10_000))

        def told() -> bool:
            engine.tell(stored(next(numbers)))
            engine.answer()
            return _has(publishers, 3, 4) == 2

        wait_until(told, "the replay of a hole", pause_s=0.05)

        def complete() -> bool:
            engine.answer()
            stream = publishers.stream(source)
            return stream is not None and stream.complete and not source.stale and stream.counts["replays"] >= 2

        wait_until(complete, "the end of the replay")
        assert publishers.unregister(source.registration.name) and not publishers.unregister(source.registration.name)
        assert publishers.index.entries == 0
    engine.close()


def test_messages_that_fail_are_not_all_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher could fill the log with tracebacks."""
    engine = Engine(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise IndexError("an error in the index")

    with _publishers() as publishers:
        source = _register(publishers, engine, replay=False)
        monkeypatch.setattr(publishers.index, "apply", fails)

        def failed() -> bool:
            engine.tell(stored(1))
            stream = publishers.stream(source)
            return stream is not None and stream.counts["failures"] >= 12

        wait_until(failed, "messages that fail")
        stream = publishers.stream(source)
        assert publishers.alive and stream is not None and not stream.counts["disconnects"]
    found = [each for each in caplog.records if "an error in the index" in (each.exc_text or str(each.exc_info))]
    assert len(found) == 2, "the first and the tenth"
    engine.close()


def test_a_publisher_that_is_restarted_is_cleared(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine, replay=False)

        def told(token: int) -> bool:
            engine.tell(stored(token))
            return _has(publishers, token) == 1

        wait_until(lambda: told(1), "the first message", pause_s=0.05)
        stream = publishers.stream(source)
        # Messages that are read after the end of their connection would count as those of the next one.
        wait_until(lambda: stream is not None and stream.next == len(engine.log), "the last message")
        engine.close()
        wait_until(lambda: source.lost, "the end of the connection")
        assert _has(publishers, 1) == 0
        engine = Engine(tmp_path)
        wait_until(lambda: told(2), "the next process", pause_s=0.05)
        assert _has(publishers, 1) == 0
    engine.close()


def test_a_replay_without_an_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "REPLAY_IDLE_S", 0.1)
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine)
        wait_until(lambda: (stream := publishers.stream(source)) and stream.counts["failed replays"], "giving up")
        engine.tell(stored(1))

        def told() -> bool:
            engine.tell(stored(1))
            return _has(publishers, 1) == 1

        wait_until(told, "messages without a replay", pause_s=0.1)
    engine.close()


class _Reader:
    """One publisher's sockets, read by the test, whose clock goes on by 30 s before each tick."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(publishers_module, "REPLAY_IDLE_S", 2.0)
        monkeypatch.setattr(publishers_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.engine = engine
        self.index = Blocks()
        told = Registration("A", "m", block_size=1, endpoint=engine.endpoint, replay=engine.replay)
        self.stream = Stream(self.index, self.index.register(told), replays=True)
        self.link = publishers_module._Link(engine.context, self.stream, zmq.Poller())
        self.ask(self.stream.connected())

    def ask(self, start: int | None) -> None:
        self.link.begin_replay(start)
        assert self.engine.router.poll(30_000), "the question"

    def read(self, *, more: bool) -> None:
        """Read a turn's share. Return when ``more`` is there to be read."""
        assert self.link.dealer.poll(30_000), "an answer"
        self.link.read(self.link.dealer)
        assert not more or self.link.dealer.poll(30_000), "another one"

    def tick(self) -> None:
        self.now += 30.0
        self.link.tick(self.now)


def test_an_answer_that_waits_to_be_read_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of other publishers took as long as a replay may be silent. So it failed, and at last was forgotten."""
    engine = Engine(tmp_path)
    for token in range(4 * publishers_module.TURN):
        engine.tell(stored(token), sent=False)
    with contextlib.ExitStack() as undo:
        undo.callback(engine.close)
        reader = _Reader(engine, monkeypatch)
        undo.callback(reader.link.close)
        engine.answer()
        for _ in range(4):
            reader.read(more=True)
            reader.tick()
            assert not reader.stream.counts["failed replays"]
        while reader.link.dealer is not None:  # a read returns where the next message is still on its way
            reader.read(more=False)
        assert reader.stream.complete and reader.stream.source.blocks == 4 * publishers_module.TURN


def test_a_replay_that_is_silent_or_goes_nowhere_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    with contextlib.ExitStack() as undo:
        undo.callback(engine.close)
        reader = _Reader(engine, monkeypatch)
        undo.callback(reader.link.close)
        reader.tick()
        assert reader.link.dealer is None and reader.stream.failures == 1, "silent from the beginning"
        engine.router.recv_multipart()
        reader.ask(reader.stream.retry())
        peer, empty, _ = engine.router.recv_multipart()
        raw = msgspec.msgpack.encode([0.0, [], 0])
        engine.router.send_multipart([peer, empty, bytes(8), raw])
        reader.read(more=False)
        reader.tick()
        assert reader.link.dealer is None and reader.stream.source.stale, "silent behind a part"
        reader.ask(reader.stream.retry())
        peer, empty, _ = engine.router.recv_multipart()
        for _ in range(4 * publishers_module.TURN):
            engine.router.send_multipart([peer, empty, bytes(8), raw])  # the same again and again
        for _ in range(3):
            reader.read(more=True)
            reader.tick()
        assert reader.link.dealer is None and reader.stream.counts["failed replays"] == 3


def test_a_replay_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "REPLAY_IDLE_S", 0.1)
    monkeypatch.setattr(publishers_module, "RETRY_S", 0.1)
    monkeypatch.setattr(publishers_module, "RETRY_MAX_S", 0.1)
    monkeypatch.setattr(streams_module, "ASKS_MAX", 1 << 30)
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        engine.tell(stored(1, 2))
        source = _register(publishers, engine)
        engine.router.poll()
        engine.router.recv_multipart()  # the first question: it does not answer
        wait_until(lambda: (stream := publishers.stream(source)) and stream.counts["failed replays"], "giving up")

        def told() -> bool:
            engine.tell(stored(5))
            return _has(publishers, 5) == 1

        wait_until(told, "messages without a replay", pause_s=0.1)
        assert _has(publishers, 1) == 0

        def complete() -> bool:
            engine.answer()
            stream = publishers.stream(source)
            return stream is not None and stream.complete and not source.stale

        wait_until(complete, "the answer to a later question")
        assert _has(publishers, 1, 2) == 2 and _has(publishers, 5) == 1 and not source.lost
    engine.close()


def test_a_replay_that_nobody_answers_is_asked_for_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers_module, "REPLAY_IDLE_S", 0.05)
    monkeypatch.setattr(publishers_module, "RETRY_S", 0.05)
    monkeypatch.setattr(publishers_module, "RETRY_MAX_S", 0.1)
    monkeypatch.setattr(publishers_module, "_TICK_S", 0.05)
    monkeypatch.setattr(streams_module, "ASKS_MAX", 4)
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine)
        link = lambda: publishers._links.get(source)  # noqa: E731
        wait_until(lambda: link() is not None and link().stream.failures == 4, "the last question")  # type: ignore[union-attr]
        asked = 0
        while engine.router.poll(500):  # none comes later
            engine.router.recv_multipart()
            asked += 1
        assert asked == 4 and not link().stream.complete  # type: ignore[union-attr]
    engine.close()


def test_hostile_frames_and_a_failure_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine, replay=False)
        hostile = [[b"x"], [b"x", b"123", b""], [b"x"] * 50, [b"x", bytes(8), b"\xff"], [b"", b"\xff" * 8, b"\x90"]]

        def told() -> bool:
            for frames in hostile:
                engine.pub.send_multipart(frames)
            return bool((stream := publishers.stream(source)) and stream.counts["refused"] > 4)

        wait_until(told, "wrong messages", pause_s=0.05)
        with monkeypatch.context() as patch:
            patch.setattr(publishers.index, "apply", lambda *_: 1 // 0)
            before = publishers.stream(source).counts["failures"]  # type: ignore[union-attr]

            def failed() -> bool:
                engine.tell(stored(1))
                return publishers.stream(source).counts["failures"] > before  # type: ignore[union-attr]

            wait_until(failed, "a failure", pause_s=0.05)

        def again() -> bool:
            engine.tell(stored(2))
            return _has(publishers, 2) == 1

        wait_until(again, "messages after it", pause_s=0.05)
    engine.close()


@pytest.mark.parametrize("replay", ["tcp://$(POD_IP):5558", "tcp://\ud800:5558"], ids=["variable", "surrogate"])
def test_a_replay_that_cannot_be_asked_for_ends_nobody(
    tmp_path: Path, replay: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An address that ZMQ refuses ended the only thread that reads publishers, and all of them stood still."""
    monkeypatch.setattr(publishers_module, "check_endpoint", lambda text: text)  # as one that the check lets through
    engine = Engine(tmp_path)
    asking: list[Any] = []
    real = zmq.Context.socket

    def socket(context: Any, kind: int) -> Any:
        made = real(context, kind)
        if kind == zmq.DEALER:
            asking.append(made)
        return made

    monkeypatch.setattr(zmq.Context, "socket", socket)
    with _publishers() as publishers:
        told = Registration("B", "m", block_size=1, endpoint=engine.endpoint, replay=replay)
        bad = publishers.register(told)
        wait_until(lambda: (stream := publishers.stream(bad)) and stream.counts["failed replays"], "giving up")
        good = _register(publishers, engine, replay=False)

        def told_of() -> bool:
            engine.tell(stored(1))
            return _has(publishers, 1) == 1 and bad.blocks == 1 and not bad.stale

        wait_until(told_of, "messages of both", pause_s=0.05)
        assert publishers.alive and not good.stale
        wait_until(lambda: asking and all(each.closed for each in list(asking)), "no socket of a question is left")
        assert publishers.unregister(told.name)
    assert "cannot ask" in caplog.text
    engine.close()


def test_what_fails_at_a_tick_or_a_socket_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine)
        link = lambda: publishers._links.get(source)  # noqa: E731
        wait_until(lambda: link() is not None and link().dealer is not None, "the question")  # type: ignore[union-attr]
        done: list[Any] = []

        def unpolled() -> None:
            """Take the socket of a replay from the poller: what ends the replay must not trip over it."""
            publishers._poller.unregister(link().dealer)  # type: ignore[union-attr]
            monkeypatch.setattr(link(), "tick", lambda _: done.append(1 // 0))

        publishers._do(unpolled)
        wait_until(lambda: (stream := publishers.stream(source)) and stream.counts["failures"], "a tick that fails")
        assert link().dealer is None  # type: ignore[union-attr]

        def told() -> bool:
            engine.tell(stored(1))
            engine.answer()
            return publishers.stream(source).counts["messages"] > 0  # type: ignore[union-attr]

        wait_until(told, "messages after it", pause_s=0.05)
        assert publishers.alive and not done
        publishers._do(lambda: publishers._poller.unregister(link().sub))  # type: ignore[union-attr]
        assert publishers.unregister(source.registration.name)
        again = _register(publishers, engine, replay=False)
        wait_until(lambda: publishers.stream(again) is not None, "another registration")
    engine.close()


def test_an_index_whose_thread_has_ended_is_not_ready() -> None:
    publishers = Publishers(Blocks())
    ready = Service(publishers.index, publishers).routes["/readyz"]
    assert ready().status == 200  # type: ignore[union-attr]
    publishers.close()
    page = ready()
    assert page.status == 503 and "start this process again" in page.body  # type: ignore[union-attr]
    assert Service(Blocks()).routes["/readyz"]().status == 200, "one without publishers"  # type: ignore[union-attr]


def test_a_lease_ends(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with _publishers() as publishers:
        source = _register(publishers, engine, lease_s=0.2)
        wait_until(lambda: source.registration.name not in publishers.index.sources, "the end of the lease")
    engine.close()


def test_a_lease_that_is_renewed_at_its_end_goes_on() -> None:
    """The thread had read when it ends, and forgot the publisher that a request had renewed meanwhile."""
    told = Registration("A", "m", block_size=1, endpoint="tcp://127.0.0.1:1", lease_s=3600.0)
    with _publishers() as publishers:
        source = publishers.register(told)
        ended = publishers._leases[told.name]

        class Leases(dict[Any, float]):
            def items(self) -> Any:
                found = list(super().items())
                publishers.register(told)  # as another thread would
                return found

        publishers._leases = Leases(publishers._leases)
        publishers._do(lambda: publishers._tick(ended))
        wait_until(lambda: publishers._leases[told.name] > ended, "the renewal")
        done: list[bool] = []
        publishers._do(lambda: done.append(True))
        wait_until(lambda: done, "the tick's end")
        assert publishers.index.sources.get(told.name) is source and publishers.stream(source) is not None


def test_what_could_not_be_listened_to_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher of a file is never renewed."""
    monkeypatch.setattr(publishers_module, "RETRY_S", 0.0)
    failures = iter([True] * 3)
    connect = zmq.Socket.connect

    def fails(sock: Any, address: str) -> Any:
        if sock.type == zmq.SUB and next(failures, False):
            raise zmq.ZMQError(errno.EMFILE)
        return connect(sock, address)

    monkeypatch.setattr(zmq.Socket, "connect", fails)
    with _publishers() as publishers:
        source = publishers.register(Registration("A", "m", endpoint="tcp://127.0.0.1:1"))
        wait_until(lambda: publishers.stream(source) is not None, "it is listened to")
        assert next(failures, None) is None and not source.lost and not publishers._unopened
        gone = Registration("B", "m", endpoint="tcp://127.0.0.1:1")
        monkeypatch.setattr(publishers_module, "RETRY_S", 3600.0)
        monkeypatch.setattr(publishers_module, "RETRY_MAX_S", 3600.0)
        failures = iter([True])
        other = publishers.register(gone)
        wait_until(lambda: other.lost, "it has failed")
        assert publishers.unregister(gone.name)
        wait_until(lambda: not publishers._unopened, "it is tried no more")


def test_a_publisher_at_an_ipv6_address_is_heard() -> None:
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        for sock in (pub, router):
            sock.setsockopt(zmq.IPV6, 1)
            try:
                sock.bind("tcp://[::1]:*")
            except zmq.ZMQError as exc:
                pytest.skip(f"no IPv6 here: {exc}")
        ends = [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in (pub, router)]
        told = Registration("A", "m", block_size=1, endpoint=ends[0], replay=ends[1])
        with _publishers() as publishers:
            publishers.register(told)

            def heard() -> bool:
                pub.send_multipart([b"", bytes(8), msgspec.msgpack.encode([0.0, [stored(1)], 0])])
                return bool(router.poll(0))

            wait_until(heard, "a question for a replay", pause_s=0.05)
            peer, empty, _ = router.recv_multipart()
            message = msgspec.msgpack.encode([0.0, [stored(1)], 0])
            router.send_multipart([peer, empty, bytes(8), message])
            router.send_multipart([peer, empty, b"\xff" * 8, b""])
            wait_until(lambda: _has(publishers, 1) == 1, "its answer")
    finally:
        context.destroy(0)


def test_a_thread_that_ends_before_it_is_woken() -> None:
    publishers = Publishers(Blocks())

    class Todo(queue.SimpleQueue[Any]):
        def put(self, *_: Any, **__: Any) -> None:
            publishers._thread.join()

    publishers._todo = Todo()
    publishers.close()
    assert not publishers._thread.is_alive()


WRONG = [
    "", "tcp://*:1", "tcp://h", "inproc://x", "http://h:1", "ipc://x", "tcp://h:1 " * 99, "tcp://$(POD_IP):5558",
    "tcp://${IP}:5558", "tcp://h:0", "tcp://h:65536", "tcp://h:\u0661", "tcp://\ud800:1", "ipc:///\ud800", "tcp://-h:1",
    "tcp://h\0:1", "tcp://[::1:5558", "tcp://a,b:1",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="no publisher's address") as failed:
        check_endpoint(text)
    assert ("nothing has replaced" in str(failed.value)) == ("$" in text)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:5557", "tcp://pod-0.vllm_x.ns.svc:65535", "tcp://[fe80::1%eth0]:1"])
def test_an_address_that_zmq_takes(text: str) -> None:
    assert check_endpoint(text) == text
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.IPV6, 1)
    sock.connect(text)
    context.destroy(0)
