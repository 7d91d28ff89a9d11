#!/usr/bin/env python3
"""Run the same operations on SiMM and on its peers, in alternation in one run.

    python benchmarks/peers.py --quick
    python benchmarks/peers.py --peers simm,redis,memcached,mooncake --json result.json

README.md in this folder says what is measured and how to get the peers. What can distort such a comparison, and the
countermeasure:

- *The machine changes during the run* (other load, clock rates). Every store does a short burst of the same operation
  in each round, the order of the stores rotates by one from round to round, and a ratio is the median of the ratios
  within the rounds.
- *The processor's cache answers*. The values form a working set larger than the cache, keys come in shuffled order,
  each round takes the next ones, and no store gets a buffer that another store has just touched.
- *A store does less than it should*. The script checks every result. After each burst it compares some of the values in
  full with what was stored; it overwrote the buffers before.
- *A store is used badly*. Each is used in the fastest way that we found. The clients of Redis and memcached are our
  own, because they are faster than the usual libraries (to run those too: ``--peers
  redis,redis-py,memcached,pymemcache``).
- *The scheduler's placement of a server*. With few cores a server that wakes up on the caller's core answers in 17 us,
  one that wakes up on an idle core in 50 us, and the placement can stay the same for seconds. ``--cores 1`` removes the
  choice (and the overlap for large values). Cells whose rounds differ are marked.
- *The first touch of memory*. The first round is not counted. What a PUT round has stored is deleted before the next
  one, so that a warm store reuses memory.

PUT always stores new keys, as some of these stores do nothing for an existing key.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from peers_stores import GROUPS, PEERS, Array, Peer, resident_array, restore_signals  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB)
OPS = ("get", "put", "mget", "mput", "exists", "mexists")
TITLES = {
    "get": "GET, one key",
    "put": "PUT, one new key",
    "mget": "GET, a batch",
    "mput": "PUT, a batch of new keys",
    "exists": "exists, one key (half of them are there)",
    "mexists": "exists, a batch (half of them are there)",
}
#: A cell is marked when its rounds differ by more than this factor.
UNSTEADY = 1.5
BATCH = 32
EXISTS_BATCH = 128
#: Values that are compared in full after each burst.
SAMPLES = 3
#: All stores together, as a multiple of the working set (see README.md).
MEMORY_FACTOR = 26
FLOOR = "memcpy"
T = TypeVar("T")


class WrongContentError(Exception):
    """A store returned something else than was stored. This ends the run."""


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
        if op in ("mget", "mput"):
            return self.batches, self.batch
        return (16, EXISTS_BATCH) if op == "mexists" else (self.singles, 1)


@dataclass
class Cell:
    """One operation at one size on one store. Times are microseconds per key."""

    op: str
    size: int
    batch: int
    peer: str
    p50: float = 0.0
    p99: float = 0.0
    samples: int = 0
    round_p50: list[float] = field(default_factory=list)
    to_simm: float | None = None
    to_memcpy: float | None = None
    failed: str | None = None


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
        """Store the working set under the keys that GET will read."""

    def empty(self) -> None:
        """Delete everything stored."""

    def burst(self, op: str, shape: Shape, picks: list[int], slots: list[int]) -> list[int]:
        """Run one burst and check it; return the nanoseconds of each call."""
        raise NotImplementedError


def timed(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> tuple[list[int], list[Any]]:
    clock = time.perf_counter_ns
    spent, results = [], []
    for each in arguments:
        start = clock()
        result = call(*each)
        spent.append(clock() - start)
        results.append(result)
    return spent, results


def grouped(items: list[Any], count: int) -> list[list[Any]]:
    return [items[start : start + count] for start in range(0, len(items), count)]


class StoreDesk(Desk):
    def __init__(self, peer: Peer, index: int, source: Array, target: Array):
        own = peer.array(source.nbytes), peer.array(target.nbytes)
        if own[0] is not None and own[1] is not None:
            own[0][:] = source
            source, target = own[0], own[1]
        super().__init__(peer.name, index, source, target)
        self.peer = peer
        self._serial = 0
        self._stored: list[str] = []
        self._fresh: list[str] = []
        for array in (source, target):
            peer.adopt(array)
        self._try_out()

    def _handles(self, array: Array, size: int, numbers: Sequence[int]) -> list[Any]:
        return [self.peer.handle(row) for row in self.rows(array, size, numbers)]

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

    def fill(self, shape: Shape) -> None:
        for numbers in grouped(list(range(shape.rows)), shape.batch):
            keys = [f"g{shape.size}:{number}" for number in numbers]
            if not all(self.peer.mput(keys, self._handles(self.source, shape.size, numbers))):
                raise WrongContentError(f"{self.name}: a PUT into an empty store was refused")
            self._stored += keys

    def empty(self) -> None:
        self._forget()
        for keys in grouped(self._stored, EXISTS_BATCH):
            self.peer.delete_many(keys)
        self._stored = []

    def _forget(self) -> None:
        for keys in grouped(self._fresh, EXISTS_BATCH):
            self.peer.delete_many(keys)
        self._fresh = []

    def burst(self, op: str, shape: Shape, picks: list[int], slots: list[int]) -> list[int]:
        many = shape.calls(op)[1]
        if op.endswith("exists"):
            return self._burst_exists(op, shape, picks, many)
        sampled = [0, len(picks) // 2, len(picks) - 1][: SAMPLES if len(picks) > 2 else 1]
        chosen, landing = [picks[i] for i in sampled], [slots[i] for i in sampled]
        if op.endswith("put"):
            return self._burst_put(op, shape, picks, many, sampled, landing)
        keys = [f"g{shape.size}:{pick}" for pick in picks]
        places = self._handles(self.target, shape.size, slots)
        self._spoil(shape.size, landing)
        if op == "get":
            spent, results = timed(self.peer.get_into, list(zip(keys, places)))
        else:
            spent, lists = timed(self.peer.mget_into, list(zip(grouped(keys, many), grouped(places, many))))
            results = [got for each in lists for got in each]
        if results != [shape.size] * len(picks):
            raise WrongContentError(f"{self.name}: {op} missed {results.count(None)} of {len(picks)} stored keys")
        self._compare(shape.size, chosen, landing)
        return spent

    def _burst_put(
        self, op: str, shape: Shape, picks: list[int], many: int, sampled: list[int], landing: list[int]
    ) -> list[int]:
        self._forget()
        keys = [f"p{shape.size}:{self._serial + number}" for number in range(len(picks))]
        self._serial += len(picks)
        self._fresh = keys
        values = self._handles(self.source, shape.size, picks)
        if op == "put":
            spent, results = timed(self.peer.put, list(zip(keys, values)))
        else:
            spent, lists = timed(self.peer.mput, list(zip(grouped(keys, many), grouped(values, many))))
            results = [done for each in lists for done in each]
        if not all(results):
            raise WrongContentError(f"{self.name}: {op} refused {results.count(False)} of {len(picks)} keys")
        self._spoil(shape.size, landing)
        for number, place in zip(sampled, self._handles(self.target, shape.size, landing)):
            if self.peer.get_into(keys[number], place) != shape.size:
                raise WrongContentError(f"{self.name}: a key just stored is not there")
        self._compare(shape.size, [picks[number] for number in sampled], landing)
        return spent

    def _burst_exists(self, op: str, shape: Shape, picks: list[int], many: int) -> list[int]:
        keys = [f"{'gn'[number % 2]}{shape.size}:{pick}" for number, pick in enumerate(picks)]
        if op == "exists":
            spent, results = timed(self.peer.exists, [(key,) for key in keys])
        else:
            spent, lists = timed(self.peer.mexists, [(group,) for group in grouped(keys, many)])
            results = [found for each in lists for found in each]
        if results != [number % 2 == 0 for number in range(len(picks))]:
            raise WrongContentError(f"{self.name}: {op} is wrong about what is stored")
        return spent


class FloorDesk(Desk):
    """No store: the same bytes between the same kinds of array, by slice assignment (a memcpy)."""

    def __init__(self, index: int, source: Array, target: Array):
        super().__init__(FLOOR, index, source, target)
        self._store = source.copy()

    def burst(self, op: str, shape: Shape, picks: list[int], slots: list[int]) -> list[int]:
        if op.endswith("put"):
            into, out_of = self.rows(self._store, shape.size, picks), self.rows(self.source, shape.size, picks)
        else:
            into, out_of = self.rows(self.target, shape.size, slots), self.rows(self._store, shape.size, picks)
        pairs = [(to.data, origin.data) for to, origin in zip(into, out_of)]
        if op in ("get", "put"):
            return timed(_copy, pairs)[0]
        return timed(_copy_all, [(group,) for group in grouped(pairs, shape.batch)])[0]


def _copy(into: memoryview, out_of: memoryview) -> None:
    into[:] = out_of


def _copy_all(pairs: list[tuple[memoryview, memoryview]]) -> None:
    for into, out_of in pairs:
        into[:] = out_of


class Bench:
    def __init__(self, desks: list[Desk], working_set: int, rounds: int, burst: int):
        self.desks = desks
        self.working_set = working_set
        self.rounds = rounds
        self.burst = burst
        self.cells: list[Cell] = []
        self.wrong: list[str] = []

    def run(self, sizes: Sequence[int], ops: Sequence[str]) -> None:
        """Measure all cells; ``exists`` at the first size only, as it does not depend on the size."""
        for number, size in enumerate(sizes):
            shape = Shape.of(size, self.working_set, self.burst)
            unfit: dict[str, str] = {}
            for desk in self.desks:
                self._guarded(unfit, desk, desk.fill, shape)
            ready = [desk for desk in self.desks if desk.name not in unfit]
            for op in ops:
                if op.endswith("exists") and number:
                    continue
                print(f"{op} {size_text(size)}", end=" ", file=sys.stderr, flush=True)
                self.cells += self._cells(op, shape, ready, dict(unfit))
            for desk in self.desks:
                self._guarded(unfit, desk, desk.empty)
        print(file=sys.stderr)

    def _guarded(self, failed: dict[str, str], desk: Desk, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return the call's result, or None and keep the reason: a failure voids this store's cells only."""
        try:
            return call(*arguments)
        except Exception as error:
            failed[desk.name] = f"{type(error).__name__}: {error}"
            self.wrong.append(f"{desk.name}: {failed[desk.name]}")
            return None

    def _cells(self, op: str, shape: Shape, desks: list[Desk], failed: dict[str, str]) -> list[Cell]:
        if op.endswith("exists"):
            desks = [desk for desk in desks if desk.name != FLOOR]
        calls, many = shape.calls(op)
        keys = calls * many
        order = np.random.default_rng(shape.size).permutation(shape.rows)
        slot_count = self.working_set // shape.size
        spent: dict[str, list[list[int]]] = {desk.name: [] for desk in desks}
        gc.collect()
        for turn in range(self.rounds + 1):
            shift = turn % len(desks) if desks else 0
            for desk in desks[shift:] + desks[:shift]:
                if desk.name in failed:
                    continue
                base = turn * keys + desk.index * (shape.rows // (len(self.desks) + 1))
                picks = [int(order[(base + i) % shape.rows]) for i in range(keys)]
                slots = [(base + i) % slot_count for i in range(keys)]
                gc.disable()
                once = self._guarded(failed, desk, desk.burst, op, shape, picks, slots)
                gc.enable()
                if turn and once is not None:
                    spent[desk.name].append(once)
        cells = [summary(op, shape.size, many, name, spent.get(name, []), failed.get(name)) for name in spent]
        cells += [Cell(op, shape.size, many, name, failed=why) for name, why in failed.items() if name not in spent]
        compare(cells)
        return cells


def summary(op: str, size: int, many: int, peer: str, rounds: list[list[int]], failed: str | None) -> Cell:
    cell = Cell(op, size, many, peer, failed=failed)
    if failed is None:
        pooled = sorted(each for spent in rounds for each in spent)
        cell.round_p50 = [round(statistics.median(spent) / many / 1e3, 3) for spent in rounds]
        cell.p50 = statistics.median(cell.round_p50)
        cell.p99 = pooled[min(len(pooled) - 1, len(pooled) * 99 // 100)] / many / 1e3
        cell.samples = len(pooled)
    return cell


def compare(cells: list[Cell]) -> None:
    """Set the ratios of times: medians over the rounds of the ratio within a round."""
    by_name = {cell.peer: cell for cell in cells if cell.failed is None}
    for cell in by_name.values():
        for name, attribute in (("simm", "to_simm"), (FLOOR, "to_memcpy")):
            if (other := by_name.get(name)) is not None:
                ratios = [mine / max(theirs, 1e-3) for mine, theirs in zip(cell.round_p50, other.round_p50)]
                setattr(cell, attribute, round(statistics.median(ratios), 3))


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def time_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.failed is not None:
        return "failed"
    text = f"{time_text(cell.p50)} / {time_text(cell.p99)}"
    text = f"~{text}" if max(cell.round_p50) > UNSTEADY * min(cell.round_p50) else text
    return text if cell.to_simm is None or cell.peer == "simm" else f"{text} (x{time_text(cell.to_simm)})"


def markdown(cells: list[Cell], names: list[str]) -> str:
    """Return a table for each operation: microseconds per key (p50 / p99), and p50 as a multiple of SiMM's."""
    lines = []
    for op in OPS:
        mine = {(cell.size, cell.peer): cell for cell in cells if cell.op == op}
        if not mine:
            continue
        columns = [name for name in names if any(peer == name for _, peer in mine)]
        share = "simm" in columns and FLOOR in columns
        head = ["size x keys", *columns, *(["memcpy/simm"] if share else [])]
        lines += ["", f"### {TITLES[op]}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for size in sorted({size for size, _ in mine}):
            many = next(cell.batch for (each, _), cell in mine.items() if each == size)
            row = [f"{size_text(size)} x {many}", *(cell_text(mine.get((size, name))) for name in columns)]
            if share:
                simm = mine.get((size, "simm"))
                row.append(f"{1 / simm.to_memcpy:.2f}" if simm is not None and simm.to_memcpy else "-")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def machine() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cache = "?"
    with contextlib.suppress(OSError):
        cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, L3 {cache}, "
        f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB, {platform.system()} {platform.release()}, "
        f"{platform.python_implementation()} {platform.python_version()}, numpy {np.__version__}, "
        f"load {os.getloadavg()[0]:.2f}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = ", ".join([*PEERS, *GROUPS])
    parser.add_argument("--peers", default="simm,redis,memcached,mooncake", help=f"comma-separated: {known}")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a value, comma-separated")
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--working-set", type=int, default=256, metavar="MIB", help="values read (default 256)")
    parser.add_argument("--cores", type=int, metavar="N", help="keep everything on the first N cores")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 64 MiB, a minute or less")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.working_set = min(options.rounds, 2), min(options.working_set, 64)
    names = [name for word in options.peers.split(",") for name in GROUPS.get(word, [word])]
    options.peers = list(dict.fromkeys(names))
    options.sizes = [int(word) for word in options.sizes.split(",")]
    options.ops = options.ops.split(",")
    if unknown := (set(options.peers) - set(PEERS)) | (set(options.ops) - set(OPS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if min(options.rounds, options.working_set, *options.sizes) < 1 or options.cores == 0:
        parser.error("--rounds, --working-set, --sizes and --cores must be positive")
    if 2 * max(options.sizes) > options.working_set * MIB:
        parser.error("the working set must hold at least two values of the largest size")
    return options


def bench(options: argparse.Namespace, home: Path, exits: contextlib.ExitStack) -> int:
    free = psutil.virtual_memory().available
    working_set = options.working_set * MIB
    while working_set * MEMORY_FACTOR > free and working_set > 2 * max(options.sizes):
        working_set //= 2
    if working_set != options.working_set * MIB:
        print(f"working set cut to {working_set // MIB} MiB: too little memory", file=sys.stderr)
    source = resident_array(working_set)
    source[:] = np.frombuffer(np.random.default_rng(1).bytes(working_set), dtype=np.uint8)
    target = resident_array(working_set)
    desks: list[Desk] = [FloorDesk(0, source, target)]
    notes: dict[str, str] = {}
    broken = False
    for name in options.peers:
        kind = PEERS[name]
        if (reason := kind.missing()) is not None:
            notes[name] = f"skipped: {reason}"
            continue
        peer = kind(home / name, 4 * working_set, 2 * working_set)
        exits.callback(peer.close)
        try:
            peer.start()
            desks.append(StoreDesk(peer, len(desks), source, target))
            notes[name] = peer.version()
        except Exception as error:
            broken = True
            notes[name] = f"failed to start: {type(error).__name__}: {error}"
            peer.close()
        restore_signals()
    about = machine()
    print(f"{about}\n\nWorking set {working_set // MIB} MiB, {options.rounds} rounds.\n")
    print("\n".join(f"- {name}: {note}" for name, note in notes.items()))
    if len(desks) == 1:
        print("no store to measure", file=sys.stderr)
        return 2
    run = Bench(desks, working_set, options.rounds, burst=working_set // 4)
    run.run(options.sizes, options.ops)
    print("\nMicroseconds per key, p50 / p99 (p50 as a multiple of SiMM's).")
    print(markdown(run.cells, [desk.name for desk in desks]))
    for text in dict.fromkeys(run.wrong):
        print(f"\nFAILED {text}")
    if options.json is not None:
        settings = {"working_set_bytes": working_set, "rounds": options.rounds, "cores": options.cores}
        result: dict[str, Any] = {"machine": about, "peers": notes, "settings": settings, "failed": run.wrong}
        result["cells"] = [asdict(cell) for cell in run.cells]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if run.wrong or broken else 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    restore_signals()
    if options.cores is not None:
        # Every server that is started from here on inherits this.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    home = Path(tempfile.mkdtemp(prefix="simm-peers-"))
    try:
        with contextlib.ExitStack() as exits:
            exits.callback(shutil.rmtree, home, True)
            try:
                return bench(options, home, exits)
            finally:
                # This stops the servers; nothing may interrupt it.
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        return 130
    finally:
        restore_signals()


if __name__ == "__main__":
    sys.exit(main())
