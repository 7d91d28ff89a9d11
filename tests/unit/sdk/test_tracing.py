"""A client that traces: what it records by each path, and that one which does not is as without the feature."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from simm.errors import ConfigError, UsageError
from simm.ipc.put import ShmPut
from simm.sdk.calls import tracing as calls
from simm.sdk.reads import Gets
from simm.sdk.remote_reads import RemoteReads
from simm.sdk.tcp import TcpPath
from simm.sdk.tracing import parts, stand_ins, switch
from simm.sdk.writes import Puts
from simm.testing import FakeClient
from simm.tracing import spans as spans_module
from simm.tracing import spool
from simm.tracing.context import context
from simm.tracing.perfetto import Event, fault_of
from tests.support.ended import ended
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
PATHS = ("shm", "tcp")
VALUE = os.urandom(300_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as running:
        running.settled({0: ALL[::2], 1: ALL[1::2]})
        yield running


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    path = getattr(request, "param", "shm")
    with contextlib.closing(cluster.client(path, trace_dir=str(tmp_path / "trace"))) as connected:
        assert connected.wait_ready(30.0)
        yield connected


def both_paths(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("client", PATHS, indirect=True)(test)  # type: ignore[no-any-return]


def spans(client: Client) -> list[Event]:
    """End tracing, and return what was recorded, checked."""
    folder = Path(client._options.trace_dir)
    client.trace(None)
    events, bad, refused, _ = spool.collect(folder)
    assert (bad, refused) == (0, 0) and [fault_of(event) for event in events if fault_of(event)] == []
    return events


def check_trees(events: list[Event]) -> None:
    """Each span's parent is a span of the same trace that encloses it, or it is an operation."""
    by_id = {(event["args"]["trace_id"], event["args"]["span_id"]): event for event in events}
    assert len(by_id) == len(events)
    for event in events:
        if event["args"].get("op"):
            continue
        parent = by_id[event["args"]["trace_id"], event["args"]["parent_id"]]
        assert parent["ts"] <= event["ts"], (parent, event)
        assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"] + 1e-6, (parent, event)


def names(events: list[Event], of: str, *, server: bool = False) -> set[str]:
    return {
        event["name"] for event in events
        if event["args"].get("of") == of and bool(event["args"].get("server")) is server
    }  # fmt: skip


#: Operation -> segments that it has at least, by path; those below the second name are the server's.
SEGMENTS = {
    "shm": {
        "put": ({"grant", "copy", "commit"}, {"decode", "publish"}), "get": ({"locate", "copy", "confirm"}, set()),
        "exists": ({"locate"}, set()), "delete": ({"post", "answer"}, {"decode", "delete"}),
    },
    "tcp": {
        "put": ({"send", "answer"}, {"decode", "store"}),
        "get": ({"send", "answer", "receive", "verdict"}, {"decode", "read"}),
        "exists": ({"send", "answer"}, {"decode", "look"}), "delete": ({"send", "answer"}, {"decode", "delete"}),
    },
}  # fmt: skip


@both_paths
def test_a_put_and_a_get_are_trees_under_the_callers_id(client: Client) -> None:
    path = client._options.path
    client.trace(0.0)  # only what the caller records
    with context(PARENT):
        assert client.put("k", VALUE)
        assert client.get("k") == VALUE
        assert client.exists("k") and client.delete("k")
    assert client.put("other", VALUE), "outside of the block nothing is recorded"
    events = spans(client)
    check_trees(events)
    assert {event["args"]["trace_id"] for event in events} == {TRACE}
    operations = [event for event in events if event["args"].get("op")]
    assert [event["name"] for event in operations] == ["put", "get", "exists", "delete"]
    key = client.digest("k")[:4].hex()
    for event in operations:
        args = event["args"]
        assert args["parent_id"] == SPAN and args["path"] == path and args["key"] == key
        assert (args["keys"], args["done"]) == (1, 1)
    for operation, (least, of_server) in SEGMENTS[path].items():
        assert least <= names(events, operation)
        assert of_server <= names(events, operation, server=True)
        assert bool(of_server) is bool(names(events, operation, server=True)), "a get by shm asks no server"


