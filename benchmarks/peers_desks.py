"""A store at work for ``peers.py``: its keys, its caller's arrays, bursts of calls, and the check of each.

A burst returns the time of each call by operation. Everything that a caller would have at hand is prepared before, and
every result is checked after it.

With room, PUT stores keys that are deleted before the next burst, and GET reads a working set that stays. In a full
store nothing is deleted. A burst of PUTs evicts what is oldest; the working set is stored again, under new keys, before
it is read. What a store has evicted is a miss, and the cell says how many there were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from peers_report import FLOOR, FULL, KIB, Timed
from peers_stores import Array, Peer

BATCH = 32
EXISTS_BATCH = 128
#: Values that are compared in full after each burst.
SAMPLES = 3
#: A full store that serves less than this share of a burst's keys has failed.
LEAST_SERVED = 0.5
#: A store is taken for one that never evicts when it holds so many times its memory, and given up after so long.
FILLS_MAX = 4
FILL_SECONDS = 120.0
#: A pause after a store has refused all keys of a batch: some evict in the background.
REFUSED_SECONDS = 0.02

#: A call of a mix: the operation, and which of its keys are stored ones.
Draw = tuple[str, Sequence[bool]]


class WrongContentError(Exception):
    """A store returned something else than was stored, or lost what it must keep. This voids its cells."""


@dataclass(frozen=True)
class Shape:
    """The size of one burst at one value size."""

    size: int
    rows: int
    singles: int
    batch: int
    batches: int

    @classmethod
    def of(cls, size: int, working_set: int, burst: int) -> Shape:
        rows = working_set // size
        batch = min(BATCH, max(1, rows // 2))
        return cls(
            size=size,
            rows=rows,
            singles=min(rows, 512, max(4, burst // size)),
            batch=batch,
            batches=min(rows // batch, 32, max(2, burst // (size * batch))),
        )

    def calls(self, op: str) -> tuple[int, int]:
        """Return (calls in a burst, keys in a call)."""
        if op in ("mget", "mput", "mmixed"):
            return self.batches, self.batch
        return (16, EXISTS_BATCH) if op == "mexists" else (self.singles, 1)


class Desk:
    """A store with its caller's arrays, and what is stored in it now."""

    def __init__(self, name: str, index: int, source: Array, target: Array):
        self.name = name
        self.index = index
        self.source = source
        self.target = target

    def rows(self, array: Array, size: int, numbers: Sequence[int]) -> list[Array]:
        return [array[number * size : (number + 1) * size] for number in numbers]

    def fill(self, shape: Shape) -> None:
        """Store the working set under the keys that GET will read. In a full store, fill it before."""

    def refresh(self, shape: Shape) -> None:
        """Store the working set again, if puts have evicted some of it."""

    def empty(self) -> None:
        """Delete everything stored. A full store stays so."""

    def burst(
        self, op: str, shape: Shape, picks: list[int], slots: list[int], mix: Sequence[Draw] = ()
    ) -> dict[str, Timed]:
        """Run one burst and check it; return the time of each call by operation."""
        raise NotImplementedError


