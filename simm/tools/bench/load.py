"""A load process of ``simm bench``: a client, its keys and buffers, and the timer around each call.

The command's process sends orders over a pipe, so this process runs nothing but the load. A *burst* runs operations, or
their floor (``tools/bench/floor.py``), in every thread for a given time: one operation, or several in random order.

The timer covers the call as a user writes it, ``client.get_into(key, buffer)`` with a str and a memoryview. It is
``time.perf_counter_ns``, whose own cost the floor pays too. It excludes the work between two calls: taking the next key
and checking the result. Rates are calls per time spent *in calls*. Garbage collection is off during a burst, as in
``timeit``.

With room in the arena, puts replace the values of a rotating set of keys. In a full arena each put of a row gives it a
new key, so a thread's keys are always the newest that it has stored, and everything older is evicted.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from ...client import Client
from ...errors import SimmError, TransportError
from .apis import Api, ClientApi, KvApi
from .contents import UNKNOWN, FreshKeys, Samples, fault, key_name, rename, set_version, stamp
from .floor import QUESTION_BYTES, SLOT_COPY_BYTES, Area, RawStream, copy_each, copy_many, memmove, stride_of
from .plan import Mix
from .report import KV, OPERATIONS

#: Bound on the number of keys, so that tiny values do not create millions of Python objects.
KEYS_MAX: Final = 1 << 16
#: Longest warm-up of one operation, seconds. A fast operation goes once round the working set.
WARM_UP_MAX_S: Final = 1.0
READY_S: Final = 60.0
#: Most keys that are made ahead of a burst of puts.
_AHEAD_MAX: Final = 1 << 18
#: Values that are checked after a burst of puts into a full arena.
_READ_BACK: Final = 64
#: Keys and bytes of a call that only stores what is measured later.
_STORE_KEYS: Final = 512
_STORE_BYTES: Final = 32 << 20

#: The operation's position in the burst, the call's number (its first key's row), its arguments, and which of its keys
#: are stored: None for all.
Call = tuple[int, int, tuple[Any, ...], Sequence[bool] | None]


class Tally:
    """The counts of one operation in a burst."""

    __slots__ = ("absent", "bad", "busy_ns", "calls")

    def __init__(self) -> None:
        self.calls = self.busy_ns = self.bad = self.absent = 0


class LoadThread:
    """A thread's keys and rows, and its calls of each operation on them.

    ``index`` numbers the threads of all processes. The thread has ``rows`` rows of ``size`` bytes from ``first`` on.
    """

    def __init__(self, load: Load, index: int, first: int, rows: int, size: int) -> None:
        self.load = load
        self.size = size
        self.verify = load.verify
        self.api = load.api
        #: New keys for puts, None where they replace values.
        self.fresh = FreshKeys(f"{load.run}/{size}/{index}/fresh") if load.full else None
        self.keys = [key_name(load.run, size, index, number) for number in range(rows)]
        self.absent = [key_name(load.run + "/absent", size, index, number) for number in range(rows)]
        self.sources = load.source.rows(first, rows, size)
        self.targets = load.target.rows(first, rows, size)
        self._values = self.api.handles(load.source, first, rows, size)
        self._buffers = self.api.handles(load.target, first, rows, size)
        #: A buffer's memory, by its identity.
        self._memory = {id(buffer): row for buffer, row in zip(self._buffers, self.targets)}
        self._from = load.source.addresses(first, rows, size)
        self._to = load.target.addresses(first, rows, size)
        self._shared = load.shared.addresses(first, rows, size) if load.shared is not None else []
        self.order = list(range(rows))
        random.Random(f"{load.run}/{size}/{index}").shuffle(self.order)
        self._seed = f"{load.run}/{size}/{index}/mixed"
        self._samples = load.samples[index % len(load.samples)]
        self._supplies: dict[tuple[Sequence[str], int, bool], Iterator[Call]] = {}
        #: The version last stored, by row.
        self.stored = [0] * rows
        self._version = 0
        #: Rows put since they were last checked, in order.
        self._touched: dict[int, None] = {}
        #: Puts have moved the keys since all were stored.
        self.stale = False
        self._taken = 0
        self.wrong = 0
        self.last_error = ""
        if self.verify:
            for row, key in zip(self.sources, self.keys):
                stamp(row, key)

    # -- calls --------------------------------------------------------------------------------------

    def supply(self, ops: Sequence[str], batch: int, floor: bool) -> Iterator[Call]:
        """Return an endless iterator of calls, which continues where the last burst stopped."""
        found = self._supplies.get((ops, batch, floor))
        if found is None:
            if self.load.mix is not None:
                found = self._mixed_floor(ops, batch) if floor else self._mixed(ops, batch)
            else:
                found = self._floor_calls(ops[0], batch) if floor else self._calls(ops[0], batch)
            self._supplies[ops, batch, floor] = found
        return found

    def _numbers(self, many: bool, batch: int, shift: int) -> Sequence[int]:
        """Return the first rows of the calls of one rotation. Over several rotations they cover all rows."""
        rows = len(self.keys)
        return range(shift % (rows % batch + 1), rows - batch + 1, batch) if many else self.order

    def _calls(self, op: str, batch: int) -> Iterator[Call]:
        kind, many, _ = OPERATIONS[op]
        rows = len(self.keys)
        for shift in itertools.count(1):
            keys = self.keys
            turned = self._buffers[shift % rows :] + self._buffers[: shift % rows]
            questions = [(self.absent if number & 1 else keys)[number] for number in range(rows)]
            stored = [not number & 1 for number in range(rows)]
            for number in self._numbers(many, batch, shift):
                part: Any = slice(number, number + batch) if many else number
                if kind == "put":
                    if self.fresh is not None:
                        self._rename(number, batch)
                    yield 0, number, (keys[part], self._values[part]), None
                elif kind == "get":
                    yield 0, number, (keys[part], turned[part]), None
                elif kind == "ask":
                    yield 0, number, (questions[part],), stored[number : number + batch]
                else:
                    yield 0, number, (keys[part],), None

    def _rename(self, number: int, count: int) -> None:
        """Give rows new keys, as their next put stores them for the first time."""
        assert self.fresh is not None
        self.keys[number : number + count] = self.fresh.take(count)
        if self.verify:
            for row in range(number, number + count):
                rename(self.sources[row], self.keys[row])

    def _floor_calls(self, op: str, batch: int) -> Iterator[Call]:
        raw = self.load.raw is not None
        rows, size = len(self.keys), self.size
        kind, many, _ = OPERATIONS[op]
        views = self.sources if kind == "put" else self.targets
        into, source = (self._shared, self._from) if kind == "put" else (self._to, self._shared)
        if kind == "ask":
            size = min(size, SLOT_COPY_BYTES)
        for shift in itertools.count(1):
            # The operation's rows rotate against the arena's. So must these: two areas that are always copied at the
            # same offset are slower, because of the memory's banks.
            turned = [] if raw else into[shift % rows :] + into[: shift % rows]
            for number in self._numbers(many, batch, shift):
                part: Any = slice(number, number + batch) if many else number
                if not raw:
                    yield 0, number, (turned[part], source[part], size), None
                else:
                    yield 0, number, () if kind == "ask" else (views[part],), None

    def _draws(self, ops: Sequence[str], batch: int) -> Iterator[tuple[int, int, int, Sequence[bool] | None]]:
        """Yield the calls of a mix: an operation's position, its row, another row, and which keys are stored ones.

        The same for the operations and for their floor.
        """
        mix = self.load.mix
        assert mix is not None
        draw = random.Random(f"{self._seed}/{batch}")
        kinds = [OPERATIONS[op].kind for op in ops]
        weights = list(itertools.accumulate(mix.weights[kind] for kind in kinds))
        many = OPERATIONS[ops[0]].many
        puts = itertools.chain.from_iterable(self._numbers(many, batch, shift) for shift in itertools.count(1))
        last = len(self.keys) - batch + 1
        while True:
            (which,) = draw.choices(range(len(ops)), cum_weights=weights)
            if kinds[which] == "put":
                yield which, next(puts), draw.randrange(last), None
            else:
                present = [draw.random() < mix.hits for _ in range(batch)]
                yield which, draw.randrange(last), draw.randrange(last), present

    def _mixed(self, ops: Sequence[str], batch: int) -> Iterator[Call]:
        many = OPERATIONS[ops[0]].many
        keys, absent = self.keys, self.absent
        for which, number, other, present in self._draws(ops, batch):
            if present is None:
                if self.fresh is not None:
                    self._rename(number, batch)
                part: Any = slice(number, number + batch) if many else number
                yield which, number, (keys[part], self._values[part]), None
                continue
            asked: Any = [(keys if there else absent)[at] for at, there in enumerate(present, number)]
            buffers: Any = self._buffers[other : other + batch]
            if not many:
                (asked,), (buffers,) = asked, buffers
            yield which, number, (asked,) if OPERATIONS[ops[which]].kind == "ask" else (asked, buffers), present

    def _mixed_floor(self, ops: Sequence[str], batch: int) -> Iterator[Call]:
        """A miss and a question copy a slot, as in the floor of ``exists``."""
        least = min(self.size, SLOT_COPY_BYTES)
        many = OPERATIONS[ops[0]].many
        for which, number, other, present in self._draws(ops, batch):
            into, source = (self._shared, self._from) if present is None else (self._to, self._shared)
            reads = OPERATIONS[ops[which]].kind == "get"
            sizes = [self.size if reads and there else least for there in present or ()] or [self.size] * batch
            if many:
                yield which, number, (into[other : other + batch], source[number : number + batch], sizes), present
            else:
                yield which, number, (into[other], source[number], sizes[0]), present

    # -- judging ------------------------------------------------------------------------------------

    def judge(
        self, op: str, number: int, arguments: tuple[Any, ...], result: Any, present: Sequence[bool] | None
    ) -> int:
        """Return the number of stored keys that a call did not serve. Counts wrong bytes in ``wrong``."""
        kind, many, _ = OPERATIONS[op]
        results: Sequence[Any] = result if many else (result,)
        if kind == "put":
            stored = self.api.stored(results)
            for at, each in enumerate(stored, number):
                self._note_put(at, each)
            return stored.count(False)
        if kind == "view":
            if result and self.verify:
                with self.load.client.view(arguments[0]) as view:
                    if view:
                        self._check(number, len(view), view.data)
            return 0 if result else 1
        lengths = self.api.lengths(results) if kind == "get" else [1 if each else None for each in results]
        if kind == "get" and self.verify:
            for at, (length, buffer) in enumerate(zip(lengths, arguments[1] if many else arguments[1:])):
                if length is not None and (present is None or present[at]):
                    self._check(number + at, length, self._memory[id(buffer)])
        if present is None:
            return lengths.count(None)
        missing = 0
        for at, (there, length) in enumerate(zip(present, lengths), number):
            missing += there and length is None
            if length is not None and not there:
                self._complain(f"{op} finds key {self.absent[at]}, which was never stored")
        return missing

    def _note_put(self, number: int, stored: bool) -> None:
        if self.verify:
            self.stored[number] = self._version if stored else UNKNOWN
            self._touched.pop(number, None)
            self._touched[number] = None

    def _check(self, number: int, length: int, data: memoryview) -> None:
        why = fault(data[:length], self.keys[number], self.size, self.stored[number])
        if why:
            self._complain(f"key {self.keys[number]}: {why}")

    def _complain(self, text: str) -> None:
        self.wrong += 1
        self.last_error = text

    def before_puts(self) -> None:
        """Prepare a burst of puts: new keys, as many as the last burst took and half more, and a new version."""
        self.stale = True
        if self.fresh is not None:
            last, self._taken = self.fresh.taken - self._taken, self.fresh.taken
            self.fresh.make(min(_AHEAD_MAX, last + last // 2))
        if self.verify:
            self._version += 1
            for row in self.sources:
                set_version(row, self._version)

    def read_back(self) -> int:
        """Check the values that the last burst put and return the number of missing ones.

        In a full arena only the last ones: a read keeps a value, and the next puts are to evict.
        """
        missing = 0
        touched = list(self._touched)[-_READ_BACK if self.fresh is not None else 0 :]
        self._touched.clear()
        for number in touched:
            row = self.targets[(number + 1) % len(self.targets)]
            length = self.load.client.get_into(self.keys[number], row)
            if length is None:
                missing += 1
            else:
                self._check(number, length, row)
        return missing

    # -- storing ------------------------------------------------------------------------------------

    def store(self) -> int:
        """Store all rows, under new keys in a full arena. Return the number of values that were refused."""
        self.before_puts()
        refused = self._put_all(len(self.keys), keep=True)
        self.stale = False
        self._touched.clear()
        return refused

    def fill(self, count: int) -> int:
        """Store so many values that nobody will read. Return the number of values that were refused."""
        return self._put_all(count, keep=False)

    def _put_all(self, count: int, keep: bool) -> int:
        rows = len(self.keys)
        step = max(1, min(_STORE_KEYS, _STORE_BYTES // self.size, rows))
        refused = 0
        for at in range(0, count, step):
            first = at % (rows - step + 1) if not keep else at
            number = min(step, count - at)
            if keep and self.fresh is not None:
                self._rename(first, number)
            keys = self.keys[first : first + number] if keep or self.fresh is None else self.fresh.take(number)
            done = self.load.client.put_many(keys, self.sources[first : first + number])
            refused += done.count(False)
            if keep:
                for row, stored in enumerate(done, first):
                    self._note_put(row, stored)
        return refused

    # -- bursts -------------------------------------------------------------------------------------

    def _functions(
        self, ops: Sequence[str], batch: int, floor: bool
    ) -> tuple[list[Callable[..., Any]], RawStream | None]:
        """Return what the calls of each operation run, and the stream if that is a raw socket's."""
        if not floor:
            return [self.api.function(op) for op in ops], None
        operation = OPERATIONS[ops[0]]
        if self.load.mix is not None:
            return [copy_each if operation.many else memmove] * len(ops), None
        if self.load.raw is None:
            return [copy_many if operation.many else memmove], None
        kind = "get" if operation.kind == "view" else operation.kind
        stream = RawStream(self.load.raw, kind, QUESTION_BYTES * batch if kind == "ask" else self.size)
        many = operation.many
        return [{
            "put": stream.put_many if many else stream.put, "get": stream.get_many if many else stream.get,
            "ask": stream.ask,
        }[kind]], stream  # fmt: skip

    def burst(self, ops: Sequence[str], batch: int, floor: bool, seconds: float, counted: bool) -> dict[str, Any]:
        """Call ``ops`` for ``seconds`` and return their counts. A warm-up (not ``counted``) uses every row.

        ``moved`` are the keys whose values the calls, or the floor's copies in their place, have moved or found.
        ``cpu_ns`` is this thread's processor time in calls, None if it cannot be told. What it does between two calls
        waits for nothing, so that is the time there, unless another process had the processor for longer than that.
        """
        puts = not floor and any(OPERATIONS[op].kind == "put" for op in ops)
        if puts:
            self.before_puts()
        functions, stream = self._functions(ops, batch, floor)
        samples = [self._samples_of(position, floor) for position in range(len(ops))]
        tallies = [Tally() for _ in ops]
        least = 2 if counted else -(-len(self.keys) // batch)
        clock = time.perf_counter_ns
        judge = self.judge
        cpu = time.thread_time_ns()
        began = clock()
        until = began + int(seconds * 1e9)
        limit = began + int(max(seconds, WARM_UP_MAX_S) * 1e9)
        for calls, (which, number, arguments, present) in enumerate(self.supply(ops, batch, floor), 1):
            function = functions[which]
            start = clock()
            result = function(*arguments)
            end = clock()
            tally = tallies[which]
            tally.calls += 1
            tally.busy_ns += end - start
            if counted:
                samples[which].add(end - start)
            if not floor:
                tally.bad += judge(ops[which], number, arguments, result, present)
            if present is not None:
                tally.absent += present.count(False)
            if end >= until and (end >= limit or (calls >= least and all(each.calls > 1 for each in tallies))):
                break
        cpu = time.thread_time_ns() - cpu
        busy = sum(tally.busy_ns for tally in tallies)
        between = clock() - began - busy
        if stream is not None:
            start = clock()
            stream.finish()
            tallies[0].busy_ns += clock() - start if stream.kind == "put" else 0
        moved = [tally.calls * batch - tally.bad - tally.absent for tally in tallies]
        missing = self.read_back() if self.verify and puts else 0
        if puts and self.fresh is None:
            next(tally for op, tally in zip(ops, tallies) if OPERATIONS[op].kind == "put").bad += missing
        return {
            "ops": [
                {"calls": tally.calls, "keys": tally.calls * batch, "busy_ns": tally.busy_ns, "bad": tally.bad,
                 "absent": tally.absent, "moved": served}
                for tally, served in zip(tallies, moved)
            ],
            "cpu_ns": min(busy, cpu - between) if cpu > between else None,
        }  # fmt: skip

    def _samples_of(self, position: int, floor: bool) -> Samples:
        found = self._samples.get((position, floor))
        if found is None:
            found = self._samples[position, floor] = Samples()
        return found


class Load:
    """The client and the threads of a load process, driven by :func:`serve_load`.

    Args:
        client: keyword arguments of the Client.
        environment: that of ``simm.kv``, if ``api`` names that.
        run: name of this run, part of all its keys.
        threads, first: number of threads, and the index of the first one.
        all_threads: number of threads of all processes.
        working_set: bytes that all threads together rotate over.
        verify: check values.
        api: what is called.
        full: each put is of a new key.
        mix: how operations are mixed, None if they are not.
        raw: address of the raw socket's remote side, None without one.
    """

    def __init__(
        self, *, client: dict[str, Any], environment: dict[str, str], run: str, threads: int, first: int,
        all_threads: int, working_set: int, verify: bool, api: str, full: bool, mix: Mix | None,
        raw: tuple[str, int] | None,
    ) -> None:  # fmt: skip
        self.run = run
        self.threads = threads
        self.first = first
        self.all_threads = all_threads
        self.share = working_set // all_threads * threads
        self.verify = verify
        self.full = full
        self.mix = mix
        self.client = Client(**client)
        if not self.client.wait_ready(READY_S):
            raise TransportError(f"the cluster is not ready: {self.trouble()}")
        self.paths = sorted({worker["path"] for worker in self.client.stats()["workers"]})
        self.api: Api = ClientApi(self.client)
        if api == KV:
            os.environ.update(environment)
            self.api = KvApi()
        self.raw = raw if "tcp" in self.paths and mix is None else None
        self.source = Area(self.share)
        self.source.fill()
        self.target = Area(self.share)
        self.target.fill()
        self.shared: Area | None = None
        if self.raw is None:
            self.shared = Area(self.share, shared=True)
            self.shared.fill()
        #: Of each thread, by the operation's position in the burst, and whether it is the floor's.
        self.samples: list[dict[tuple[int, bool], Samples]] = [{} for _ in range(threads)]
        self.members: list[LoadThread] = []

    def trouble(self) -> str:
        """Return why the cluster cannot be used."""
        workers = self.client.stats()["workers"]
        down = [f"{each['node']}/{each['worker']}: {each['reason']}" for each in workers if each["path"] == "down"]
        return "; ".join(down) or ("some shards have no owner" if workers else "no data server has joined it")

    def prepare(self, size: int) -> dict[str, Any]:
        """Set threads up for values of ``size`` bytes, and return the rows of each."""
        rows = min(KEYS_MAX // self.all_threads, self.share // self.threads // stride_of(size))
        if rows < 1:
            raise SimmError(
                f"the working set has no room for a value of {size} bytes in each of {self.all_threads} threads: "
                "raise --working-set"
            )
        self.members = [LoadThread(self, self.first + i, i * rows, rows, size) for i in range(self.threads)]
        gc.collect()
        gc.freeze()  # so that a collection before each burst skips all keys and rows
        return {"rows": rows}

    def fill(self, count: int) -> dict[str, Any]:
        """Store ``count`` values that nobody reads, and return how many were refused."""
        least, more = divmod(count, self.threads)
        return {"refused": sum(member.fill(least + (at < more)) for at, member in enumerate(self.members))}

    def store(self, again: bool) -> dict[str, Any]:
        """Store all rows; with ``again`` those of threads that have put since the last time."""
        members = [member for member in self.members if member.stale or not again]
        refused = sum(member.store() for member in members)
        if refused:
            rows, size = sum(len(member.keys) for member in members), self.members[0].size
            raise SimmError(f"{refused} of {rows} values of {size} bytes could not be stored")
        return {}

    def burst(
        self, ops: Sequence[str], batch: int, floor: bool, seconds: float, counted: bool, at: int
    ) -> dict[str, Any]:
        """Run a burst in every thread, from ``at`` (CLOCK_MONOTONIC, ns) on. Wrong values are those of this burst."""
        results: list[dict[str, Any]] = []
        errors: list[BaseException] = []

        def body(member: LoadThread) -> None:
            try:
                time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
                results.append(member.burst(ops, batch, floor, seconds, counted))
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
        error = next((member.last_error for member in self.members if member.wrong), "")
        for member in self.members:  # the next burst may be another operation's
            member.wrong = 0
        return {"threads": results, "wrong": wrong, "error": error}

    def latencies(self, position: int, floor: bool) -> dict[str, Any]:
        """Return for each thread the number of calls measured and the latencies kept, and start over.

        ``position``: of the operation among those of the burst.
        """
        return {"threads": [samples[position, floor].take() for samples in self.samples]}

    def discard(self) -> dict[str, Any]:
        """Delete the keys of this size. A full arena stays so."""
        for member in self.members if not self.full else ():
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
    with load.client, contextlib.closing(load.api):
        while True:
            what, order = pipe.recv()
            if what == "end":
                pipe.send({"client": load.client.stats()})
                return
            try:
                pipe.send(getattr(load, what)(**order))
            except (SimmError, OSError) as exc:
                pipe.send({"failed": str(exc)})