def test_a_get_that_is_timed_for_the_histogram_has_its_segments_once(client: Client) -> None:
    """One get in 160 is timed by a call of itself: what it has found out already must not be noted twice."""
    assert client.put("k", VALUE)
    client.trace(0.0)
    with context(PARENT):
        for _ in range(400):
            assert client.get("k") == VALUE
    events = spans(client)
    gets = [event for event in events if event["args"].get("op")]
    assert len(gets) == 400
    copies = Counter(event["args"]["parent_id"] for event in events if event["name"] == "copy")
    assert sorted(copies) == sorted(get["args"]["span_id"] for get in gets) and set(copies.values()) == {1}


@both_paths
def test_batches(client: Client) -> None:
    keys = [f"b{number}" for number in range(100)]
    client.trace(1.0)
    assert all(client.put_many(keys, [VALUE[:5000]] * len(keys)))
    sinks = [bytearray(5000) for _ in keys]
    assert client.get_into_many([*keys[:50], *[f"none{at}" for at in range(50)]], sinks) == [5000] * 50 + [None] * 50
    assert client.exists_many(keys) == [True] * 100
    assert client.delete_many(keys[:10]) == [True] * 10
    events = spans(client)
    check_trees(events)
    found = {event["name"]: event["args"] for event in events if event["args"].get("op")}
    assert {name: (args["keys"], args["done"]) for name, args in found.items()} == {
        "put": (100, 100), "get": (100, 50), "exists": (100, 100), "delete": (10, 10),
    }  # fmt: skip
    assert all("key" not in args for args in found.values()), "a batch names none of its keys"
    assert len(events) <= 4 * 65
    of_server = "look" if client._options.path == "tcp" else None
    assert names(events, "exists", server=True) == ({"decode", of_server} if of_server else set())
    assert names(events, "delete", server=True) == {"decode", "delete"}


@both_paths
def test_a_delete_that_fails_is_one_that_fails_without_a_trace(client: Client, cluster: FakeCluster) -> None:
    """The stand-ins tell the routes of the real target."""
    client.trace(1.0)
    assert client.delete_many(["none", "nor this"]) == [False, False]
    assert client.delete_sized([client.digest("none")], [5]) != [0]
    lost: list[tuple[Any, object]] = []
    for target in client._router.targets.values():
        path = target.session or target.tcp
        if target.session is not None:
            target.session.channel.sock.shutdown(2)
        else:
            target.tcp_lost(target.tcp, "as if it broke")
        lost.append((target, path))
    assert client.delete_many([f"k{at}" for at in range(8)]) == [False] * 8
    # The client may have connected again by now.
    assert lost and all(path is not None and path not in (target.session, target.tcp) for target, path in lost)
    events = spans(client)
    check_trees(events)


@both_paths
def test_every_call_works_as_before(client: Client) -> None:
    client.trace(1.0)
    sink = bytearray(len(VALUE))
    assert client.put("k", VALUE) and client.get_into("k", sink) == len(VALUE) and sink == VALUE
    assert client.get("absent") is None and client.get_into("absent", sink) is None
    assert client.exists("k") and not client.exists("absent")
    with client.view("k") as view:
        assert bytes(view.data) == VALUE
    assert client.put_many(["a", "b", "a"], [b"1", b"2", b"3"]) == [True] * 3
    assert client.get_many(["a", "b", "c"]) == [b"3", b"2", None]
    with pytest.raises(UsageError, match="does not fit"):
        client.get_into("k", bytearray(3))
    with pytest.raises(UsageError):
        client.get("")
    assert client.put(key="k", value=VALUE) and client.get(key="k") == VALUE
    assert client.exists_many(each for each in ("k", "absent")) == [True, False]  # type: ignore[arg-type]
    assert client.put_gather("parts", [VALUE[:100_000], VALUE[100_000:]]) and client.get("parts") == VALUE
    assert client.get_ranges("parts", [(5, 10, sink)]) == len(VALUE) and sink[:10] == VALUE[5:15]
    assert client.delete("k") and not client.delete("k") and client.get("k") is None
    events = spans(client)
    check_trees(events)
    errors = [event["args"]["error"] for event in events if "error" in event["args"]]
    assert errors == ["UsageError", "UsageError"]


