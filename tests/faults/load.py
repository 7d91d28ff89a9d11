"""A client process that puts and gets without end, verifies every byte, and writes down what each call gave and took.

    python -m faults.load '{"manager": ..., "number": 0, "out": FILE, ...}'     runs until its stdin is closed

Its values say what they are at every place (``storm.value_of``), and count: each key has one writer, so no
reader may see a lower count than one it saw before, and the writer none below the last that was acknowledged.
Deleted keys count too: they may be missed, and never come back older than what was put since.

What it says on stdout: ``ready`` once it has stored all its keys, and one line of JSON at the end. Into FILE goes a
numpy array of one row a call (:data:`ROW`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from storm.storm import count_in, value_of

from simm.client import Client

from .fleet import Place, child_environment

GET, PUT, DELETE = range(3)
#: Outcomes. MISS: a get found nothing, a delete nothing to delete. FAILED: a put said False. OUTAGE: a get, exists or
#: delete said "not there" because the server could not be asked.
OK, MISS, FAILED, OUTAGE, WRONG, BACK, RAISED = range(7)
OUTCOMES: Final = ("ok", "miss", "failed", "outage", "wrong", "back", "raised")
#: began: time.monotonic(); took: seconds; key: its number; the call may be one of a batch.
ROW: Final = np.dtype(
    [("began", "f8"), ("took", "f8"), ("kind", "u1"), ("outcome", "u1"), ("key", "u2"), ("epoch", "u4")]
)
SIZES: Final = (2000, 4096, 5000, 16 << 10, 60_000, 200_000)
READY_S: Final = 60.0


def key_of(writer: int, number: int) -> str:
    """A key that only this writer writes."""
    return f"load/{writer}/{number}"


class Load:
    """The client: one thread, one key or one batch at a time."""

    def __init__(
        self, manager: str, number: int, *, seed: int = 0, path: str = "auto", deadline_s: float = 2.0,
        writers: int = 1, keys: int = 40, sizes: Sequence[int] = SIZES, pause_s: float = 0.002, deletes: bool = True,
        out: str = "", wait_s: float = READY_S, batches: bool = True,
    ) -> None:  # fmt: skip
        self.rng = random.Random(f"load {seed} {number}")
        self.number = number
        self.writers = writers
        self.keys = keys
        self.sizes = sizes
        self.pause_s = pause_s
        self.deletes = deletes
        self.batches = batches
        self.out = out
        #: Beyond those of any load before us, whose values may still be there.
        self.count = time.monotonic_ns() // 1000
        #: key -> least count that may be seen.
        self.floor: dict[str, int] = {}
        self.rows: list[tuple[float, float, int, int, int, int]] = []
        self.said: list[str] = []
        self.client = Client(manager, path=path, deadline_s=deadline_s)
        if not self.client.wait_ready(wait_s):
            self.complain(f"not ready: {self.client.stats()}")

    def complain(self, text: str) -> None:
        """Words for the report, the first few."""
        if len(self.said) < 20:
            self.said.append(text)

    def epoch(self) -> int:
        """Of the client's map."""
        router = self.client._router
        return router.epoch if router is not None else 0

    def note(self, began: float, kind: int, outcome: int, number: int) -> None:
        """One call, or one key of a batch, is done."""
        took = time.monotonic() - began
        self.rows.append((began, took, kind, outcome, number, self.epoch()))
        if outcome in (WRONG, BACK, RAISED):
            self.complain(f"{OUTCOMES[outcome]}: {('get', 'put', 'delete')[kind]} of key {number} at {began:.3f}")

    def next_value(self, key: str) -> tuple[int, bytes]:
        """A fresh value of a key of ours, and its count."""
        self.count += 1
        return self.count, value_of(key, self.number, self.count, self.rng.choice(self.sizes))

    # -- calls --------------------------------------------------------------------------------------

    def put(self, number: int) -> None:
        """Put a new value."""
        key = key_of(self.number, number)
        count, value = self.next_value(key)
        began = time.monotonic()
        outcome = OK if self.client.put(key, value) else FAILED
        if outcome == OK:
            self.floor[key] = count
        self.note(began, PUT, outcome, number)

    def put_many(self, numbers: Sequence[int]) -> None:
        """The same for a batch."""
        keys = [key_of(self.number, number) for number in numbers]
        fresh = [self.next_value(key) for key in keys]
        began = time.monotonic()
        stored = self.client.put_many(keys, [value for _, value in fresh])
        for key, number, (count, _), done in zip(keys, numbers, fresh, stored):
            if done:
                self.floor[key] = count
            self.note(began, PUT, OK if done else FAILED, number)

    def delete(self, number: int) -> None:
        """Delete a key of ours."""
        key = key_of(self.number, number)
        outages = self.client.counters["outages"]
        began = time.monotonic()
        gone = self.client.delete(key)
        outcome = OK if gone else OUTAGE if self.client.counters["outages"] > outages else MISS
        if outcome != OUTAGE:
            self.floor[key] = self.count + 1  # what was there must not come back
        self.note(began, DELETE, outcome, number)

    def judge(self, key: str, data: bytes | memoryview) -> int:
        """The outcome of a hit."""
        seen = count_in(key, data)
        if seen < 0:
            self.complain(f"{key}: {len(data)} bytes that are no value of it")
            return WRONG
        least = self.floor.get(key, 0)
        if seen < least:
            self.complain(f"{key}: count {seen}, seen or stored was {least}")
            return BACK
        self.floor[key] = seen
        return OK

    def get(self, writer: int, number: int) -> None:
        """Get any key."""
        key = key_of(writer, number)
        misses = self.client.counters["misses"]
        began = time.monotonic()
        data = self.client.get(key)
        took = time.monotonic()
        if data is None:
            outcome = MISS if self.client.counters["misses"] > misses else OUTAGE
        else:
            outcome = self.judge(key, data)
        self.note(began, GET, outcome, number)
        self.rows[-1] = (began, took - began, *self.rows[-1][2:])  # without the time that verifying takes

    def get_many(self, wanted: Sequence[tuple[int, int]], buffers: Sequence[bytearray]) -> None:
        """The same for a batch. Which of its misses were outages is told from the counters, for all alike."""
        keys = [key_of(*each) for each in wanted]
        outages = self.client.counters["outages"]
        began = time.monotonic()
        results = self.client.get_into_many(keys, list(buffers[: len(keys)]))
        took = time.monotonic() - began
        failed = self.client.counters["outages"] - outages
        for key, (_, number), buffer, got in zip(keys, wanted, buffers, results):
            if got is None:
                outcome = OUTAGE if failed > 0 else MISS
                failed -= 1
            else:
                outcome = self.judge(key, memoryview(buffer)[:got])
            self.note(began, GET, outcome, number)
            self.rows[-1] = (began, took, *self.rows[-1][2:])

    # -- the whole ------------------------------------------------------------------------------------

    def step(self, buffers: Sequence[bytearray]) -> None:
        """One call, chosen by the seed. An exception is what must not come."""
        rng = self.rng
        what = rng.random()
        writer, number = rng.randrange(self.writers), rng.randrange(self.keys)
        began = time.monotonic()
        try:
            if what < 0.45:
                self.get(writer, number)
            elif what < 0.8 or not self.batches:
                self.put(number)
            elif what < 0.88:
                self.put_many(rng.sample(range(self.keys), min(8, self.keys)))
            elif what < 0.96 or not self.deletes:
                wanted = [(rng.randrange(self.writers), rng.randrange(self.keys)) for _ in range(8)]
                self.get_many(wanted, buffers)
            else:
                self.delete(number)
        except Exception as exc:
            self.complain(f"{type(exc).__name__}: {exc}")
            self.note(began, GET if what < 0.45 else PUT, RAISED, number)

    def run(self) -> None:
        """Until stdin is closed."""
        buffers = [bytearray(max(self.sizes)) for _ in range(8)]
        for number in range(self.keys):
            self.put(number)
        print("ready", flush=True)
        poller = select.poll()
        poller.register(0, select.POLLIN | select.POLLHUP)
        while not poller.poll(0):
            self.step(buffers)
            time.sleep(self.pause_s * self.rng.uniform(0.5, 1.5))

    def report(self) -> dict[str, Any]:
        """Save the rows; the rest is for the line on stdout."""
        if self.out:
            np.save(self.out, np.array(self.rows, ROW))
        stats = self.client.stats()
        self.client.close()
        return {"said": self.said, "stats": stats, "count": self.count}