def timed(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> tuple[list[int], list[Any]]:
    return timed_each([(call, each) for each in arguments])


def timed_each(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> tuple[list[int], list[Any]]:
    clock = time.perf_counter_ns
    spent, results = [], []
    for call, arguments in calls:
        start = clock()
        result = call(*arguments)
        spent.append(clock() - start)
        results.append(result)
    return spent, results


def grouped(items: Sequence[Any], count: int) -> list[list[Any]]:
    return [list(items[start : start + count]) for start in range(0, len(items), count)]


def kind_of(op: str) -> str:
    """Return ``get``, ``put`` or ``exists``."""
    return op.removeprefix("m")


class StoreDesk(Desk):
    def __init__(self, peer: Peer, index: int, source: Array, target: Array):
        own = peer.array(source.nbytes), peer.array(target.nbytes)
        if own[0] is not None and own[1] is not None:
            own[0][:] = source
            source, target = own[0], own[1]
        super().__init__(peer.name, index, source, target)
        self.peer = peer
        self.full = peer.state == FULL
        self._serial = 0
        #: The keys that GET reads, by row.
        self._names: list[str] = []
        self._fresh: list[str] = []
        self._stale = False
        for array in (source, target):
            peer.adopt(array)
        self._try_out()

    def _handles(self, array: Array, size: int, numbers: Sequence[int]) -> list[Any]:
        return [self.peer.handle(row) for row in self.rows(array, size, numbers)]

    def _new_keys(self, shape: Shape, count: int) -> list[str]:
        self._serial += count
        return [f"p{shape.size}:{number}" for number in range(self._serial - count, self._serial)]

    def _try_out(self) -> None:
        """Check hits, misses and their order in a batch, before anything is timed."""
        size, peer = 4 * KIB, self.peer
        keys = [f"try{number}" for number in range(6)]
        here = [0, 2, 3]
        values, places = self._handles(self.source, size, range(6)), self._handles(self.target, size, range(6))
        done = [peer.put(keys[0], values[0]), *peer.mput([keys[2], keys[3]], [values[2], values[3]])]
        expected = [size if number in here else None for number in range(6)]
        found = [list(peer.mget_into(keys, places)), [peer.get_into(k, p) for k, p in zip(keys, places)]]
        there = [peer.mexists(keys), [peer.exists(key) for key in keys]]
        if not all(done) or found != [expected] * 2 or there != [[got is not None for got in expected]] * 2:
            raise WrongContentError(f"{self.name}: {done} {found} {there}")
        self._compare(size, here, here)
        peer.delete_many([keys[number] for number in here])
        if any(peer.mexists(keys)):
            raise WrongContentError(f"{self.name}: a deleted key is still there")

    def _compare(self, size: int, picks: Sequence[int], slots: Sequence[int]) -> None:
        for pick, slot in zip(picks, slots):
            (want,), (got,) = self.rows(self.source, size, [pick]), self.rows(self.target, size, [slot])
            if not np.array_equal(want, got):
                raise WrongContentError(f"{self.name}: {size} bytes differ from what was stored")

    def _spoil(self, size: int, slots: Sequence[int]) -> None:
        """Overwrite a byte in every page and the last one, so that old content cannot pass for new."""
        for row in self.rows(self.target, size, slots):
            row[:: 4 * KIB] ^= 0xFF
            row[-1] ^= 0xFF

    # -- what is stored -----------------------------------------------------------------------------

    def fill(self, shape: Shape) -> None:
        if self.full:
            self._fill_up(shape)
        self._store(shape)

    def refresh(self, shape: Shape) -> None:
        if self.full and self._stale:
            self._store(shape)

    def _store(self, shape: Shape) -> None:
        names = self._new_keys(shape, shape.rows)
        stored = 0
        for numbers in grouped(range(shape.rows), shape.batch):
            stored += self._mput([names[number] for number in numbers], shape, numbers)
        self._require(stored, shape.rows, "a PUT of the working set", False)
        self._names, self._stale = names, False

    def _fill_up(self, shape: Shape) -> None:
        """Store values that nobody reads, until the store has evicted the first of them."""
        until = time.monotonic() + FILL_SECONDS
        most = self.peer.memory // shape.size
        first: list[str] = []
        stored = 0
        while stored < FILLS_MAX * most and time.monotonic() < until:
            keys = self._new_keys(shape, shape.batch)
            numbers = [number % shape.rows for number in range(stored, stored + len(keys))]
            done = self._mput(keys, shape, numbers)
            stored += done
            if not done:
                time.sleep(REFUSED_SECONDS)
            if len(first) < EXISTS_BATCH:
                first += keys if done == len(keys) else []
            # Not after each batch: a store may keep for longer what is asked for.
            elif stored >= most and stored % (most // 8 + 1) < done and not all(self.peer.mexists(first)):
                return
        raise WrongContentError(f"{self.name}: holds {stored} values of {shape.size} bytes and evicts none")

    def _mput(self, keys: list[str], shape: Shape, numbers: Sequence[int]) -> int:
        return list(self.peer.mput(keys, self._handles(self.source, shape.size, numbers))).count(True)

    def empty(self) -> None:
        self._forget()
        if not self.full:
            for keys in grouped(self._names, EXISTS_BATCH):
                self.peer.delete_many(keys)
        self._names = []

    def _forget(self) -> None:
        for keys in grouped(self._fresh, EXISTS_BATCH):
            self.peer.delete_many(keys)
        self._fresh = []

    # -- bursts -------------------------------------------------------------------------------------

    def burst(
        self, op: str, shape: Shape, picks: list[int], slots: list[int], mix: Sequence[Draw] = ()
    ) -> dict[str, Timed]:
        many = shape.calls(op)[1]
        draws = mix or _draws(op, len(picks) // many, many)
        if any(kind_of(each) == "put" for each, _ in draws):
            self._forget()
        calls = []
        reads: list[tuple[int, int]] = []  # (row, slot) of each key that a GET should find, in order
        puts: list[tuple[str, int]] = []
        for number, (each, stored) in enumerate(draws):
            part = slice(number * many, (number + 1) * many)
            keys = self._keys(each, shape, picks[part], stored, puts)
            if kind_of(each) == "exists":
                arguments: list[list[Any]] = [keys]
            elif kind_of(each) == "put":
                arguments = [keys, self._handles(self.source, shape.size, picks[part])]
            else:
                arguments = [keys, self._handles(self.target, shape.size, slots[part])]
                reads += [pair for pair, there in zip(zip(picks[part], slots[part]), stored) if there]
            single = each in ("get", "put", "exists")
            function = {"get": "get_into", "mget": "mget_into"}.get(each, each)
            calls.append((getattr(self.peer, function), tuple(item[0] if single else item for item in arguments)))
        self._spoil(shape.size, [slot for _, slot in reads])
        spent, results = timed_each(calls)
        found = self._judge(draws, shape, spent, results)
        lengths = iter([got for (each, stored), result in zip(draws, results) if kind_of(each) == "get"
                        for got, there in zip(_listed(each, result), stored) if there])  # fmt: skip
        hits = [pair for pair in reads if next(lengths) is not None]
        for pick, slot in _sample(hits):
            self._compare(shape.size, [pick], [slot])
        self._read_back(shape, puts, slots)
        prefix = "mixed " if mix else ""
        return {prefix + each: timed for each, timed in found.items()}

    def _keys(
        self, op: str, shape: Shape, picks: Sequence[int], stored: Sequence[bool], puts: list[tuple[str, int]]
    ) -> list[str]:
        """Return the keys of a call. Puts are of new keys, which the working set has from then on in a full store."""
        if kind_of(op) != "put":
            return [self._names[pick] if there else f"n{shape.size}:{pick}" for pick, there in zip(picks, stored)]
        keys = self._new_keys(shape, len(picks))
        puts += zip(keys, picks)
        if self.full:
            self._stale = True
            for key, pick in zip(keys, picks):
                self._names[pick] = key
        else:
            self._fresh += keys
        return keys

    def _judge(
        self, draws: Sequence[Draw], shape: Shape, spent: Sequence[int], results: Sequence[Any]
    ) -> dict[str, Timed]:
        """Check all results and return them by operation."""
        found: dict[str, Timed] = {}
        for (op, stored), ns, result in zip(draws, spent, results):
            part = found.setdefault(op, Timed())
            part.ns.append(ns)
            gets = kind_of(op) == "get"
            for got, there in zip(_listed(op, result), stored):
                hit = got == shape.size if gets else got is True
                if not (hit and there) and got is not (None if gets else False):
                    what = "a stored key" if there else "a key that was never stored"
                    raise WrongContentError(f"{self.name}: {op} of {what} gives {got}")
                part.asked += there
                part.served += hit
        for op, part in found.items():
            self._require(part.served, part.asked, op, True)
        return found

    def _require(self, served: int, asked: int, what: str, timed: bool) -> None:
        """Raise WrongContentError if a store with room lost a key, or a full one most of them."""
        if served < (LEAST_SERVED * asked if self.full else asked):
            raise WrongContentError(f"{self.name}: {what} was refused or missed {asked - served} of {asked} keys")

    def _read_back(self, shape: Shape, puts: Sequence[tuple[str, int]], slots: Sequence[int]) -> None:
        """Compare some of the values just put."""
        for (key, pick), slot in zip(_sample(puts), slots):
            self._spoil(shape.size, [slot])
            (place,) = self._handles(self.target, shape.size, [slot])
            got = self.peer.get_into(key, place)
            if got is None and self.full:
                continue
            if got != shape.size:
                raise WrongContentError(f"{self.name}: a key just stored is not there")
            self._compare(shape.size, [pick], [slot])


def _draws(op: str, calls: int, many: int) -> list[Draw]:
    """Return the calls of a burst of one operation. Every second key of ``exists`` is there."""
    stored = [number % 2 == 0 if kind_of(op) == "exists" else True for number in range(calls * many)]
    return [(op, part) for part in grouped(stored, many)]


def _listed(op: str, result: Any) -> list[Any]:
    """Return a call's result for each of its keys."""
    return [result] if op in ("get", "put", "exists") else list(result)


def _sample(items: Sequence[Any]) -> list[Any]:
    """Return the first, the middle and the last one."""
    return [items[at] for at in sorted({0, len(items) // 2, len(items) - 1})] if items else []


class FloorDesk(Desk):
    """No store: the same bytes between the same kinds of array, by slice assignment (a memcpy)."""

    def __init__(self, index: int, source: Array, target: Array):
        super().__init__(FLOOR, index, source, target)
        self._store = source.copy()

    def burst(
        self, op: str, shape: Shape, picks: list[int], slots: list[int], mix: Sequence[Draw] = ()
    ) -> dict[str, Timed]:
        many = shape.calls(op)[1]
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        ops = []
        for number, (each, stored) in enumerate(mix or _draws(op, len(picks) // many, many)):
            if kind_of(each) == "exists":
                continue  # nothing to copy
            part = slice(number * many, (number + 1) * many)
            kept = self.rows(self._store, shape.size, picks[part])
            if kind_of(each) == "put":
                copies = zip(kept, self.rows(self.source, shape.size, picks[part]))
            else:
                copies = zip(self.rows(self.target, shape.size, slots[part]), kept)
            pairs = [(into.data, out_of.data) for (into, out_of), there in zip(copies, stored) if there]
            ops.append(each)
            calls.append((_copy_all, (pairs,)) if each.startswith("m") or not pairs else (_copy, pairs[0]))
        spent, _ = timed_each(calls)
        found: dict[str, Timed] = {}
        for each, ns in zip(ops, spent):
            found.setdefault(("mixed " if mix else "") + each, Timed()).ns.append(ns)
        return found


def _copy(into: memoryview, out_of: memoryview) -> None:
    into[:] = out_of


def _copy_all(pairs: list[tuple[memoryview, memoryview]]) -> None:
    for into, out_of in pairs:
        into[:] = out_of
