"""A storm of what engines ask beyond put and get, all at once, while workers are killed.

Each of some threads has a namespace of its own, two clients by different paths, and its own numbers for what it puts
(``tests.support.values``). In random order it puts, overwrites and deletes pages, groups of two, kept values and values
in parts, and reads them by the other client: whole, in ranges, pinned, and after it has advanced the epoch. There are
two data servers, each of which stands for a host: a third client is on one of them, and reads and prefetches values
that never change by near copies. The arenas are half of what all keys would take, so living values are evicted, not
only those of earlier epochs. What is counted:

* ``wrong``: bytes that are of no one put, a range of another put than the rest, a pinned value that has changed, a
  count that the key has never had, or one of before an ``advance`` that has returned.
* ``lost``: a hard kept value that is a miss before its time, though its server answered, and does not come back. It
  may miss for a moment: a client that has not heard of an advance yet looks for it under the old epoch.
* ``orphaned``: bytes of groups at the end of which one member is missing, of ``grouped`` bytes of all that are there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import pytest

from simm.client import Client
from simm.errors import SimmError, UsageError
from simm.host.buffers import Ranges
from tests.support.fleet import Fleet, Server
from tests.support.processes import new_folder
from tests.support.several_hosts import HostClient, separate
from tests.support.small_limits import small_limits
from tests.support.values import count_in, value_of
from tests.support.waiting import wait_until
from tests.system.stress.stress import BACK_S

KIB: Final = 1 << 10
SIZES: Final = (4 * KIB, 20 * KIB, 64 * KIB, 200 * KIB)
HEAD: Final = 32
KEPT: Final = 6
KEYS: Final = 150
GROUPS: Final = 120
#: Keys of values in parts, their sizes, and from which size on a value is in parts here.
LARGE: Final = 5
LARGE_SIZES: Final = (300 * KIB, 500 * KIB)
LARGE_FROM: Final = 256 * KIB
#: Of the values that never change, those that are read.
ONCE: Final = 40
#: Missed heartbeats, a second each, until a server counts as dead: its values would be lost for good reason.
DEAD_AFTER: Final = 120


class Engine:
    """One thread's clients, and what it knows of its values. Run :meth:`run` in a thread."""

    #: A kept value that is not read for so long is lost, seconds.
    back_s = BACK_S

    def __init__(self, manager: str, home: str, number: int, seed: int, paths: tuple[str, str]) -> None:
        self.number = number
        self._draw = random.Random(seed * 1000 + number)
        namespace = f"engine-{number}"
        self._writer, self._reader = (
            Client(manager, namespace=namespace, path=path, deadline_s=3.0) for path in paths
        )
        self._far = HostClient(home, manager, namespace=namespace, near_copies=True, deadline_s=3.0)
        #: Keys of values that never change, the newest last.
        self._once: deque[str] = deque(maxlen=ONCE)
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        #: By key the last number that may be stored, and the least that may be read since the last advance.
        self._last: dict[str, int] = {}
        self._least = 1
        self._next = 1
        self._kept: dict[str, int] = {}
        #: By the bytes of a value, memory for it and ranges that read it.
        self._ready: dict[int, tuple[bytearray, Ranges]] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        """Do operations in random order until ``stop``."""
        try:
            if not all(client.wait_ready(BACK_S) for client in (self._writer, self._reader, self._far)):
                raise AssertionError("the cluster is not ready")
            calls = (
                (self.put, 8), (self.get, 8), (self.ranges, 4), (self.pin, 3), (self.put_group, 5), (self.get_group, 4),
                (self.keep, 2), (self.look_at_kept, 3), (self.gather, 2), (self.delete, 1), (self.put_large, 1),
                (self.get_large, 2), (self.ready, 3), (self.put_once, 3), (self.get_once, 6), (self.prefetch, 1),
                (self.ask, 2),
            )  # fmt: skip
            kinds, weights = zip(*calls)
            while not self.stop.is_set():
                if self._draw.random() < 0.004:
                    self.advance()
                call = self._draw.choices(kinds, weights)[0]
                call()
                self.counts[call.__name__] += 1
                self.counts["near hits"] = self._far.counters["near_hits"]
                self.counts["in parts"] = self._writer.counters["large"]
        except BaseException as exc:
            self.errors.append(exc)

    def close(self) -> None:
        """Close all clients."""
        for client in (self._writer, self._reader, self._far):
            client.close()

    # -- values ---------------------------------------------------------------------------------

    def _new(self, key: str, size: int) -> bytes:
        """Return the next value of a key."""
        number, self._next = self._next, self._next + 1
        self._last[key] = number
        return value_of(key, self.number, number, size)

    def _size(self) -> int:
        return self._draw.choice(SIZES)

    def _check(self, key: str, data: bytes | None) -> bool:
        """Count a value that was read. Return True for a hit."""
        if data is None:
            self.counts["misses"] += 1
            return False
        self.counts["hits"] += 1
        if not self._least <= count_in(key, data) <= self._last.get(key, 0):
            self.counts["wrong"] += 1
        return True

    def _key(self) -> str:
        return f"page {self._draw.randrange(KEYS)}"

    # -- operations -----------------------------------------------------------------------------

    def put(self) -> None:
        key = self._key()
        self._writer.put(key, self._new(key, self._size()))

    def gather(self) -> None:
        key = self._key()
        value = self._new(key, self._size())
        cut = self._draw.randrange(1, len(value))
        self._writer.put_gather(key, [value[:cut], value[cut:]])

    def get(self) -> None:
        key = self._key()
        self._check(key, self._draw.choice((self._writer, self._reader)).get(key))

    def delete(self) -> None:
        self._writer.delete(self._key())

    def ranges(self) -> None:
        """Read a value in three ranges, which are of one put."""
        key = self._key()
        head, middle, rest = bytearray(HEAD), bytearray(1000), bytearray(max(SIZES))
        ranges = [(0, HEAD, head), (HEAD, 1000, middle)]
        length = self._reader.get_ranges(key, ranges)
        if length is None:
            return
        more = [(0, HEAD, head), (HEAD, 1000, middle), (HEAD + 1000, length - HEAD - 1000, rest)]
        try:
            again = self._reader.get_ranges(key, more)
        except UsageError:  # it has been replaced by a shorter one
            return
        if again == length:
            self._check(key, bytes(head + middle + rest[: length - HEAD - 1000]))

    def ready(self) -> None:
        """Read the same prepared ranges of many values, some of them pinned: those of that size."""
        size = self._size()
        if size not in self._ready:
            room = bytearray(size)
            view = memoryview(room)
            ranges = [(at, min(KIB, size - at), view[at : at + KIB]) for at in range(0, size, KIB)]
            self._ready[size] = room, self._reader.prepare_ranges(ranges)
        room, prepared = self._ready[size]
        keys = list({self._key() for _ in range(5)})
        with self._reader.pin(keys[:2]) as pins:
            for at, key in enumerate(keys):
                try:
                    got = pins.get_ranges(at, prepared) if at < len(pins) else self._reader.get_ranges(key, prepared)
                except UsageError:  # it is a shorter one
                    continue
                if got == size:
                    self._check(key, bytes(room))
                    self.counts["prepared"] += 1

    def pin(self) -> None:
        """Read pinned values again after their keys have got others."""
        keys = list({self._key() for _ in range(5)})
        with self._reader.pin(keys) as pins:
            heads = [bytearray(HEAD) for _ in keys]
            seen = [pins.get_ranges(at, [(0, HEAD, head)]) for at, head in enumerate(heads)]
            for key in keys[:3]:
                self._writer.put(key, self._new(key, self._size()))
            for at, (key, length) in enumerate(zip(keys, seen)):
                whole = bytearray(length or 1)
                if length is None or pins.get_ranges(at, [(0, length, whole)]) is None:
                    continue
                if self._check(key, bytes(whole)) and whole[:HEAD] != heads[at]:
                    self.counts["wrong"] += 1

    def put_group(self) -> None:
        name = self._draw.randrange(GROUPS)
        keys = [f"{{{name}}}k", f"{{{name}}}v"]
        stored = self._writer.put_group(keys, [self._new(key, self._size()) for key in keys])
        self.counts["groups stored"] += stored

    def get_group(self) -> None:
        name = self._draw.randrange(GROUPS)
        keys = [f"{{{name}}}k", f"{{{name}}}v"]
        if self._reader.exists_groups([keys])[0]:
            for key, data in zip(keys, self._reader.get_many(keys)):
                self._check(key, data)

    def keep(self) -> None:
        key = f"kept {self._draw.randrange(KEPT)}"
        value = self._new(key, 64 * KIB)
        if self._writer.put(key, value, ttl=3600, keep="hard"):
            self._kept[key] = self._last[key]
        elif self._draw.random() < 0.3:
            self._writer.keep([self._key()], ttl=1, how="soft")

    def look_at_kept(self) -> None:
        for key in self._kept:
            client = self._draw.choice((self._writer, self._reader))
            until = time.monotonic() + self.back_s
            while not self._check(key, client.get(key)):
                if time.monotonic() > until:
                    self.counts["lost"] += 1
                    break
                time.sleep(0.01)

    def put_large(self) -> None:
        key = f"large {self._draw.randrange(LARGE)}"
        self.counts["large stored"] += self._writer.put(key, self._new(key, self._draw.choice(LARGE_SIZES)))

    def get_large(self) -> None:
        """Read a value in parts: as a whole, in ranges, or pinned."""
        key = f"large {self._draw.randrange(LARGE)}"
        how = self._draw.randrange(3)
        if how == 0:
            hit = self._check(key, self._reader.get(key))
        else:
            length = self._draw.choice(LARGE_SIZES)
            head, rest = bytearray(HEAD), bytearray(length - HEAD)
            ranges = [(0, HEAD, head), (HEAD, length - HEAD, rest)]
            try:
                if how == 1:
                    got = self._reader.get_ranges(key, ranges)
                else:
                    with self._reader.pin([key]) as pins:
                        got = pins.get_ranges(0, ranges)
            except UsageError:  # it is the shorter one
                return
            hit = got == length and self._check(key, bytes(head + rest))
        self.counts["large hits"] += hit

    def put_once(self) -> None:
        """Put a value under a key that never gets another one, as near copies want."""
        key = f"once {self._next}"
        if self._writer.put(key, self._new(key, self._size())):
            self._once.append(key)

    def get_once(self) -> None:
        if self._once:
            key = self._draw.choice(self._once)
            self._check(key, self._far.get(key))

    def prefetch(self) -> None:
        self._far.prefetch([*self._once])

    def ask(self) -> None:
        """Ask for many keys. No answer is wrong: what is stored changes meanwhile."""
        keys = [*(f"page {number}" for number in range(KEYS)), *self._once]
        assert len(self._reader.exists_many(keys)) == len(keys)
        assert self._reader.load_ms(keys) >= 0.0

    def advance(self) -> None:
        before = self._next
        self._kept.clear()
        try:
            self._writer.advance(timeout_s=BACK_S)
        except SimmError as exc:  # it may have come about; the next one makes it certain
            self.counts[f"advance: {type(exc).__name__}"] += 1
            return
        self._least = before
        self.counts["advanced"] += 1

    def groups_left(self) -> tuple[int, int]:
        """Return the bytes of groups that are not whole, and of all members that are there."""
        orphaned = there = 0
        for name in range(GROUPS):
            sizes = [len(data) for data in self._writer.get_many([f"{{{name}}}k", f"{{{name}}}v"]) if data is not None]
            there += sum(sizes)
            orphaned += sum(sizes) if len(sizes) == 1 else 0
        return orphaned, there


