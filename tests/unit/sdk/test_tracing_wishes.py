"""What a client is to trace: wishes within wishes, interrupted ones, and those that fail for a moment."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.errors import ConfigError
from simm.sdk.calls import tracing as calls
from simm.sdk.tracing import switch
from simm.testing import FakeClient
from simm.tracing import slow, spool
from simm.tracing.context import context
from tests.support.interrupts import everywhere
from tests.support.waiting import wait_until

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def client(folder: Path) -> Iterator[FakeClient]:
    with FakeClient(trace_dir=str(folder)) as made:
        yield made


def users(folder: Path) -> int:
    return len(spool.spool_in(folder)._users)


def interrupted(
    patch: pytest.MonkeyPatch, owner: object, name: str, handler: Callable[[], object], *, after: bool
) -> None:
    """Let a handler run before or after the next call of a function, within the call that made it."""
    real = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        patch.setattr(owner, name, real)
        if not after:
            handler()
        result = real(*arguments)
        if after:
            handler()
        return result

    patch.setattr(owner, name, call)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["switch_off", "leave", "join", "switch_on"])
@pytest.mark.parametrize("then", [None, 0.5])
def test_issue_the_last_wish_counts(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: bool, then: float | None
) -> None:
    """A handler within a call that ended tracing began it, unseen: nothing ended it any more. Others counted twice."""
    ends = name in ("switch_off", "leave")
    if ends:
        client.trace(1.0)
    owner = switch if name.startswith("switch") else spool.Spool
    interrupted(monkeypatch, owner, name, lambda: client.trace(then), after=after)
    client.trace(None if ends else 1.0)
    assert switch.traces(client) is (then is not None) and users(folder) == (then is not None)
    assert then is None or client._decision.ratio == then
    client.trace(None)
    assert not switch.traces(client) and users(folder) == 0


@pytest.mark.parametrize("name", ["join", "switch_on"])
def test_tracing_that_ends_within_its_beginning_ends(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    close = calls._tracing_of(client).close
    interrupted(monkeypatch, switch if name == "switch_on" else spool.Spool, name, close, after=True)
    assert client.trace(1.0) is None
    assert not switch.traces(client) and users(folder) == 0 and spool.spool_in(folder)._thread is None


def test_what_fails_and_is_not_wanted_any_more_is_no_failure(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_path: Path) -> Any:
        client.trace(None)
        raise ConfigError("no folder")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "open_folder", fails)
        assert client.trace(1.0) is None
    assert not switch.traces(client) and users(folder) == 0
    assert client.trace(1.0) == folder


def test_issue_an_interrupted_beginning_leaves_no_user(client: FakeClient, folder: Path) -> None:
    """The thread that writes never ended."""

    def check() -> None:
        client.trace(None)
        assert not switch.traces(client) and users(folder) == 0 and spool.spool_in(folder)._thread is None

    modules = ("simm.sdk.calls.tracing", "simm.tracing.spool", "simm.sdk.tracing.switch")
    assert everywhere(lambda: client.trace(1.0), check, modules) > 20


def test_issue_an_interrupted_end_is_made_again(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool was forgotten before it was told, and nobody told it any more."""

    def check() -> None:
        client.trace(None)
        assert not switch.traces(client) and users(folder) == 0
        wait_until(lambda: not any(each.name == "simm-trace" for each in threading.enumerate()), "nobody writes")
        client.trace(1.0)

    monkeypatch.setattr(spool, "WRITE_S", 0.05)
    client.trace(1.0)
    modules = ("simm.sdk.calls.tracing", "simm.tracing.spool", "simm.sdk.tracing.switch")
    assert everywhere(lambda: client.trace(None), check, modules) > 10


@pytest.mark.parametrize("before", [None, 1.0])
def test_issue_the_next_look_puts_right_what_an_interrupted_call_left(
    client: FakeClient, folder: Path, before: float | None
) -> None:
    """Ctrl-C left a client that traced though tracing was off, or recorded nothing though it was on, for good."""
    other = None if before else 1.0

    def check() -> None:
        calls._tracing_of(client).look()
        wanted = calls._tracing_of(client)._options.trace != "off"
        assert switch.traces(client) == wanted and users(folder) == wanted
        client.trace(before)

    client.trace(before)
    modules = ("simm.sdk.calls.tracing", "simm.tracing.spool", "simm.sdk.tracing.switch")
    assert everywhere(lambda: client.trace(other), check, modules) > 10


