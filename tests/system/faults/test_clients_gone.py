"""Clients killed, or stopped and continued, in each phase of a put, while they hold a grant and a pin.

``put_phases`` is the client. It stops itself in the phase, so no test has to be lucky to find it there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from simm.client import Client
from simm.wire.messages import Status
from tests.support.child import Child, module_command
from tests.support.fleet import Fleet, Server
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.values import count_in, value_of
from tests.support.waiting import WAIT_S, wait_until
from tests.system.faults.put_phases import PHASES

MIB = 1 << 20
#: A dead client's grants and pins are free again within this time, seconds.
FREE_S = 2.0
PINNED = value_of("pinned", 1, 1, 5000)
#: Values that others store meanwhile: together more than the arena holds.
FILL_KEYS = 90
#: Grants of 1 MiB that a client has besides the one it writes into. An arena of 64 MiB grants 8 MiB.
IDLE = 4
_numbers = itertools.count()


def holds(server: Server) -> tuple[int, int, int, int]:
    """Return grants, pins, granted bytes and free bytes of a server's worker."""
    stats = server.worker_stats()
    return stats["grants"], stats["pins"], stats["granted_bytes"], stats["free_bytes"]


def nothing_of_theirs(server: Server) -> bool:
    """Return True if the stream's session is the only one, and it holds less than one value of these tests."""
    grants, pins, granted, _ = holds(server)
    return pins == 0 and (grants == 0 or granted < MIB) and server.worker_stats()["sessions"] == 1


class Nursery:
    """Starts clients of one worker: ``nursery("half", MIB)`` returns the pid of one that has stopped there, its key."""

    def __init__(self, process: Child) -> None:
        self._process = process

    def __call__(self, phase: str, size: int, idle: int = 0) -> tuple[int, str]:
        """Start one, which has ``idle`` grants more than it needs."""
        key = f"gone/{next(_numbers)}"
        said = self._process.ask({"phase": phase, "key": key, "size": size, "pinned": "pinned", "idle": idle})
        pid: int = said["pid"]
        wait_until(lambda: state_of(pid) == "T", f"client {pid} has stopped")
        return pid, key

    def ended(self) -> dict[str, Any]:
        """Return what the next client that comes to its end says."""
        said: dict[str, Any] = self._process.answer()
        return said


@contextlib.contextmanager
def nursery_of(server: Server) -> Iterator[Nursery]:
    words = module_command("tests.system.faults.put_phases", server.uds())
    with Child(words, name="clients", talks=True) as process:
        yield Nursery(process)


@pytest.fixture
def nursery(lone: Fleet) -> Iterator[Nursery]:
    with nursery_of(lone.servers[0]) as made:
        yield made


