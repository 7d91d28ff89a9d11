"""A load process of ``simm bench``: a client, its keys and buffers, and the timer around each call.

The command's process sends orders over a pipe, so this process runs nothing but the load. A *burst* runs one
operation, or its floor (``tools/bench/floor.py``), in every thread for a given time.

The timer covers the call as a user writes it, ``client.get_into(key, buffer)`` with a str and a memoryview. It is
``time.perf_counter_ns``, whose own cost the floor pays too. It excludes the work between two calls: taking the next key
and checking the result. Rates are calls per time spent *in calls*. Garbage collection is off during a burst, as in
``timeit``.

With verification, a value contains the digest of its key, its version, its length and a checksum of the rest. The
target row of a get changes in every rotation, so the check finds a read that wrote nothing as well as one that wrote
wrong bytes.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from ...client import Client
from ...errors import SimmError, TransportError
from .floor import QUESTION_BYTES, SLOT_COPY_BYTES, Area, RawStream, copy_many, memmove, stride_of
from .report import OPERATIONS

#: Latencies kept for each thread; beyond that, a random sample of all (Vitter's algorithm R).
SAMPLES_MAX: Final = 1 << 20
#: Bound on the number of keys, so that tiny values do not create millions of Python objects.
KEYS_MAX: Final = 1 << 16
#: Longest warm-up of one operation, seconds. A fast operation goes once round the working set.
WARM_UP_MAX_S: Final = 1.0
READY_S: Final = 10.0

#: Header of a value to verify: digest of its key, version, length, crc32 of the rest.
_STAMP: Final = struct.Struct("<16sQII")
_VERSION_AT: Final = 16
#: The version after a put whose outcome is unknown.
_UNKNOWN: Final = -1

#: A call's number (its first key's position in the rotation) and its arguments.
Call = tuple[int, tuple[Any, ...]]


def key_name(run: str, size: int, thread: int, number: int) -> str:
    """Return a key in the engines' format: a hash in hex with a rank."""
    return hashlib.sha256(f"{run}/{size}/{thread}/{number}".encode()).hexdigest() + "_0_k"


