"""One load process of ``simm bench``: a client, its keys and buffers, and the clock around each call.

The command's process tells it what to do by JSON over a pipe, so that nothing but the load runs here: no progress
line, no table. A *burst* runs one operation, or its floor (``bench_floor.py``), for a while in every thread.

What is timed is the call as a user writes it, ``client.get_into(key, buffer)`` with a str and a memoryview, by
``time.perf_counter_ns`` (some 50 ns are the clock's own; the floor pays them too). What happens between two
calls (taking the next key, judging the result) is not timed, and rates are calls per time spent *in calls*.
The garbage collector rests during a burst, as in ``timeit``.

Values describe themselves when they are to be verified: digest of the key, version, length, checksum of the rest.
A get's target row is another one in every rotation, so a read that wrote nothing is found as surely as one that
wrote wrong bytes.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import random
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from .bench_floor import QUESTION_BYTES, SLOT_COPY_BYTES, Area, RawStream, copy_many, memmove, stride_of
from .client import Client
from .errors import SimmError, TransportError

#: Latencies kept of each thread's calls; beyond, a random sample of all (Vitter's algorithm R).
SAMPLES_MAX: Final = 1 << 20
#: Keys at once, so that tiny values do not mean millions of Python objects.
KEYS_MAX: Final = 1 << 16
#: Longest warm-up of one operation, seconds: a rotation over the working set, but not of a slow one.
WARM_UP_MAX_S: Final = 1.0
READY_S: Final = 10.0

SINGLES: Final = ("put", "get", "exists", "view")
BATCHES: Final = ("mput", "mget", "mexists")
OPS: Final = ("put", "get", "exists", "mput", "mget", "mexists", "view")

#: Head of a value that describes itself: digest of its key, version, length, crc32 of the rest.
_STAMP: Final = struct.Struct("<16sQII")
_VERSION_AT: Final = 16
#: A version that nobody knows, as the put's outcome is unknown.
_UNKNOWN: Final = -1

#: A call's number (its first key's position in the rotation) and its arguments.
Call = tuple[int, tuple[Any, ...]]


def key_name(run: str, size: int, thread: int, number: int) -> str:
    """A key as engines make them: a hash in hex with a rank."""
    return hashlib.sha256(f"{run}/{size}/{thread}/{number}".encode()).hexdigest() + "_0_k"


def mark_of(key: str) -> bytes:
    """What a value says whose it is."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class Samples:
    """Latencies in nanoseconds: all of them, or a uniform sample of SAMPLES_MAX."""

    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.values = array("q", bytes(8 * SAMPLES_MAX))
        self.count = 0

    def replace_one(self, value: int) -> None:
        """Take a value in beyond SAMPLES_MAX: each of all values is kept with the same probability."""
        self.count += 1
        position = random.randrange(self.count)
        if position < SAMPLES_MAX:
            self.values[position] = value

    def take(self) -> tuple[int, bytes]:
        """(how many were measured, those kept), and begin anew."""
        count, self.count = self.count, 0
        return count, self.values[: min(count, SAMPLES_MAX)].tobytes()