def test_no_name_of_a_key_is_in_a_file(client: Client, tmp_path: Path) -> None:
    client.trace(1.0)
    client.put("a-secret-prompt", VALUE)
    client.get_many(["a-secret-prompt", "another-secret"])
    spans(client)
    text = b"".join(path.read_bytes() for path in (tmp_path / "trace").iterdir())
    assert text and b"secret" not in text and client.digest("a-secret-prompt").hex().encode() not in text


def test_by_name_in_any_order_it_is_the_key_that_is_shown(client: Client) -> None:
    """Not the first bytes of the value."""
    client.trace(1.0)
    assert client.put(value=b"secret", key="k")
    assert client.put(b"".join([b"k"]).decode(), value=b"secret")
    assert client.get_into(buffer=bytearray(b"secret"), key="k") == 6
    assert client.get_digest(sink=memoryview(bytearray(6)), digest=client.digest("k")) == 6
    operations = [event["args"] for event in spans(client) if event["args"].get("op")]
    assert [args["key"] for args in operations] == [client.digest("k")[:4].hex()] * 4


@both_paths
def test_awaitable_forms_are_in_the_callers_trace(client: Client) -> None:
    client.trace(0.0)

    async def run() -> None:
        with context(PARENT):
            assert await client.put_async("k", VALUE)
            assert await asyncio.gather(*[client.get_async("k") for _ in range(3)]) == [VALUE] * 3
        assert await client.get_async("k") == VALUE

    asyncio.run(run())
    operations = [event for event in spans(client) if event["args"].get("op")]
    assert [event["name"] for event in operations] == ["put", "get", "get", "get"]
    assert {event["args"]["trace_id"] for event in operations} == {TRACE}


# -- off: what a client is without the feature ---------------------------------------------------------------


CALLS = sorted(switch.CALLS)
PARTS: tuple[tuple[Callable[[Client], Any], type], ...] = (
    (lambda client: client, Client), (lambda client: client._gets, Gets), (lambda client: client._puts, Puts),
    (lambda client: client._shm, ShmPut), (lambda client: client._gets._remote, RemoteReads),
)  # fmt: skip


def is_untouched(client: Client) -> bool:
    """Return whether nothing of the feature is in the way of a client's calls."""
    return (
        all(type(part(client)) is kind for part, kind in PARTS)
        and all(type(target.tcp) in (TcpPath, type(None)) for target in client._router.targets.values())  # type: ignore[union-attr]
        and all(getattr(client, name).__func__ is getattr(Client, name) for name in CALLS)
        and not {*CALLS} & vars(client).keys()
    )


@both_paths
def test_a_client_that_does_not_trace_has_the_functions_of_one_that_cannot(client: Client) -> None:
    assert is_untouched(client)
    client.put("k", VALUE)
    client.trace(1.0)
    assert not is_untouched(client), "the control: tracing is in the way"
    assert client.put("k", VALUE) and client.get("k") == VALUE
    client.trace(None)
    assert is_untouched(client)


def test_the_calls_of_a_client_do_not_mention_tracing() -> None:
    """No branch, no attribute: the code of what a call runs knows nothing of the feature."""
    words = ("trace", "tracing", "span", "operation", "_decision", "CURRENT")
    for owner, names_of in (
        (Client, CALLS), (Gets, ("read", "read_many", "_read_in", "_read_arena")),
        (ShmPut, ("put_one", "put_steps", "_put_runs", "_fill", "_fill_run")),
        (Puts, ("_put_at", "_put_remote", "_ask", "_delete_at")),
        (TcpPath, ("_fetch", "_store", "_exchange", "_call", "statuses")), (RemoteReads, ("read_uncounted", "read")),
    ):  # fmt: skip
        for name in names_of:
            code = getattr(owner, name).__code__
            assert not [each for each in (*code.co_names, *code.co_freevars) if each in words], f"{owner}.{name}"