def mark_of(key: str) -> bytes:
    """Return the digest that identifies a value's key."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class Samples:
    """Latencies in nanoseconds: all of them, or a uniform sample of SAMPLES_MAX."""

    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.values = array("q", bytes(8 * SAMPLES_MAX))
        self.count = 0

    def replace_one(self, value: int) -> None:
        """Record a value beyond SAMPLES_MAX, so that every value is kept with the same probability."""
        self.count += 1
        position = random.randrange(self.count)
        if position < SAMPLES_MAX:
            self.values[position] = value

    def take(self) -> tuple[int, bytes]:
        """Return (number of values, the values kept) and start over."""
        count, self.count = self.count, 0
        return count, self.values[: min(count, SAMPLES_MAX)].tobytes()


class LoadThread:
    """A thread's keys and rows, and its calls of each operation on them.

    ``index`` numbers the threads of all processes. The thread has ``rows`` rows of ``size`` bytes from ``first`` on.
    """

    def __init__(self, load: Load, index: int, first: int, rows: int, size: int, batches: dict[str, int]) -> None:
        self.load = load
        self.size = size
        #: Keys per call of each batch operation.
        self.batches = batches
        self.verify = load.verify
        self.keys = [key_name(load.run, size, index, number) for number in range(rows)]
        self.absent = [key_name(load.run + "/absent", size, index, number) for number in range(rows)]
        self.sources = load.source.rows(first, rows, size)
        self.targets = load.target.rows(first, rows, size)
        self._from = load.source.addresses(first, rows, size)
        self._to = load.target.addresses(first, rows, size)
        self._shared = load.shared.addresses(first, rows, size) if load.shared is not None else []
        self.order = list(range(rows))
        random.Random(f"{load.run}/{size}/{index}").shuffle(self.order)
        self.samples = load.samples[index % len(load.samples)]
        self._supplies: dict[tuple[str, bool], Iterator[Call]] = {}
        #: The version last stored, by row.
        self.stored = [0] * rows
        self._version = 0
        self._touched: set[int] = set()
        self.wrong = 0
        self.last_error = ""
        if self.verify:
            for row, key in zip(self.sources, self.keys):
                stamp(row, key)

    # -- calls --------------------------------------------------------------------------------------

    def supply(self, op: str, floor: bool) -> Iterator[Call]:
        """Return an endless iterator of calls, which continues where the last burst stopped."""
        found = self._supplies.get((op, floor))
        if found is None:
            calls = self._floor_calls(op) if floor else self._calls(op)
            found = self._supplies[op, floor] = calls
        return found

    def _calls(self, op: str) -> Iterator[Call]:
        kind, many, _ = OPERATIONS[op]
        keys, rows, batch = self.keys, len(self.keys), self.batches.get(op, 1)
        questions = [(self.absent if number & 1 else keys)[number] for number in range(rows)]
        for shift in itertools.count(1):
            targets = self.targets[shift % rows :] + self.targets[: shift % rows]
            for number in range(0, rows - batch + 1, batch) if many else self.order:
                part = slice(number, number + batch) if many else number
                if kind == "put":
                    yield number, (keys[part], self.sources[part])
                elif kind == "get":
                    yield number, (keys[part], targets[part])
                else:
                    yield number, ((questions if kind == "ask" else keys)[part],)

    def _floor_calls(self, op: str) -> Iterator[Call]:
        raw = self.load.raw is not None
        rows, size, batch = len(self.keys), self.size, self.batches.get(op, 1)
        kind, many, _ = OPERATIONS[op]
        views = self.sources if kind == "put" else self.targets
        into, source = (self._shared, self._from) if kind == "put" else (self._to, self._shared)
        if kind == "ask":
            size = min(size, SLOT_COPY_BYTES)
        for shift in itertools.count(1):
            # The operation's rows rotate against the arena's. So must these: two areas that are always copied at the
            # same offset are slower, because of the memory's banks.
            turned = [] if raw else into[shift % rows :] + into[: shift % rows]
            for number in range(0, rows - batch + 1, batch) if many else self.order:
                part = slice(number, number + batch) if many else number
                if not raw:
                    yield number, (turned[part], source[part], size)
                else:
                    yield number, () if kind == "ask" else (views[part],)

    def function(self, op: str) -> Callable[..., Any]:
        """Return the function that a call of ``op`` runs."""
        return self._view if op == "view" else getattr(self.load.client, OPERATIONS[op].method)

    def _view(self, key: str) -> int:
        with self.load.client.view(key) as view:
            return len(view.data)

    # -- judging ------------------------------------------------------------------------------------

    def judge(self, op: str, number: int, arguments: tuple[Any, ...], result: Any) -> int:
        """Return the number of keys that a call did not serve. Counts wrong bytes in ``wrong``."""
        kind, many, _ = OPERATIONS[op]
        results = result if many else (result,)
        if kind == "put":
            for at, stored in enumerate(results, number):
                self._note_put(at, bool(stored))
            return len(results) - sum(map(bool, results))
        if kind == "get":
            if self.verify:
                for at, (length, row) in enumerate(zip(results, arguments[1] if many else arguments[1:]), number):
                    if length is not None:
                        self._check(at, length, row)
            return int(results.count(None))
        if kind == "view":
            if result and self.verify:
                with self.load.client.view(arguments[0]) as view:
                    if view:
                        self._check(number, len(view), view.data)
            return 0 if result else 1
        missing = 0
        for at, there in enumerate(results, number):
            missing += not at & 1 and not there
            if at & 1 and there:
                self._complain(f"exists is true for key {self.absent[at]}, which was never stored")
        return missing

    def _note_put(self, number: int, stored: bool) -> None:
        if self.verify:
            self.stored[number] = self._version if stored else _UNKNOWN
            self._touched.add(number)

    def _check(self, number: int, length: int, data: memoryview) -> None:
        why = fault(data[:length], self.keys[number], self.size, self.stored[number])
        if why:
            self._complain(f"key {self.keys[number]}: {why}")

    def _complain(self, text: str) -> None:
        self.wrong += 1
        self.last_error = text

    def before_puts(self) -> None:
        """Make the next puts store a new version, for verification."""
        self._version += 1
        if self.size >= _STAMP.size:
            for row in self.sources:
                struct.pack_into("<Q", row, _VERSION_AT, self._version)

    def read_back(self) -> int:
        """Check the values that the last burst put and return the number of missing ones."""
        missing = 0
        touched, self._touched = sorted(self._touched), set()
        for number in touched:
            row = self.targets[(number + 1) % len(self.targets)]
            length = self.load.client.get_into(self.keys[number], row)
            if length is None:
                missing += 1
            else:
                self._check(number, length, row)
        return missing

    # -- bursts -------------------------------------------------------------------------------------

    def burst(self, op: str, floor: bool, seconds: float, counted: bool) -> dict[str, int]:
        """Call ``op`` for ``seconds`` and return the counts. A warm-up (not ``counted``) uses every row."""
        operation = OPERATIONS[op]
        puts, many = operation.kind == "put", operation.many
        stream: RawStream | None = None
        per_call = self.batches.get(op, 1)
        if not floor:
            function = self.function(op)
            if self.verify and puts:
                self.before_puts()
        elif self.load.raw is not None:
            kind = "get" if operation.kind == "view" else operation.kind
            stream = RawStream(self.load.raw, kind, QUESTION_BYTES * per_call if kind == "ask" else self.size)
            function = {
                "put": stream.put_many if many else stream.put, "get": stream.get_many if many else stream.get,
                "ask": stream.ask,
            }[kind]  # fmt: skip
        else:
            function = copy_many if many else memmove
        least = 2 if counted else -(-len(self.keys) // per_call)
        clock = time.perf_counter_ns
        samples, values, judge = self.samples[floor], self.samples[floor].values, self.judge
        calls = busy = bad = 0
        began = clock()
        until = began + int(seconds * 1e9)
        limit = began + int(max(seconds, WARM_UP_MAX_S) * 1e9)
        for number, arguments in self.supply(op, floor):
            start = clock()
            result = function(*arguments)
            end = clock()
            calls += 1
            busy += end - start
            if counted:
                if samples.count < SAMPLES_MAX:
                    values[samples.count] = end - start
                    samples.count += 1
                else:
                    samples.replace_one(end - start)
            if not floor:
                bad += judge(op, number, arguments, result)
            if end >= until and (calls >= least or end >= limit):
                break
        if stream is not None:
            start = clock()
            stream.finish()
            busy += clock() - start if stream.kind == "put" else 0
        if self.verify and not floor and puts:
            bad += self.read_back()
        return {"calls": calls, "keys": calls * per_call, "busy_ns": busy, "bad": bad}


def stamp(row: memoryview, key: str) -> None:
    """Write the header into a value. A value that is too short gets a part of its key's digest."""
    if len(row) < _STAMP.size:
        row[:] = (mark_of(key) * 2)[: len(row)]
        return
    _STAMP.pack_into(row, 0, mark_of(key), 0, len(row), zlib.crc32(row[_STAMP.size :]))