class Lane:
    """One thread's share: keys, rows, and how each operation is called on them.

    ``index`` counts the lanes of all processes; ``rows`` rows of ``size`` bytes from ``first`` on are this lane's.
    """

    def __init__(self, load: Load, index: int, first: int, rows: int, size: int, batches: dict[str, int]) -> None:
        self.load = load
        self.size = size
        #: Keys in a call of each operation on many.
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
        #: Of each row: the version last stored.
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
        """Endless calls; the rotation goes on where it stood at the last burst."""
        found = self._supplies.get((op, floor))
        if found is None:
            calls = self._floor_calls(op) if floor else self._batches(op) if op in BATCHES else self._singles(op)
            found = self._supplies[op, floor] = calls
        return found

    def _singles(self, op: str) -> Iterator[Call]:
        keys, rows = self.keys, len(self.keys)
        for shift in itertools.count(1):
            for number in self.order:
                if op == "put":
                    yield number, (keys[number], self.sources[number])
                elif op == "get":
                    yield number, (keys[number], self.targets[(number + shift) % rows])
                elif op == "exists":
                    yield number, ((self.absent if number & 1 else keys)[number],)
                else:
                    yield number, (keys[number],)

    def _batches(self, op: str) -> Iterator[Call]:
        keys, rows, batch = self.keys, len(self.keys), self.batches[op]
        starts = list(range(0, rows - batch + 1, batch))
        mixed = [(self.absent if number & 1 else keys)[number] for number in range(rows)]
        for shift in itertools.count(1):
            targets = self.targets[shift % rows :] + self.targets[: shift % rows]
            for first in starts:
                chosen = slice(first, first + batch)
                if op == "mput":
                    yield first, (keys[chosen], self.sources[chosen])
                elif op == "mget":
                    yield first, (keys[chosen], targets[chosen])
                else:
                    yield first, (mixed[chosen],)

    def _floor_calls(self, op: str) -> Iterator[Call]:
        raw = self.load.raw is not None
        rows, size, batch = len(self.keys), self.size, self.batches.get(op, 1)
        single = op in SINGLES
        views = self.sources if op in ("put", "mput") else self.targets
        into, source = (self._shared, self._from) if op in ("put", "mput") else (self._to, self._shared)
        if op in ("exists", "mexists"):
            size = min(size, SLOT_COPY_BYTES)
        for shift in itertools.count(1):
            # As the operation's own rows turn against the arena's: two areas copied at one and the same offset
            # throughout are a tenth slower here, for reasons that lie in the memory's banks.
            turned = [] if raw else into[shift % rows :] + into[: shift % rows]
            for number in self.order if single else range(0, rows - batch + 1, batch):
                part = slice(number, number + batch)
                if not raw:
                    if single:
                        yield number, (turned[number], source[number], size)
                    else:
                        yield number, (turned[part], source[part], size)
                elif op in ("exists", "mexists"):
                    yield number, ()
                else:
                    yield number, (views[number] if single else views[part],)

    def function(self, op: str) -> Callable[..., Any]:
        """What a call of ``op`` is."""
        client = self.load.client
        functions: dict[str, Callable[..., Any]] = {
            "put": client.put, "get": client.get_into, "exists": client.exists, "view": self._view,
            "mput": client.put_many, "mget": client.get_into_many, "mexists": client.exists_many,
        }  # fmt: skip
        return functions[op]

    def _view(self, key: str) -> int:
        view = self.load.client.view(key)
        if view is None:
            return 0
        with view:
            return len(view.data)

    # -- judging ------------------------------------------------------------------------------------

    def judge(self, op: str, number: int, arguments: tuple[Any, ...], result: Any) -> int:
        """How many keys of a call were not served; wrong bytes are counted in ``wrong``."""
        if op == "put":
            self._note_put(number, bool(result))
            return 0 if result else 1
        if op == "mput":
            for at, stored in enumerate(result, number):
                self._note_put(at, stored)
            return int(result.count(False))
        if op == "get":
            if result is not None and self.verify:
                self._check(number, result, arguments[1])
            return 1 if result is None else 0
        if op == "mget":
            if self.verify:
                for at, (length, row) in enumerate(zip(result, arguments[1]), number):
                    if length is not None:
                        self._check(at, length, row)
            return int(result.count(None))
        if op == "view":
            if result and self.verify:
                view = self.load.client.view(arguments[0])
                if view is not None:
                    with view:
                        self._check(number, len(view), view.data)
            return 0 if result else 1
        answers = [result] if op == "exists" else result
        missing = 0
        for at, there in enumerate(answers, number):
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
        """With verification: the next puts store a new version."""
        self._version += 1
        if self.size >= _STAMP.size:
            for row in self.sources:
                struct.pack_into("<Q", row, _VERSION_AT, self._version)

    def read_back(self) -> int:
        """Check what the last burst put; how many are missing."""
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
        """Call for ``seconds``. A warm-up (not ``counted``) goes round all rows at least once."""
        stream: RawStream | None = None
        per_call = self.batches.get(op, 1)
        if not floor:
            function = self.function(op)
            if self.verify and op in ("put", "mput"):
                self.before_puts()
        elif self.load.raw is not None:
            kind = "put" if op in ("put", "mput") else "ask" if op in ("exists", "mexists") else "get"
            stream = RawStream(self.load.raw, kind, QUESTION_BYTES * per_call if kind == "ask" else self.size)
            many = op in ("mput", "mget")
            function = {
                "put": stream.put_many if many else stream.put, "get": stream.get_many if many else stream.get,
                "ask": stream.ask,
            }[kind]  # fmt: skip
        else:
            function = copy_many if op in BATCHES else memmove
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
        if self.verify and not floor and op in ("put", "mput"):
            bad += self.read_back()
        return {"calls": calls, "keys": calls * per_call, "busy_ns": busy, "bad": bad}


def stamp(row: memoryview, key: str) -> None:
    """Make a value describe itself; one too short for it is a piece of its key's digest."""
    if len(row) < _STAMP.size:
        row[:] = (mark_of(key) * 2)[: len(row)]
        return
    _STAMP.pack_into(row, 0, mark_of(key), 0, len(row), zlib.crc32(row[_STAMP.size :]))


def fault(data: memoryview, key: str, size: int, version: int) -> str:
    """What is wrong with a value read, or an empty string. ``version`` -1: any will do."""
    if len(data) != size:
        return f"{len(data)} bytes instead of {size}"
    mark = mark_of(key)
    if size < _STAMP.size:
        return "" if data == (mark * 2)[:size] else "another key's bytes"
    found, number, length, crc = _STAMP.unpack_from(data)
    if found != mark:
        return "another key's bytes"
    if length != size or zlib.crc32(data[_STAMP.size :]) != crc:
        return "torn: its checksum does not fit its bytes"
    if version not in (number, _UNKNOWN):
        return f"version {number} instead of {version}"
    return ""


