"""Flushes that the store did not take: a thread stores them when it is back, and nobody has to flush again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.connectors import keyspace
from simm.connectors.keyspace import Keyspace
from simm.connectors.mooncake import MooncakeDistributedStore
from simm.testing import FakeClient, FakeStore
from tests.support import fake_sglang, fake_vllm_tier
from tests.support.ended import ended
from tests.support.fake_sglang import Config, Pool, Served
from tests.support.fake_vllm import World
from tests.support.interrupts import Interrupted, everywhere
from tests.support.toy_vllm import Engine
from tests.support.waiting import WAIT_S, wait_until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspace, "_AGAIN_S", 0.01)
    monkeypatch.setattr(keyspace, "_AGAIN_MAX_S", 0.01)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def client(store: FakeStore) -> Iterator[FakeClient]:
    with FakeClient(store=store) as made:
        yield made


def watched(space: Keyspace) -> list[int]:
    """Return a list to which each attempt of a keyspace is added, with what came of it."""
    made: list[int] = []
    spread = space._spread

    def noting() -> tuple[int, bool]:
        found = spread()
        made.append(found[0])
        return found

    space._spread = noting  # type: ignore[method-assign]
    return made


def test_others_follow_a_flush_when_the_store_is_back(
    client: FakeClient, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    attempts = watched(one)
    before = one.generation()
    assert before == other.generation()
    store.unavailable = True
    assert not one.flush_until_seen()
    wait_until(lambda: len(attempts) > 2, "attempts")
    assert set(attempts) == {0} and not caplog.records
    store.unavailable = False
    wait_until(lambda: other.generation() != before, "the flush")
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert other.generation() == one.generation() == f"{attempts[-1]:016x}"
    wait_until(lambda: caplog.records, "the line, which comes behind that")
    (line,) = caplog.records
    assert (line.levelno, line.name) == (logging.WARNING, "simm.connectors") and "follow the flush of a" in line.message
    del attempts[:]
    assert one.flush_until_seen(), "the control"
    wait_until(lambda: one._thread is None, "the end of the looks")
    assert attempts == [one._known] * 2 and len(caplog.records) == 1
    one.close()


def test_attempts_make_no_further_generation(client: FakeClient, store: FakeStore) -> None:
    """What is stored after the flush stays."""
    one = Keyspace(client, "a")
    one.generation()
    store.unavailable = True
    assert not one.flush_until_seen()
    flushed = one.generation()
    store.unavailable = False
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert one.generation() == flushed


def test_a_flush_during_attempts_is_stored_too(client: FakeClient, store: FakeStore) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    attempts = watched(one)
    store.unavailable = True
    assert not one.flush_until_seen()
    wait_until(lambda: attempts, "an attempt")
    assert not one.flush_until_seen()
    store.unavailable = False
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert other.generation() == one.generation() == f"{one._known:016x}"


def test_a_larger_generation_of_another_one_stays(client: FakeClient, store: FakeStore) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    store.unavailable = True
    assert not one.flush_until_seen() and not other.flush()
    store.unavailable = False
    assert other.flush()
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert one.generation() == other.generation() == f"{other._known:016x}"


class Held:
    """Holds the puts of a keyspace's thread from when it is told to, until it is opened."""

    def __init__(self, space: Keyspace) -> None:
        self.put, self.arrived, self.go, self.on = space._put, threading.Event(), threading.Event(), False
        space._put = self  # type: ignore[method-assign]

    def __call__(self, generation: int, **named: Any) -> bool:
        if self.on and threading.current_thread().name == "simm-flush":
            self.arrived.set()
            assert self.go.wait(WAIT_S)
        return self.put(generation, **named)


def test_a_flush_of_another_engine_is_not_undone_for_good(store: FakeStore) -> None:
    """This one's thread has read the generation before it, and stores its own after the other one has looked.

    Both do nothing else. The other one's flush has succeeded.
    """
    with FakeClient(store=store) as here, FakeClient(store=store) as there:
        one, other = Keyspace(here, "a"), Keyspace(there, "a")
        assert one.generation() == other.generation()
        held, spread, go = Held(one), other._spread, threading.Event()

        def later() -> tuple[int, bool]:
            assert go.wait(WAIT_S)
            return spread()

        other._spread = later  # type: ignore[method-assign]
        store.unavailable = True
        assert not one.flush_until_seen()
        held.on = True
        store.unavailable = False
        wait_until(held.arrived.is_set, "the put of the thread")
        assert other.flush_until_seen()
        held.go.set()
        wait_until(lambda: one._thread is None, "the end of the thread")
        assert Keyspace(here, "a").generation() == f"{one._known:016x}" != f"{other._known:016x}", "the control"
        go.set()
        wait_until(lambda: other._thread is None, "the end of the other one's looks")
        assert one.generation() == Keyspace(here, "a").generation() == f"{other._known:016x}"
        one.close()
        other.close()