def fault(data: memoryview, key: str, size: int, version: int) -> str:
    """Return what is wrong with a value, or an empty string. ``version`` -1 accepts any version."""
    if len(data) != size:
        return f"{len(data)} bytes instead of {size}"
    mark = mark_of(key)
    if size < _STAMP.size:
        return "" if data == (mark * 2)[:size] else "another key's bytes"
    found, number, length, crc = _STAMP.unpack_from(data)
    if found != mark:
        return "another key's bytes"
    if length != size or zlib.crc32(data[_STAMP.size :]) != crc:
        return "torn: its checksum does not match its bytes"
    if version not in (number, _UNKNOWN):
        return f"version {number} instead of {version}"
    return ""


class Load:
    """The client and the threads of a load process, driven by :func:`serve_load`.

    Args:
        client: keyword arguments of the Client.
        run: name of this run, part of all its keys.
        threads, first: number of threads, and the index of the first one.
        all_threads: number of threads of all processes.
        working_set: bytes that all threads together rotate over.
        verify: check values.
        raw: address of the raw socket's remote side, None without one.
    """

    def __init__(
        self, *, client: dict[str, Any], run: str, threads: int, first: int, all_threads: int, working_set: int,
        verify: bool, raw: tuple[str, int] | None,
    ) -> None:  # fmt: skip
        self.run = run
        self.threads = threads
        self.first = first
        self.all_threads = all_threads
        self.share = working_set // all_threads * threads
        self.verify = verify
        self.client = Client(**client)
        if not self.client.wait_ready(READY_S):
            raise TransportError(f"the cluster is not ready: {self.trouble()}")
        self.paths = sorted({worker["path"] for worker in self.client.stats()["workers"]})
        self.raw = raw if "tcp" in self.paths else None
        self.source = Area(self.share)
        self.source.fill()
        self.target = Area(self.share)
        self.target.fill()
        self.shared: Area | None = None
        if self.raw is None:
            self.shared = Area(self.share, shared=True)
            self.shared.fill()
        self.samples = [(Samples(), Samples()) for _ in range(threads)]
        self.members: list[LoadThread] = []

    def trouble(self) -> str:
        """Return why the cluster cannot be used."""
        workers = self.client.stats()["workers"]
        down = [f"{each['node']}/{each['worker']}: {each['why']}" for each in workers if each["path"] == "down"]
        return "; ".join(down) or ("some shards have no owner" if workers else "no data server has joined it")

    def prepare(self, size: int, batches: dict[str, int]) -> dict[str, Any]:
        """Set threads up for values of ``size`` bytes and store them all. A batch has at most half the keys."""
        rows = min(KEYS_MAX // self.all_threads, self.share // self.threads // stride_of(size))
        if rows < 1:
            raise SimmError(
                f"the working set has no room for a value of {size} bytes in each of {self.all_threads} threads: "
                "raise --working-set"
            )
        batches = {op: max(1, min(batch, rows // 2)) for op, batch in batches.items()}
        self.members = [LoadThread(self, self.first + i, i * rows, rows, size, batches) for i in range(self.threads)]
        failed = 0
        for member in self.members:
            step = max(1, min(512, (32 << 20) // size))
            for at in range(0, rows, step):
                stored = self.client.put_many(member.keys[at : at + step], member.sources[at : at + step])
                failed += stored.count(False)
        if failed:
            raise SimmError(f"{failed} of {rows * self.threads} values of {size} bytes could not be stored")
        gc.collect()
        gc.freeze()  # so that a collection before each burst skips all keys and rows
        return {"rows": rows, "batches": batches}

    def burst(self, op: str, floor: bool, seconds: float, counted: bool, at: int) -> dict[str, Any]:
        """Run a burst in every thread, from ``at`` (CLOCK_MONOTONIC, ns) on."""
        results: list[dict[str, int]] = []
        errors: list[BaseException] = []

        def body(member: LoadThread) -> None:
            try:
                time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
                results.append(member.burst(op, floor, seconds, counted))
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=body, args=(member,)) for member in self.members]
        gc.collect()
        gc.disable()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.enable()
        if errors:
            raise errors[0]
        wrong = sum(member.wrong for member in self.members)
        return {"threads": results, "wrong": wrong, "error": next((x.last_error for x in self.members if x.wrong), "")}

    def latencies(self, floor: bool) -> dict[str, Any]:
        """Return for each thread the number of calls measured and the latencies kept, and start over."""
        return {"threads": [samples[floor].take() for samples in self.samples]}

    def discard(self) -> dict[str, Any]:
        """Delete the keys of this size."""
        for member in self.members:
            self.client.delete_many(member.keys)
        self.members = []
        gc.unfreeze()
        return {}


def serve_load(pipe: Connection, settings: dict[str, Any]) -> None:
    """Run a load process: answer each order on the pipe until the order ``end``, or until it closes."""
    try:
        load = Load(**settings)
    except (SimmError, OSError, MemoryError) as exc:
        pipe.send({"failed": str(exc) or type(exc).__name__})
        return
    pipe.send({"paths": load.paths})
    with load.client:
        while True:
            what, order = pipe.recv()
            if what == "end":
                pipe.send({"client": load.client.stats()})
                return
            try:
                pipe.send(getattr(load, what)(**order))
            except (SimmError, OSError) as exc:
                pipe.send({"failed": str(exc)})
