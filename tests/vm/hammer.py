"""A thread that reads and writes without end while things break, and sees every rule that is broken.

* A value is whole and right, or it is a miss.
* A call returns within the client's deadline, and raises nothing.
* After a call has returned, its buffer is not written any more: each is poisoned then, and looked at again when
  several other calls have come and gone, and at the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Final

import numpy as np

from simm.client import Client

from .world import data

POISON: Final = 0xEE
#: Buffers that are watched at a time, for each way of passing memory.
WATCHED: Final = 4
#: What the emulator may add to a deadline, seconds: a processor of it may stand still for a while.
GRACE_S: Final = 5.0
SIZES: Final = (300, 5000, 70_000, 600_000, 2_500_000)


def value(key: str) -> bytes:
    """Each key has one value for ever."""
    size = SIZES[sum(key.encode()) % len(SIZES)]
    return data(size, key)


class Hammer(threading.Thread):
    """``with Hammer(client, "name") as hammer: ...``; :meth:`check` afterwards raises AssertionError."""

    def __init__(self, client: Client, name: str, *, keys: int = 10, puts: bool = True) -> None:
        super().__init__(name=name)
        self.client = client
        self.keys = [f"{name} {number}" for number in range(keys)]
        self.values = {key: value(key) for key in self.keys}
        self.puts = puts
        self.hits = self.misses = self.stored = self.refused = 0
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self._end = threading.Event()
        size = max(map(len, self.values.values()))
        self._buffers = deque(np.full(size, POISON, np.uint8) for _ in range(2 * WATCHED))
        self._spans = {id(buffer): client.register(buffer) for number, buffer in enumerate(self._buffers) if number % 2}

    def __enter__(self) -> Hammer:
        for key in self.keys:
            self.client.put(key, self.values[key])
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()

    @property
    def calls(self) -> int:
        """So far."""
        return self.hits + self.misses + self.stored + self.refused

    def run(self) -> None:
        rng = random.Random(self.name)
        try:
            while not self._end.is_set():
                key = rng.choice(self.keys)
                if self.puts and rng.random() < 0.4:
                    self._put(key)
                else:
                    self._get(key)
        except BaseException as exc:
            self.wrong.append(f"a call raised {exc!r}")

    def _timed(self, began: float, what: str) -> None:
        took = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, took)
        if took > self.client.deadline_s + GRACE_S:
            self.wrong.append(f"{what} took {took:.1f} s")

    def _put(self, key: str) -> None:
        began = time.monotonic()
        if self.client.put(key, self.values[key]):
            self.stored += 1
        else:
            self.refused += 1
        self._timed(began, "put")

    def _get(self, key: str) -> None:
        buffer = self._buffers.popleft()
        self._look(buffer)
        began = time.monotonic()
        got = self.client.get_into(key, self._spans.get(id(buffer), buffer))
        self._timed(began, "get_into")
        if got is None:
            self.misses += 1
        else:
            self.hits += 1
            right = np.frombuffer(self.values[key], np.uint8)
            if got != len(right) or not np.array_equal(buffer[:got], right):
                self.wrong.append(f"{key}: {got} bytes that are not its value")
        buffer[:] = POISON
        self._buffers.append(buffer)

    def _look(self, buffer: np.ndarray) -> None:
        if (buffer != POISON).any():
            self.wrong.append("a buffer was written after the call had returned")
            buffer[:] = POISON

    def wait_calls(self, more: int = 10, timeout_s: float = 60.0) -> None:
        """Until that many more calls have returned: it is not stuck."""
        wanted, until = self.calls + more, time.monotonic() + timeout_s
        while self.calls < wanted:
            assert not self.wrong, self.wrong[:5]
            assert time.monotonic() < until, f"{self.name} hangs after {self.calls} calls"
            time.sleep(0.02)

    def check(self) -> None:
        """After the end."""
        for buffer in self._buffers:
            self._look(buffer)
        assert not self.wrong, self.wrong[:5]
        assert self.hits > 0
        for span in self._spans.values():
            self.client.deregister(span)

    def __str__(self) -> str:
        return (
            f"{self.calls} calls: {self.hits} hits, {self.misses} misses, {self.stored} stored, {self.refused} not; "
            f"the slowest took {self.slowest_s:.2f} s"
        )