def main() -> int:
    """See the module."""
    load = Load(**json.loads(sys.argv[1]))
    load.run()
    print(json.dumps(load.report()), flush=True)
    return 0


# -- seen by the test ----------------------------------------------------------------------------------


class Records:
    """What some clients did: all their rows, in the order of time."""

    def __init__(self, rows: np.ndarray[Any, Any], said: list[str]) -> None:
        self.rows = rows
        self.said = said

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, begin: float, end: float) -> Records:
        """Calls that began in this piece of time.monotonic()."""
        began = self.rows["began"]
        return Records(self.rows[(began >= begin) & (began < end)], self.said)

    def of(self, *outcomes: int, kind: int | None = None) -> Records:
        """Calls with one of these outcomes."""
        chosen = np.isin(self.rows["outcome"], outcomes)
        if kind is not None:
            chosen &= self.rows["kind"] == kind
        return Records(self.rows[chosen], self.said)

    def count(self, *outcomes: int, kind: int | None = None) -> int:
        """How many."""
        return len(self.of(*outcomes, kind=kind))

    def last_end(self, default: float) -> float:
        """When the last of these calls was over."""
        return float((self.rows["began"] + self.rows["took"]).max()) if len(self.rows) else default

    def longest(self) -> float:
        """The longest call, seconds."""
        return float(self.rows["took"].max()) if len(self.rows) else 0.0

    def quantile(self, part: float) -> float:
        """Of the calls' times, seconds."""
        return float(np.quantile(self.rows["took"], part)) if len(self.rows) else 0.0

    def assert_right(self) -> None:
        """No wrong byte, nothing superseded, no exception, in all of the clients' time."""
        bad = self.of(WRONG, BACK, RAISED)
        assert not len(bad), (len(bad), self.said)

    def summary(self) -> str:
        """For people."""
        parts = [f"{name} {self.count(number)}" for number, name in enumerate(OUTCOMES) if self.count(number)]
        return f"{len(self)} calls: {', '.join(parts)}; longest {self.longest() * 1e3:.0f} ms"