def _has_all(engines: Sequence[Engine], needs: Sequence[str]) -> bool:
    """Return whether each of these was counted by some engine, or one has failed."""
    return any(each.errors for each in engines) or all(any(each.counts[name] for each in engines) for name in needs)


def kill(server: Server) -> None:
    """Kill the worker of a data server, and wait for its successor."""
    pid = server.worker_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.succeeded(pid), "the worker has a successor")


def storm(
    seconds: float, kills: int, *, seed: int, engines: int = 4, memory: str = "16M", kind: type[Engine] = Engine,
    needs: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Run a storm; return what was counted, over all engines. It goes on until all that it ``needs`` was counted.

    ``memory``: of each of two servers.
    """
    paths = (("shm", "tcp"), ("tcp", "shm"), ("shm", "shm"), ("tcp", "tcp"))
    dead_after = ("--dead-after", str(DEAD_AFTER))
    with (
        pytest.MonkeyPatch.context() as patch,
        small_limits(LARGE_FROM, LARGE_FROM // 4),
        Fleet(new_folder(), 2, memory=memory, manager_arguments=dead_after) as fleet,
        contextlib.ExitStack() as stack,
    ):
        separate(patch)
        made: list[Engine] = []
        for number in range(engines):
            home = fleet.servers[number % 2].name
            made.append(kind(fleet.manager.address, home, number, seed, paths[number % 4]))
            stack.callback(made[-1].close)
        threads = [threading.Thread(target=engine.run, name=f"engine-{engine.number}") for engine in made]
        try:
            for thread in threads:
                thread.start()
            for number in range(kills):
                time.sleep(seconds / (kills + 1))
                kill(fleet.servers[number % 2])
            time.sleep(seconds / (kills + 1))
            wait_until(lambda: _has_all(made, needs), lambda: f"not all of {needs}: {[each.counts for each in made]}")
        finally:
            for engine in made:
                engine.stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        total: Counter[str] = Counter()
        for engine in made:
            if engine.errors:
                raise engine.errors[0]
            total += engine.counts
            orphaned, there = engine.groups_left()
            total["orphaned"] += orphaned
            total["grouped"] += there
        return dict(total)