def test_looks_end_when_two_in_a_row_have_found_the_same(client: FakeClient, store: FakeStore) -> None:
    """Another engine's generation before is stored between them: one that has been seen once is no end."""
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    one.generation()
    before = other.generation()
    found: list[tuple[int, bool]] = []
    spread = one._spread

    def looks() -> tuple[int, bool]:
        found.append(spread())
        if len(found) == 1:
            assert other._put(other._known, absent=False)
        return found[-1]

    one._spread = looks  # type: ignore[method-assign]
    assert one.flush_until_seen()
    wait_until(lambda: one._thread is None, "the end of the looks")
    assert found == [(one._known, there) for there in (True, False, True)]
    assert f"{one._known:016x}" == other.generation() != before
    one.close()


def test_a_flush_is_not_undone_by_what_its_own_engine_still_stores(
    client: FakeClient, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stores the one of the flush before. It puts that right at once, and no flush succeeds before."""
    one = Keyspace(client, "a")
    one.generation()
    held = Held(one)
    store.unavailable = True
    assert not one.flush_until_seen()
    held.on = True
    first = one._known
    store.unavailable = False
    wait_until(held.arrived.is_set, "the put of the thread")
    assert not one.flush_until_seen(), "what is being stored may arrive last"
    second = one._known
    assert Keyspace(client, "a").generation() == f"{second:016x}" != f"{first:016x}"
    monkeypatch.setattr(keyspace, "_AGAIN_S", 1000 * WAIT_S)
    monkeypatch.setattr(keyspace, "_AGAIN_MAX_S", 1000 * WAIT_S)
    stored: list[int] = []
    put = held.put
    held.put = lambda generation, **named: (stored.append(generation), put(generation, **named))[1]  # type: ignore[func-returns-value]
    held.go.set()
    wait_until(lambda: stored == [first, second], "the put of the second one, without a pause")
    wait_until(lambda: Keyspace(client, "a").generation() == f"{second:016x}", "the second one")
    one.close()


def test_a_flush_ends_a_long_pause(client: FakeClient, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspace, "_AGAIN_MAX_S", 1000 * WAIT_S)
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    attempts = watched(one)
    waited: list[float] = []
    wait = one._wake.wait

    def waits(seconds: float) -> bool:
        waited.append(seconds)
        return wait(1000 * WAIT_S if len(waited) == 2 else 0.01)

    monkeypatch.setattr(one, "_wake", SimpleNamespace(wait=waits, set=one._wake.set))
    store.unavailable = True
    assert not one.flush_until_seen()
    wait_until(lambda: len(waited) == 2 and attempts, "the second pause")
    store.unavailable = False
    assert one.flush_until_seen()
    wait_until(lambda: one._thread is None, "the end of the looks")
    assert other.generation() == f"{one._known:016x}"
    assert abs(waited[2] - keyspace._AGAIN_S) <= keyspace._AGAIN_S / 4 != 0.0, "the pauses begin anew"
    assert waited[2] != keyspace._AGAIN_S, "and differ from those of other engines"


def test_issue_a_flush_while_other_threads_end_what_they_store(client: FakeClient) -> None:
    """They end without the lock, and so between two looks at their generations."""
    one = Keyspace(client, "a")

    class Ending(int):
        def __lt__(self, other: object) -> bool:
            one._storing.clear()
            return False

    one._storing = {1: Ending(), 2: Ending()}
    assert one.flush()


def test_issue_an_interrupted_put_keeps_no_flush_of_another_thread_from_success(client: FakeClient) -> None:
    class Interrupting:
        """A lock whose holder is interrupted when it has given it back."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            raise Interrupted

    one = Keyspace(client, "a")
    one.generation()
    lock, one._lock = one._lock, Interrupting()  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        one._store(one._known)
    one._lock = lock
    flushed: list[bool] = []
    assert ended(lambda: flushed.append(one.flush())) and flushed == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_issue_a_thread_that_has_failed_is_replaced(client: FakeClient, store: FakeStore) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    wait = one._wake.wait
    pauses: list[float] = []

    def fails_once(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 1:
            raise SystemExit
        return wait(seconds)

    one._wake = SimpleNamespace(wait=fails_once, set=one._wake.set)  # type: ignore[assignment]
    store.unavailable = True
    assert not one.flush_until_seen()
    thread = one._thread
    assert thread is not None
    wait_until(lambda: not thread.is_alive(), "it has failed")
    assert not one.flush_until_seen() and one._thread is not thread
    store.unavailable = False
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert other.generation() == f"{one._known:016x}"
    one.close()


def test_issue_an_interrupted_start_leaves_no_thread_that_never_looks(client: FakeClient) -> None:
    one = Keyspace(client, "a")
    one._thread = never = threading.Thread()
    assert one.flush_until_seen() and one._thread is not never
    wait_until(lambda: one._thread is None, "the end of the looks")
    one._thread = threading.Thread()
    one.close()


def test_issue_an_interrupted_end_leaves_its_thread_a_thread_that_runs() -> None:
    """Before Python 3.13 an interrupt of ``join`` makes a thread count as ended, and a second one is started."""
    arrived, go = threading.Event(), threading.Event()

    def waits() -> tuple[int, bool]:
        arrived.set()
        assert go.wait(WAIT_S)
        return 0, False

    with FakeClient(deadline_s=0.01) as client:
        one = Keyspace(client, "a")
        one._spread = waits  # type: ignore[method-assign]
        assert one.flush_until_seen() and arrived.wait(WAIT_S)
        thread = one._thread
        assert thread is not None

        def check() -> None:
            assert thread.is_alive()

        try:
            assert everywhere(one.close, check, ("simm.connectors", "simm.host.threads", "threading")) > 3
        finally:
            go.set()
        wait_until(lambda: not thread.is_alive(), "the end of the thread")


def test_a_flush_that_raises_is_stored_too(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("injected")

    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    before = one.generation()
    with monkeypatch.context() as patch:
        patch.setattr(client, "get_digest", fails)
        with pytest.raises(OSError, match="injected"):
            one.flush_until_seen()
    wait_until(lambda: one._thread is None, "the end of the attempts")
    assert other.generation() != before and other.generation() == one.generation()


@pytest.mark.parametrize("how", ["keyspace", "client"])
def test_an_end_ends_the_attempts(store: FakeStore, how: str) -> None:
    with FakeClient(store=store) as mine:
        one = Keyspace(mine, "a")
        store.unavailable = True
        assert not one.flush_until_seen()
        thread = one._thread
        assert thread is not None and thread.is_alive()
        (one if how == "keyspace" else mine).close()
        wait_until(lambda: not thread.is_alive(), "the end of the thread")
        one.close()
        one.close()
        if how == "keyspace":
            assert not one.flush_until_seen() and one._thread is thread, "and none begins"


def test_without_a_thread_the_next_use_stores_it(
    client: FakeClient, store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    before = one.generation()
    store.unavailable = True
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", none)
        assert not one.flush_until_seen()
    assert "until this engine uses SiMM again" in caplog.text and one._thread is None
    store.unavailable = False
    assert other.generation() == before
    assert one.generation() == other.generation() != before


# -- the engines ---------------------------------------------------------------------------------------


def reset_of_a_connector(client: FakeClient, store: FakeStore) -> tuple[Keyspace, Callable[[], None]]:
    engine = Engine(client)
    wait_until(lambda: engine.scheduler._generation, "a generation")
    store.unavailable = True
    engine.scheduler.reset()
    wait_until(lambda: engine.scheduler._generation, "the reading that a reset begins")
    return engine.scheduler._keyspace, engine.close


def reset_of_a_tier(client: FakeClient, store: FakeStore) -> tuple[Keyspace, Callable[[], None]]:
    class Connected:
        def __init__(self, module: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            view = memoryview(fake_vllm_tier.memory())
            self.tier = module.SimmTier(fake_vllm_tier.spec(), view, "SimmTier", client=client)

    with fake_vllm_tier.install() as module:
        tier = Connected(module, World().config(), None).tier
    tier._keyspace.generation()
    store.unavailable = True
    tier.drain_jobs()
    return tier._keyspace, tier.shutdown


def clear_of_sglang(client: FakeClient, store: FakeStore) -> tuple[Keyspace, Callable[[], None]]:
    with fake_sglang.install(Served()) as module:
        backend = module.HiCacheSimm(Config(), {}, client=client)
    backend.register_mem_pool_host(Pool())
    backend._registrar.tell = lambda *_: None
    backend._keyspace.generation()
    store.unavailable = True
    backend.clear()
    return backend._keyspace, backend.close


def remove_all_of_mooncake(client: FakeClient, store: FakeStore) -> tuple[Keyspace, Callable[[], object]]:
    made = MooncakeDistributedStore()
    made.use(client)
    space = made._keys
    assert space is not None and made.put("k", b"before") == 0
    store.unavailable = True
    assert made.remove_all() == -900
    return space, made.close


@pytest.mark.parametrize("begin", [reset_of_a_connector, reset_of_a_tier, clear_of_sglang, remove_all_of_mooncake])
def test_an_idle_engines_reset_reaches_the_others(
    client: FakeClient, store: FakeStore, begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It does nothing after it that would read or store the generation."""
    space, end = begin(client, store)
    known = space._known
    assert "has not reached other engines" in caplog.text
    with FakeClient(store=store) as mine:
        reader = Keyspace(mine, space.scope)
        store.unavailable = False
        wait_until(lambda: int(reader.generation() or "0", 16) >= known, "the generation of the flush")
    end()
    assert space._closed and (space._thread is None or not space._thread.is_alive())