def state_of(pid: int) -> str:
    """Return a process's state as proc(5) has it, "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def put_pinned(lone: Fleet) -> None:
    with Client(lone.manager.address, path="shm", deadline_s=20.0) as filler:
        assert filler.put("pinned", PINNED)


@pytest.mark.fault("F04", ci=1, whole=100)
def test_a_client_killed_in_each_phase_of_a_put(
    lone: Fleet, nursery: Nursery, amount: int
) -> None:
    """Its grant and its pin are free soon, and every byte is back."""
    server = lone.servers[0]
    put_pinned(lone)
    wait_until(lambda: server.worker_stats()["sessions"] == 1, "there is the stream's session alone")
    before = holds(server)  # the stream may keep grants for its next clients
    slowest: dict[str, float] = {}
    kept: list[str] = []
    gone: list[tuple[str, str, int]] = []
    with Pace() as pace:
        for number, phase in itertools.product(range(amount), PHASES):
            size = random.Random(number).choice((100, 5000, MIB, 3 * MIB + 100))
            pid, key = nursery(phase, size)
            held = holds(server)
            # The positive control: at this moment something is held that must come back.
            assert held[1] == 1 and (held[0] > before[0] or phase in ("posted", "committed")), (phase, held)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: holds(server)[:3] == before[:3], f"what was held, {phase}, is free", pause_s=0.002)
            slowest[phase] = max(slowest.get(phase, 0.0), time.monotonic() - killed)
            gone.append((phase, key, size))
    with Client(lone.manager.address, path="shm", deadline_s=20.0) as reader:
        for phase, key, size in gone:
            value = reader.get(key)
            assert value is None or value == value_of(key, 1, 1, size), (phase, key)
            assert (value is not None) == (phase == "committed") or phase == "posted" or amount > 1, phase
            if value is not None:
                kept.append(key)
        assert reader.get("pinned") == PINNED
        reader.delete_many(kept)
    wait_until(lambda: holds(server) == before, lambda: f"all bytes are free: {holds(server)}, before {before}")
    for phase, took in slowest.items():
        pace.check(f"client killed in a put, {phase}: grants and pins free after", took, FREE_S, kills=amount)
    empty(lone)


def empty(lone: Fleet) -> None:
    """Leave no value."""
    with Client(lone.manager.address, path="shm", deadline_s=20.0) as cleaner:
        assert cleaner.delete("pinned")
    wait_until(lambda: lone.servers[0].worker_stats()["entries"] == 0, "no value is left")


@pytest.mark.fault("F05", ci=1, whole=50)
def test_a_client_stopped_in_each_phase_of_a_put(lone: Fleet, nursery: Nursery, amount: int) -> None:
    """While it is stopped others use all room there is. Then it goes on.

    What it holds stays its own: the late write reaches no other key, and the pinned bytes are as they were. So the
    worker may accept the commit, and does: it has given the chunk to nobody else.
    """
    server = lone.servers[0]
    rng = random.Random(5)
    for number in range(amount):
        put_pinned(lone)
        stopped = [nursery(phase, MIB) for phase in PHASES[:4]]
        with stopped_meanwhile(stopped):
            stored = fill(lone, rng)
            if number:
                time.sleep(rng.choice((0.001, 0.03, 1.0, 5.0, 30.0, 120.0)) if number % 10 == 0 else 0.001)
            held = holds(server)
            assert held[1] == len(stopped) and held[2] >= 3 * MIB, "what they hold is theirs"
        said = [nursery.ended() for _ in stopped]
        assert all(each["pinned"] for each in said), said
        assert [each["status"] for each in said] == [Status.OK] * len(stopped), said
        with Client(lone.manager.address, path="shm", deadline_s=20.0) as reader:
            for (_, key), phase in zip(stopped, PHASES):
                value = reader.get(key)
                assert value == value_of(key, 1, 1, MIB) or (value is None and phase == "posted"), (key, phase)
            assert_right(reader, stored)
        wait_until(lambda: nothing_of_theirs(server), "all is given back")
        empty_all(lone, [*stored, *(key for _, key in stopped), "pinned"])
    measured("clients stopped in a put, and continued when all room had been used", 4 * amount, "clients", "0 wrong")


@pytest.mark.fault("F05", ci=1, whole=20)
@pytest.mark.parametrize("phase", PHASES[:3])
def test_a_stopped_client_from_which_grants_are_recalled(
    lone: Fleet, nursery: Nursery, amount: int, phase: str
) -> None:
    """It reads the recall when it goes on. It returns idle grants, and keeps the one that it writes into."""
    server = lone.servers[0]
    rng = random.Random(7)
    for _ in range(amount):
        put_pinned(lone)
        stopped = [nursery(phase, MIB, IDLE)]
        with stopped_meanwhile(stopped):
            stored = fill(lone, rng)
            assert holds(server)[2] >= (1 + IDLE) * MIB, "nobody takes them from a client that does not answer"
        said = nursery.ended()
        assert said["recalled"] > 0 and said["returned"] > 0, (said, "others wanted what it held")
        assert said["status"] == Status.OK and said["pinned"], said
        (_, key), = stopped
        with Client(lone.manager.address, path="shm", deadline_s=20.0) as reader:
            assert reader.get(key) == value_of(key, 1, 1, MIB)
            assert_right(reader, stored)
        wait_until(lambda: nothing_of_theirs(server), "all is given back")
        empty_all(lone, [*stored, key, "pinned"])


def end_grants_by_time() -> None:
    """Make a worker take grants from who does not answer a recall, for ``tests.support.patched call=``."""
    from simm.arena.sessions import Session, SessionTable

    recall = SessionTable._recall

    def hasty(table: SessionTable, asking: Session, chunk: int) -> None:
        recall(table, asking, chunk)
        for session in [each for each in table.by_id.values() if each.silent and each is not asking]:
            table.return_grants(session, list(session.grants))

    SessionTable._recall = hasty  # type: ignore[method-assign]


def test_control_grants_that_end_by_time(make_fleet: Callable[..., Fleet]) -> None:
    """A worker that does not wait for a stopped client: the late write is seen in another key, the commit refused."""
    fleet = make_fleet(1, patches=[f"call={__name__}:end_grants_by_time"])
    rng = random.Random(8)
    with nursery_of(fleet.servers[0]) as nursery:

        def hurts_somebody() -> bool:
            """Return whether it has: the others' last values may have left just this chunk free."""
            put_pinned(fleet)
            stopped = [nursery("granted", MIB, IDLE)]
            with stopped_meanwhile(stopped):
                stored = fill(fleet, rng)
            said = nursery.ended()
            assert said["status"] == Status.STALE_GRANT, said
            with Client(fleet.manager.address, path="shm", deadline_s=20.0) as reader:
                try:
                    assert_right(reader, stored)
                except AssertionError as exc:
                    return "has been written to" in str(exc)
            return False

        wait_until(hurts_somebody, "a late write is seen", 3 * WAIT_S)
    with Client(fleet.manager.address, path="shm", deadline_s=20.0) as reader:
        reader.delete_many([*(f"fill/{number}" for number in range(FILL_KEYS)), "pinned"])