def test_issue_a_failure_that_is_over_keeps_nobody_from_looking(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed once kept a client from hearing an operator for ten seconds, though it traced meanwhile."""
    tracing = calls._tracing_of(client)
    tracing._failed(OSError("as once"))
    client.trace(0.5)
    spool.ask(folder, "1", 0, 3600.0)
    tracing.look()
    assert client._decision.ratio == 1.0


def test_issue_a_wish_outlives_the_call_that_it_came_in(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a call put back the options before it, also over those that its handler had asked for."""

    def handler() -> None:
        client.trace(0.5)
        raise KeyboardInterrupt

    client.trace(1.0)
    interrupted(monkeypatch, spool.Spool, "leave", handler, after=True)
    with pytest.raises(KeyboardInterrupt):
        client.trace(None)
    calls._tracing_of(client).look()
    assert switch.traces(client) and client._decision.ratio == 0.5 and users(folder) == 1


def test_issue_nobody_gets_the_error_of_another_wish(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no folder")

    monkeypatch.setattr(calls, "RETRY_S", 0.0)
    client.trace(1.0)
    interrupted(monkeypatch, spool.Spool, "leave", lambda: client.trace(0.5), after=True)
    with monkeypatch.context() as patch:
        patch.setattr(spool.Spool, "join", fails)
        assert client.trace(None) is None
    assert "no folder" in caplog.text
    calls._tracing_of(client).look()
    assert switch.traces(client) and client._decision.ratio == 0.5 and users(folder) == 1


def test_issue_a_child_forked_while_another_thread_begins_to_trace_traces(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the spool, which did not know of it: no thread wrote."""
    tracing = calls._tracing_of(client)
    spool.ask(folder, "1", 0, 3600.0)
    seen: list[bool] = []

    def forked(_folder: Path, **_: object) -> int:
        monkeypatch.undo()  # the rest happens in the child
        tracing.after_fork()
        tracing.look()
        seen.append(switch.traces(client) and users(folder) == 1 and spool.spool_in(folder)._thread is not None)
        return 0

    monkeypatch.setattr(spool, "forget_oldest", forked)
    tracing.look()
    assert seen == [True]


# -- what an operator wants --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AttributeError("no such part"), RuntimeError("no threads"), MemoryError()])
def test_issue_an_operators_wish_outlives_any_failure(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:  # fmt: skip
    """It counted as done, and its traceback was on stderr."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(calls, "RETRY_S", 0.0)
    spool.ask(folder, "1", 0, 3600.0)
    tracing = calls._tracing_of(client)
    with monkeypatch.context() as patch:
        patch.setattr(switch, "switch_on", fails)
        tracing.look()
        tracing.look()
    assert [text for text in caplog.messages if text.startswith("nothing is traced")] == [
        f"nothing is traced: {str(error) or 'MemoryError'}"
    ]
    tracing.look()
    assert switch.traces(client) and users(folder) == 1
    spool.end(folder)
    tracing.look()
    assert not switch.traces(client) and users(folder) == 0


def test_issue_a_client_that_is_being_made_is_not_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its router's thread looked before it had the parts that tracing changes, and the wish was lost."""
    connect = FakeClient._connect

    def looked_at(client: FakeClient, *arguments: Any) -> Any:
        calls._look(weakref.ref(client))
        assert client._tracing is None
        return connect(client, *arguments)

    monkeypatch.setattr(FakeClient, "_connect", looked_at)
    spool.ask(folder, "1", 0, 3600.0)
    with FakeClient(trace_dir=str(folder)) as client:
        assert not caplog.records
        calls._look(weakref.ref(client))
        assert switch.traces(client)


# -- slow calls alone --------------------------------------------------------------------------------


def test_issue_a_slow_call_names_no_trace_that_is_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With slow calls alone nothing is recorded, yet the line named the caller's trace as if its spans were there."""
    monkeypatch.setattr(switch, "SLOW", slow.SlowLog())
    with FakeClient(slow_ms=1e-6, trace_dir=str(folder)) as client, context(PARENT):
        assert client.put("k", b"1")
        client.trace(0.0, slow_ms=1e-6)
        assert client.put("k", b"1")
    alone, recorded = caplog.messages
    assert "trace" not in alone and PARENT.split("-")[1] in recorded


def test_issue_a_child_that_is_forked_while_tracing_ends_writes_no_more(
    client: FakeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client counted as a user of the spool, which it had forgotten, so the thread that writes never ended."""
    tracing = calls._tracing_of(client)
    seen: list[int] = []

    def fork() -> None:
        tracing.after_fork()
        seen.append(users(folder))
        raise KeyboardInterrupt  # nothing of what the parent's thread does next is done in the child

    client.trace(1.0)
    interrupted(monkeypatch, spool.Spool, "leave", fork, after=False)
    with pytest.raises(KeyboardInterrupt):
        client.trace(None)
    assert seen == [0]
    tracing.look()
    client.trace(None)