class Load:
    """A load process: the client and the lanes of its threads, driven by :func:`serve_load`.

    Args:
        client: keyword arguments of the Client.
        run: name of this run, in all its keys.
        threads, first: how many lanes, and the number of the first among all processes'.
        lanes: of all processes.
        working_set: bytes that all lanes together rotate over.
        verify: check values.
        raw: address of the raw socket's far side, where there is one.
    """

    def __init__(
        self, *, client: dict[str, Any], run: str, threads: int, first: int, lanes: int, working_set: int, verify: bool,
        raw: tuple[str, int] | None,
    ) -> None:  # fmt: skip
        self.run = run
        self.threads = threads
        self.first = first
        self.all_lanes = lanes
        self.share = working_set // lanes * threads
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
        self.lanes: list[Lane] = []

    def trouble(self) -> str:
        """Why the cluster cannot be used."""
        workers = self.client.stats()["workers"]
        down = [f"{each['node']}/{each['worker']}: {each['why']}" for each in workers if each["path"] == "down"]
        return "; ".join(down) or ("some shards have no owner" if workers else "no data server has joined it")

    def prepare(self, size: int, batches: dict[str, int]) -> dict[str, Any]:
        """Set lanes up for values of ``size`` bytes, and store them all. Batches shrink to half of a lane's keys."""
        rows = min(KEYS_MAX // self.all_lanes, self.share // self.threads // stride_of(size))
        if rows < 1:
            raise SimmError(
                f"the working set has no room for a value of {size} bytes in each of {self.all_lanes} lanes: "
                "raise --working-set"
            )
        batches = {op: max(1, min(batch, rows // 2)) for op, batch in batches.items()}
        self.lanes = [Lane(self, self.first + i, i * rows, rows, size, batches) for i in range(self.threads)]
        failed = 0
        for lane in self.lanes:
            step = max(1, min(512, (32 << 20) // size))
            for at in range(0, rows, step):
                stored = self.client.put_many(lane.keys[at : at + step], lane.sources[at : at + step])
                failed += stored.count(False)
        if failed:
            raise SimmError(f"{failed} of {rows * self.threads} values of {size} bytes could not be stored")
        gc.collect()
        gc.freeze()  # so that collecting before each burst does not walk through all keys and rows
        return {"rows": rows, "batches": batches}

    def burst(self, op: str, floor: bool, seconds: float, counted: bool, at: int) -> dict[str, Any]:
        """A burst in every thread, from ``at`` (CLOCK_MONOTONIC, ns) on."""
        results: list[dict[str, int]] = []
        errors: list[BaseException] = []

        def body(lane: Lane) -> None:
            try:
                time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
                results.append(lane.burst(op, floor, seconds, counted))
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=body, args=(lane,)) for lane in self.lanes]
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
        wrong = sum(lane.wrong for lane in self.lanes)
        return {"lanes": results, "wrong": wrong, "error": next((x.last_error for x in self.lanes if x.wrong), "")}

    def forget(self) -> dict[str, Any]:
        """Delete this size's keys."""
        for lane in self.lanes:
            self.client.delete_many(lane.keys)
        self.lanes = []
        gc.unfreeze()
        return {}


def serve_load(pipe: Connection, settings: dict[str, Any]) -> None:
    """Body of a load process: answer each order on the pipe until it says ``end`` or closes."""
    try:
        load = Load(**settings)
    except (SimmError, OSError, MemoryError) as exc:
        _answer(pipe, {"failed": str(exc) or type(exc).__name__})
        return
    workers = load.client.stats()["workers"]
    _answer(pipe, {"paths": load.paths, "workers": len(workers), "pid": os.getpid()})
    with load.client:
        while True:
            order = json.loads(pipe.recv_bytes())
            what = order.pop("do")
            if what == "end":
                _answer(pipe, {"client": load.client.stats()})
                return
            try:
                if what == "samples":
                    _send_samples(pipe, load, bool(order["floor"]))
                    continue
                _answer(pipe, getattr(load, what)(**order) or {})
            except (SimmError, OSError) as exc:
                _answer(pipe, {"failed": str(exc)})


def _send_samples(pipe: Connection, load: Load, floor: bool) -> None:
    """For each lane: how many calls were measured, then the latencies kept."""
    taken = [samples[floor].take() for samples in load.samples]
    _answer(pipe, {"counts": [count for count, _ in taken]})
    for _, values in taken:
        pipe.send_bytes(values)


def _answer(pipe: Connection, body: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(body).encode())


def lanes_of(processes: int, threads: int) -> Sequence[int]:
    """First lane of each process."""
    return range(0, processes * threads, threads)
