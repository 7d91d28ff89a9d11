"""A storm of what engines ask beyond put and get, all at once, while the worker is killed.

Each of some threads has a namespace of its own, two clients by different paths, and its own numbers for what it puts
(``tests.support.values``). In random order it puts, overwrites and deletes pages, groups of two and kept values, and
reads them by the other client: whole, in ranges, pinned, and after it has advanced the epoch. The arena is half of
what their keys would take, so living values are evicted, not only those of earlier epochs. What is counted:

* ``wrong``: bytes that are of no one put, a range of another put than the rest, a pinned value that has changed, a
  count that the key has never had, or one of before an ``advance`` that has returned.
* ``lost``: a hard kept value that is a miss before its time, though its server answered, and does not come back. It
  may miss for a moment: a client that has not heard of an advance yet looks for it under the old epoch.
* ``orphaned``: bytes of groups at the end of which one member is missing, of ``grouped`` bytes of all that are there.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from simm.client import Client
from simm.errors import SimmError, UsageError
from simm.sdk.local_cluster import LocalCluster
from tests.support.values import count_in, value_of
from tests.support.waiting import wait_until
from tests.system.stress.stress import BACK_S, Server

KIB: Final = 1 << 10
SIZES: Final = (4 * KIB, 20 * KIB, 64 * KIB, 200 * KIB)
HEAD: Final = 32
KEPT: Final = 6
KEYS: Final = 150
GROUPS: Final = 120


class Engine:
    """One thread's clients, and what it knows of its values. Run :meth:`run` in a thread."""

    #: A kept value that is not read for so long is lost, seconds.
    back_s = BACK_S

    def __init__(self, manager: str, token: str, number: int, seed: int, paths: tuple[str, str]) -> None:
        self.number = number
        self._draw = random.Random(seed * 1000 + number)
        self._writer, self._reader = (
            Client(manager, token=token, namespace=f"engine-{number}", path=path, deadline_s=3.0) for path in paths
        )
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        #: By key the last number that may be stored, and the least that may be read since the last advance.
        self._last: dict[str, int] = {}
        self._least = 1
        self._next = 1
        self._kept: dict[str, int] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        """Do operations in random order until ``stop``."""
        try:
            if not (self._writer.wait_ready(BACK_S) and self._reader.wait_ready(BACK_S)):
                raise AssertionError("the cluster is not ready")
            calls = (
                (self.put, 8), (self.get, 8), (self.ranges, 4), (self.pin, 3), (self.put_group, 5), (self.get_group, 4),
                (self.keep, 2), (self.look_at_kept, 3), (self.gather, 2), (self.delete, 1),
            )  # fmt: skip
            kinds, weights = zip(*calls)
            while not self.stop.is_set():
                if self._draw.random() < 0.004:
                    self.advance()
                call = self._draw.choices(kinds, weights)[0]
                call()
                self.counts[call.__name__] += 1
        except BaseException as exc:
            self.errors.append(exc)

    def close(self) -> None:
        """Close both clients."""
        self._writer.close()
        self._reader.close()

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


def storm(
    seconds: float, kills: int, *, seed: int, engines: int = 4, memory: str = "24M", kind: type[Engine] = Engine,
    needs: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Run a storm; return what was counted, over all engines. It goes on until all that it ``needs`` was counted."""
    paths = (("shm", "tcp"), ("tcp", "shm"), ("shm", "shm"), ("tcp", "tcp"))
    with LocalCluster(memory=memory) as cluster:
        server = Server(cluster)
        made = [kind(cluster.manager, cluster.token, each, seed, paths[each % 4]) for each in range(engines)]
        threads = [threading.Thread(target=engine.run, name=f"engine-{engine.number}") for engine in made]
        try:
            for thread in threads:
                thread.start()
            for _ in range(kills):
                time.sleep(seconds / (kills + 1))
                server.kill()
            time.sleep(seconds / (kills + 1))
            wait_until(lambda: _has_all(made, needs), lambda: f"not all of {needs}: {[each.counts for each in made]}")
        finally:
            for engine in made:
                engine.stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        try:
            total: Counter[str] = Counter()
            for engine in made:
                if engine.errors:
                    raise engine.errors[0]
                total += engine.counts
                orphaned, there = engine.groups_left()
                total["orphaned"] += orphaned
                total["grouped"] += there
        finally:
            for engine in made:
                engine.close()
        return dict(total)