def test_tracing_again_and_with_other_options(client: Client) -> None:
    for ratio in (1.0, 0.0, 0.5, 1.0):
        client.trace(ratio)
        assert client._decision.ratio == ratio
    client.put("k", b"1")
    client.trace(None)
    client.trace(None)
    assert is_untouched(client)
    client.trace(1.0)
    client.close()
    assert is_untouched_after_close(client)


def is_untouched_after_close(client: Client) -> bool:
    return type(client) is Client and type(client._gets) is Gets


@pytest.mark.parametrize(("given", "says"), [
    ({"trace": "2"}, "0 to 1"), ({"trace": True}, "0 to 1"), ({"trace": "on"}, "0 to 1"), ({"slow_ms": -1}, "slow_ms"),
    ({"slow_ms": "1"}, "slow_ms"), ({"trace_dir": 7}, "trace_dir"),
])  # fmt: skip
def test_options_that_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        FakeClient(**given)


def test_a_ratio_that_cannot_be(client: Client) -> None:
    with pytest.raises(UsageError, match="0 to 1"):
        client.trace(1.5)
    assert is_untouched(client)


def test_a_folder_that_cannot_be_is_refused(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with contextlib.closing(cluster.client("shm", trace="1", trace_dir=str(tmp_path / "file"))) as client:
        assert [text for text in caplog.messages if text.startswith("nothing is traced: ") and "--trace-dir" in text]
        assert is_untouched(client), "an engine starts all the same"
        with pytest.raises(ConfigError, match="--trace-dir"):
            client.trace(1.0)
        assert is_untouched(client)


def test_issue_slow_calls_are_logged_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIMM_SLOW_MS alone wanted one, and a client could not be made without."""
    monkeypatch.setattr(switch, "SLOW", type(switch.SLOW)())
    (tmp_path / "file").write_bytes(b"")
    with FakeClient(slow_ms=1e-6, trace_dir=str(tmp_path / "file")) as client, context(PARENT):
        assert client.put("k", b"1") and client._tracing is not None
        assert client._tracing.folder is None and len(client._decision.recorder) == 0
        assert client.trace(None) is None and type(client) is FakeClient
    assert [text.partition(" of")[0] for text in caplog.messages] == ["slow: put"]


def test_by_options(cluster: FakeCluster, tmp_path: Path) -> None:
    with contextlib.closing(cluster.client("shm", trace=1, trace_dir=str(tmp_path / "t"))) as client:
        assert client.put("k", VALUE)
        other = pickle.loads(pickle.dumps(client))
        assert other._options == client._options
        other.close()
    events, *_ = spool.collect(tmp_path / "t")
    assert "copy" in names(events, "put"), "close() writes what is left"


def test_a_fake_client_traces_and_is_pickled(tmp_path: Path) -> None:
    with FakeClient(trace="1", trace_dir=str(tmp_path / "t")) as client:
        assert client.put("k", b"1") and client.get("k") == b"1"
        made, arguments = client.__reduce__()
        assert made.func is FakeClient and arguments == ()
        assert isinstance(client, FakeClient)
    operations = [event["name"] for event in spool.collect(tmp_path / "t")[0] if event["args"].get("op")]
    assert operations == ["put", "get"]


def test_a_forked_child_records_its_own(tmp_path: Path) -> None:
    with FakeClient(trace=1, trace_dir=str(tmp_path / "t")) as client:
        assert client.put("k", b"1")  # not written yet: the child must not write it as well
        child = os.fork()
        if not child:
            try:
                client.get("k")
                client.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    events, bad, *_ = spool.collect(tmp_path / "t")
    assert not bad and sorted((event["pid"], event["name"]) for event in events if event["args"].get("op")) == sorted([
        (os.getpid(), "put"), (child, "get"),
    ])  # fmt: skip


@pytest.mark.parametrize("ended", [False, True], ids=["goes on before", "goes on after"])
def test_close_waits_for_no_folder_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """A thread is at it. What that thread begins once it can, it ends itself, if close() has not waited for it."""
    hangs, goes_on = threading.Event(), threading.Event()
    real = spool.open_folder

    def hanging(path: Path) -> Path:
        hangs.set()
        goes_on.wait()
        return real(path)

    monkeypatch.setattr(spool, "open_folder", hanging)
    monkeypatch.setattr(calls, "CLOSE_S", 0.01 if ended else 60.0)
    client = FakeClient(trace_dir=str(tmp_path / "t"))
    began = threading.Thread(target=client.trace)
    closing = threading.Thread(target=client.close)
    began.start()
    try:
        assert hangs.wait(60)
        closing.start()
        if ended:
            wait_until(lambda: not closing.is_alive(), "close() has returned")
        else:
            wait_until(lambda: client._tracing is not None and client._tracing._over, "close() is at it")
    finally:
        goes_on.set()
        began.join()
        closing.join()
    assert not switch.traces(client) and not spool.spool_in(tmp_path / "t")._users


# -- servers -------------------------------------------------------------------------------------------------


@both_paths
def test_a_server_that_does_not_know_the_message_is_not_asked(
    client: Client, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins.M.PathBit, "TRACE", 0)
    monkeypatch.setattr(stand_ins, "traced", None)  # the control: it would be called
    client.trace(1.0)
    assert client.put("k", VALUE) and client.get("k") == VALUE
    assert client.put_many(["a", "b"], [VALUE] * 2) == [True] * 2
    events = spans(client)
    assert len(events) > 8 and not names(events, "put", server=True) | names(events, "get", server=True)


@both_paths
@pytest.mark.parametrize("said", [
    [(0, 0, (1 << 64) - 1)] * 3000, [(255, 5, 4)], [(1, (1 << 64) - 1, 0)], [],
], ids=["many", "unknown", "backwards", "none"])  # fmt: skip
def test_what_a_server_says_of_itself_is_bounded(
    client: Client, said: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = stand_ins.named
    monkeypatch.setattr(stand_ins, "named", lambda _: opened(said))
    client.trace(1.0)
    assert client.put("k", VALUE) and client.get("k") == VALUE
    events = spans(client)
    check_trees(events)
    of_server = [event for event in events if event["args"].get("server")]
    assert len(of_server) <= 16 * 4 and {event["name"] for event in of_server} <= {"decode", "other", "publish"}


@both_paths
def test_a_value_of_many_grants_and_commits(client: Client) -> None:
    """The batches that fill the ring, and answers that are waited for out of step."""
    keys = [f"g{number}" for number in range(120)]
    client.trace(1.0)
    for size in (70, 5000, 60_000):
        assert all(client.put_many(keys, [VALUE[:size]] * len(keys)))
        assert client.get_many(keys) == [VALUE[:size]] * len(keys)
    check_trees(spans(client))


@pytest.mark.parametrize("size", [70, 5000, 60_000])
def test_every_copy_of_a_batch_is_noted(client: Client, size: int) -> None:
    """Also those of small values, which are copied in runs once there are grants for a whole frame."""
    keys = [f"n{number}" for number in range(200)]
    for _ in range(3):  # until the pool has grown
        assert all(client.put_many(keys, [VALUE[:size]] * len(keys)))
    client.trace(1.0)
    assert all(client.put_many(keys[:32], [VALUE[:size]] * 32))
    events = spans(client)
    assert {"copy", "post", "answer"} <= names(events, "put")


@pytest.mark.parametrize("name", [name for name in vars(ShmPut) if name.startswith("_fill")])
def test_every_way_of_copying_has_a_traced_form(name: str) -> None:
    inner = {"_fill_apart"}  # a part of _fill
    assert name in inner or name in vars(parts.TracedShmPut)


# -- at run time ---------------------------------------------------------------------------------------------


def test_an_operator_switches_it(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LOOK_S", 0.0)
    folder = tmp_path / "trace"
    spool.ask(folder, "1", 0, 3600.0)
    wait_until(lambda: switch.traces(client), "the client has seen it")
    client.put("k", VALUE)
    spool.end(folder)
    wait_until(lambda: is_untouched(client), "the client has seen the end")
    wait_until(lambda: names(spool.collect(folder)[0], "put") >= {"copy", "commit"}, "and has written what it recorded")


def test_what_an_operator_wants_counts_while_it_is_there(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOOK_S", 0.0)
    client.trace(0.25)
    spool.ask(tmp_path / "trace", "1", 0, 3600.0)
    wait_until(lambda: client._decision.ratio == 1.0, "the operator's")
    client.trace(0.5)
    assert client._decision.ratio == 1.0
    spool.end(tmp_path / "trace")
    wait_until(lambda: client._decision.ratio == 0.5, "the program's again")
    client.trace(None)


def test_garbage_in_the_control_file_changes_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOOK_S", 0.0)
    looked = threading.Event()
    read = spool.Control._read

    def reading(self: spool.Control) -> Any:
        try:
            return read(self)
        finally:
            looked.set()

    monkeypatch.setattr(spool.Control, "_read", reading)
    (tmp_path / "trace").mkdir(mode=0o700)
    (tmp_path / "trace" / "control.json").write_bytes(os.urandom(100))
    assert looked.wait(30.0)
    assert is_untouched(client) and client.put("k", VALUE)


def test_a_client_that_is_looked_after_is_not_kept(tmp_path: Path) -> None:
    client = FakeClient(trace_dir=str(tmp_path))
    look = calls.follow_operator(client)
    look()
    wait_until(functools.partial(getattr, client, "_tracing"), "a thread has looked")
    client.close()
    del client

    def kept() -> list[Any]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is calls.Tracing and each._client() is None]

    wait_until(lambda: not kept(), "the thread has ended")
    look()


def test_issue_nobody_waits_for_a_folder_that_hangs_to_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread of a client that nobody wanted to trace did, and so connected and returned nothing."""
    hangs, goes_on = threading.Event(), threading.Event()
    looking: list[threading.Thread] = []

    def lexists(_path: str) -> bool:
        looking.append(threading.current_thread())
        hangs.set()
        goes_on.wait()
        return False

    monkeypatch.setattr(calls, "LOOK_S", 0.0)
    with FakeClient(trace_dir=str(tmp_path / "t")) as client:
        look = calls.follow_operator(client)
        monkeypatch.setattr("os.path.lexists", lexists)
        try:
            assert ended(look), "it hangs"
            assert hangs.wait(60)
            assert ended(look) and len(looking) == 1, "one is enough"
        finally:
            goes_on.set()
        wait_until(lambda: not looking[0].is_alive(), "it has looked")


def test_issue_what_could_not_begin_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a descriptor at that moment no operator was heard any more, and ``trace(None)`` began to trace."""
    folder = tmp_path / "trace"

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def users() -> int:
        return len(spool.spool_in(folder)._users)

    monkeypatch.setattr(calls, "RETRY_S", 0.0)
    spool.ask(folder, "1", 0, 3600.0)
    with FakeClient(trace_dir=str(folder)) as client:
        tracing = calls._tracing_of(client)
        with monkeypatch.context() as patch:
            patch.setattr("os.scandir", none_left)
            tracing.look()
            tracing.look()
            with pytest.raises(ConfigError, match="Too many open files"):
                client.trace(1.0)
        said = [text for text in caplog.messages if text.startswith("nothing is traced: ")]
        assert len(said) == 1 and not tracing.on and users() == 0
        client.trace(None)
        assert not tracing.on, "who ends tracing does not begin it"
        tracing.look()
        assert tracing.on and users() == 1
        spool.end(folder)
        tracing.look()
        assert not tracing.on and users() == 0
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", none_left)
        client = FakeClient(trace=1, trace_dir=str(folder))
    with client:
        assert not switch.traces(client)
        calls._tracing_of(client).look()
        assert switch.traces(client), "SIMM_TRACE is no wish of a moment"


@pytest.mark.parametrize(("asked", "ms"), [(20, 20), (0, 1000), (5000, 5000)])
def test_issue_an_operators_limit_of_slow_calls_counts(tmp_path: Path, asked: int, ms: int) -> None:
    """The higher one did: a lower limit than the client's own was ignored."""
    with FakeClient(trace_dir=str(tmp_path / "t"), slow_ms=1000) as client:
        spool.ask(tmp_path / "t", "0", asked, 3600.0)
        calls._tracing_of(client).look()
        assert client._decision.slow_ns == ms * 1_000_000


def test_issue_a_handler_that_switches_tracing_meets_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever for the call of the same kind that it had interrupted."""
    with FakeClient(trace_dir=str(tmp_path / "t")) as client:
        assert client.trace(1.0) is not None
        leave = spool.Spool.leave

        def interrupted(mine: spool.Spool, user: object) -> None:
            monkeypatch.setattr(spool.Spool, "leave", leave)
            client.trace(0.5)  # as the handler of a second signal
            leave(mine, user)

        monkeypatch.setattr(spool.Spool, "leave", interrupted)
        assert ended(lambda: client.trace(None)), "it hangs"
        assert client._decision.ratio == 0.5
    assert not spool.spool_in(tmp_path / "t")._users


# -- slow calls ----------------------------------------------------------------------------------------------


def test_a_slow_call_is_logged_with_its_segments(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switch, "SLOW", type(switch.SLOW)())
    client.put("k", VALUE)
    client.trace(0.0, slow_ms=1e-6)
    assert client.get("k") == VALUE
    client.trace(0.0, slow_ms=3_600_000)
    assert client.get("k") == VALUE
    assert spans(client) == [], "it is logged, and not recorded"
    lines = [record.getMessage() for record in caplog.records if record.name == "simm.slow"]
    assert len(lines) == 1
    assert lines[0].startswith("slow: get of 1 key by shm took ") and "locate" in lines[0] and "confirm" in lines[0]


# -- stand-ins -----------------------------------------------------------------------------------------------


def test_a_key_that_is_elsewhere_is_looked_for_at_the_real_worker(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a read asks of its worker must not be asked of a stand-in, which the map does not know."""
    asked: list[type] = []
    real = Gets._one

    def one(self: Gets, read: Any, target: Any, *arguments: Any) -> Any:
        asked.append(type(target))
        return real(self, read, target, *arguments)

    monkeypatch.setattr(Gets, "_one", one)
    monkeypatch.setattr("simm.sdk.reads.PLAIN_BELOW", 0)  # every miss is looked at twice
    client.trace(1.0)
    assert client.get("absent") is None
    assert asked and stand_ins.TimedTarget not in asked
    assert "elsewhere" in names(spans(client), "get")


def test_an_entry_that_changes_is_read_from_a_pin(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put("k", VALUE)
    client.trace(1.0)
    monkeypatch.setattr(stand_ins.TimedReader, "confirm", lambda *_: False)
    assert client.get("k") == VALUE
    assert "pin" in names(spans(client), "get")


def test_a_stand_in_takes_nothing_that_its_original_would_miss(client: Client) -> None:
    client.put("k", b"1")
    (target, *_) = [each for each in client._router.targets.values() if each.session is not None]  # type: ignore[union-attr]
    operation = spans_module.Operation("get", bytes(16), b"", kept=True)
    for made in (stand_ins.TimedReader(target.reader, operation), stand_ins.TimedSession(target.session, operation)):
        with pytest.raises(AttributeError):
            made.broken = "yes"  # type: ignore[union-attr]


def test_the_class_of_a_tracing_path_is_given_back(client: Client) -> None:
    for plain, traced in switch.PARTS.items():
        assert issubclass(traced, plain) and traced.__dictoffset__ == plain.__dictoffset__
    assert issubclass(parts.TracedTcpPath, TcpPath)