@contextlib.contextmanager
def stopped_meanwhile(stopped: list[tuple[int, str]]) -> Iterator[None]:
    """Continue the clients at the end, whatever ends it."""
    try:
        yield
    finally:
        for pid, _ in stopped:
            os.kill(pid, signal.SIGCONT)


def fill(lone: Fleet, rng: random.Random) -> dict[str, int]:
    """Put three times as much as the arena holds, of several sizes; return the lengths of what was stored last."""
    stored = {}
    server = lone.servers[0]
    evicted = sum(server.worker_stats()["evictions"].values())
    with Client(lone.manager.address, path="shm", deadline_s=20.0) as writer:
        for number in range(3 * 64):
            key = f"fill/{number % FILL_KEYS}"
            length = rng.choice((MIB, MIB, 2 * MIB, 100_000))
            if writer.put(key, value_of(key, 2, number, length)):
                stored[key] = length
    assert sum(server.worker_stats()["evictions"].values()) > evicted, "there is no room that is not in use"
    return stored


def assert_right(reader: Client, stored: dict[str, int]) -> None:
    """Every value that is there is one of its key, whole."""
    hits = 0
    for key in stored:
        value = reader.get(key)
        if value is not None:
            assert count_in(key, value) >= 0, f"{key} has been written to"
            hits += 1
    assert hits > 5


def empty_all(lone: Fleet, keys: list[str]) -> None:
    with Client(lone.manager.address, path="shm", deadline_s=20.0) as cleaner:
        cleaner.delete_many(keys)
    wait_until(lambda: lone.servers[0].worker_stats()["entries"] == 0, "no value is left")


@pytest.mark.fault("F05", ci=1, whole=50)
def test_a_stopped_clients_commit_after_its_worker_has_died(
    lone: Fleet, nursery: Nursery, amount: int
) -> None:
    """Its grant is another worker's, which refuses it: nothing appears under its key, and no other key changes."""
    server = lone.servers[0]
    rng = random.Random(6)
    for _ in range(amount):
        put_pinned(lone)
        stopped = [nursery(phase, MIB) for phase in PHASES[:3]]
        with stopped_meanwhile(stopped):
            pid = server.worker_pid()
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(worker_is_another, server, pid), "another worker")
            stored = fill(lone, rng)
            assert holds(server)[2] >= 3 * MIB, "their grants are quarantined"
        said = [nursery.ended() for _ in stopped]
        assert [each["status"] for each in said] == ["broken"] * 3 and all(each["pinned"] for each in said), said
        with Client(lone.manager.address, path="shm", deadline_s=20.0) as reader:
            assert reader.get_many([key for _, key in stopped]) == [None] * 3
            assert_right(reader, stored)
        wait_until(lambda: nothing_of_theirs(server), "all is given back")
        empty_all(lone, [*stored, "pinned"])


def worker_is_another(server: Server, pid: int) -> bool:
    try:
        return server.worker_pid() != pid
    except Exception:
        return False


def test_control_a_late_write_into_a_chunk_that_was_given_away_is_seen() -> None:
    """The judge of these tests: a value that somebody else has written into is no value."""
    value: Any = bytearray(value_of("fill/1", 2, 7, 100_000))
    assert count_in("fill/1", bytes(value)) == 7
    value[50_000:50_100] = value_of("gone/1", 1, 1, MIB)[600_000:600_100]
    assert count_in("fill/1", bytes(value)) == -1