class Process:
    """One load process."""

    def __init__(self, settings: dict[str, Any], place: Place, patches: Sequence[str] = ()) -> None:
        patched = ["faults.patched", *patches, "--"] if patches else []
        self.out = Path(settings["out"])
        self.process = subprocess.Popen(
            place.command([sys.executable, "-m", *patched, "faults.load", json.dumps(settings)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(), start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Until it has stored its keys."""
        assert self.process.stdout is not None
        until = time.monotonic() + READY_S + 10
        readable = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
        line = self.process.stdout.readline() if readable else "nothing"
        assert line == "ready\n", f"a client did not start: {line!r}"

    def end(self) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Its rows and its report."""
        said, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, "a client failed: a cache problem went through to the engine"
        return np.load(self.out), json.loads(said.splitlines()[-1])

    def end_now(self) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Tell it to end; as :meth:`end`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None
        return self.end()

    def kill(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.communicate()
        self.out.unlink(missing_ok=True)


class Clients:
    """Some load processes; ``records()`` ends them and gives what they saw."""

    def __init__(self, clients: Sequence[Process]) -> None:
        self.clients = clients
        #: From now on all keys are there.
        self.ready_at = time.monotonic()
        self.reports: list[dict[str, Any]] = []

    def records(self) -> Records:
        """End all, and merge."""
        for client in self.clients:
            assert client.process.stdin is not None
            client.process.stdin.close()
            client.process.stdin = None
        ended = [client.end() for client in self.clients]
        self.reports = [report for _, report in ended]
        rows = np.concatenate([rows for rows, _ in ended])
        said = [words for report in self.reports for words in report["said"]]
        return Records(rows[np.argsort(rows["began"], kind="stable")], said)


@contextlib.contextmanager
def load(
    manager: str, folder: Path, count: int = 2, *, paths: Sequence[str] = ("auto", "tcp"), places: Sequence[Place] = (),
    patches: Sequence[str] = (), **settings: Any,
) -> Iterator[Clients]:  # fmt: skip
    """``count`` clients at work, each with keys of its own, reading everybody's; killed at the end if still there."""
    started: list[Process] = []
    try:
        for number in range(count):
            out = folder / f"load{os.getpid()}-{number}.npy"
            each = {
                "manager": manager, "number": number, "writers": count, "path": paths[number % len(paths)],
                "out": str(out), **settings,
            }  # fmt: skip
            started.append(Process(each, places[number % len(places)] if places else Place(), patches))
        for client in started:
            client.wait_ready()
        yield Clients(started)
    finally:
        for client in started:
            client.kill()


if __name__ == "__main__":
    sys.exit(main())
