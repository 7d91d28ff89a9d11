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

Every store is measured in two states, with servers of its own. With room, it may hold four times what is stored. A full
one, for each size a new one, has been filled until it evicted the first values, so each PUT evicts: SiMM and Mooncake
by the size of their memory, Redis by ``--maxmemory`` and ``allkeys-lru``, memcached by ``-m``. ``mixed`` calls GET, PUT
and exists in random order, the same for all stores; three quarters of the reads are of stored keys.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from peers_desks import Desk, Draw, FloorDesk, Shape, StoreDesk  # noqa: E402
from peers_report import FLOOR, KIB, MIB, ROOM, STATES, Cell, Timed, compare, markdown, size_text, summary  # noqa: E402
from peers_stores import GROUPS, PEERS, Array, resident_array, restore_signals  # noqa: E402

SIZES = (4 * KIB, 16 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB)
#: ``mixed`` calls get, put and exists in random order, ``mmixed`` mget, mput and mexists.
MIXES = {"mixed": ("get", "put", "exists"), "mmixed": ("mget", "mput", "mexists")}
OPS = ("get", "put", "mget", "mput", "exists", "mexists", *MIXES)
#: Share of a mix's reads that are of stored keys, as in ``simm bench --mixed``.
HITS = 0.75
#: What each store may hold, and all stores together, as multiples of the working set (see README.md).
HELD_FACTOR = 4
MEMORY_FACTOR = 26
T = TypeVar("T")


class Bench:
    """The measurement of some stores in one state."""

    def __init__(self, desks: list[Desk], state: str, working_set: int, rounds: int, burst: int):
        self.desks = desks
        self.state = state
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
                for desk in [each for each in ready if not op.endswith("put")]:
                    self._guarded(unfit, desk, desk.refresh, shape)
                self.cells += self._cells(op, shape, [desk for desk in ready if desk.name not in unfit], dict(unfit))
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
        parts = [f"mixed {part}" for part in MIXES[op]] if op in MIXES else [op]
        if op.endswith("exists"):
            desks = [desk for desk in desks if desk.name != FLOOR]
        calls, many = shape.calls(op)
        keys = calls * many
        order = np.random.default_rng(shape.size).permutation(shape.rows)
        slot_count = self.working_set // shape.size
        spent: dict[tuple[str, str], list[Timed]] = {(part, desk.name): [] for part in parts for desk in desks}
        gc.collect()
        for turn in range(self.rounds + 1):
            mix = draws(op, calls, many, turn)
            shift = turn % len(desks) if desks else 0
            for desk in desks[shift:] + desks[:shift]:
                if desk.name in failed:
                    continue
                base = turn * keys + desk.index * (shape.rows // (len(self.desks) + 1))
                picks = [int(order[(base + i) % shape.rows]) for i in range(keys)]
                slots = [(base + i) % slot_count for i in range(keys)]
                gc.disable()
                once = self._guarded(failed, desk, desk.burst, op, shape, picks, slots, mix)
                gc.enable()
                for part, each in (once or {}).items() if turn else ():
                    spent[part, desk.name].append(each)
        found = []
        for part in parts:
            names = dict.fromkeys([*(desk.name for desk in desks), *failed])
            cells = [
                summary(Cell(part, shape.size, many, name, self.state, failed=failed.get(name)),
                        spent.get((part, name), []))
                for name in names
            ]  # fmt: skip
            compare(cells)
            found += cells
        return found


def draws(op: str, calls: int, many: int, turn: int) -> list[Draw]:
    """Return the calls of a mix, the same for all stores; none for another operation. Each part has one at least."""
    if op not in MIXES:
        return []
    draw = random.Random(f"{op}/{calls}/{turn}")
    parts = list(MIXES[op]) + draw.choices(MIXES[op], k=max(0, calls - len(MIXES[op])))
    draw.shuffle(parts)
    return [
        (part, [True] * many if part.endswith("put") else [draw.random() < HITS for _ in range(many)])
        for part in parts[:calls]
    ]


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
    parser.add_argument(
        "--states", default=",".join(STATES), help="room, full: with room for all values, and full (default: both)"
    )
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
    options.states = list(dict.fromkeys(options.states.split(",")))
    unknown = (set(options.peers) - set(PEERS)) | (set(options.ops) - set(OPS)) | (set(options.states) - set(STATES))
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if min(options.rounds, options.working_set, *options.sizes) < 1 or options.cores == 0:
        parser.error("--rounds, --working-set, --sizes and --cores must be positive")
    if 2 * max(options.sizes) > options.working_set * MIB:
        parser.error("the working set must hold at least two values of the largest size")
    return options


def bench(options: argparse.Namespace, home: Path) -> int:
    free = psutil.virtual_memory().available
    working_set = options.working_set * MIB
    while working_set * MEMORY_FACTOR > free and working_set > 2 * max(options.sizes):
        working_set //= 2
    if working_set != options.working_set * MIB:
        print(f"working set cut to {working_set // MIB} MiB: too little memory", file=sys.stderr)
    source = resident_array(working_set)
    source[:] = np.frombuffer(np.random.default_rng(1).bytes(working_set), dtype=np.uint8)
    target = resident_array(working_set)
    about = machine()
    print(f"{about}\n\nWorking set {working_set // MIB} MiB, {options.rounds} rounds.\n")
    cells: list[Cell] = []
    wrong: list[str] = []
    notes: dict[str, str] = {}
    for state, sizes, ops in courses(options):
        with ending_all() as servers:
            desks: list[Desk] = [FloorDesk(0, source, target)]
            for name in options.peers:
                note, desk = open_desk(name, state, len(desks), home, (source, target), servers)
                notes[name] = note
                if desk is not None:
                    desks.append(desk)
                elif note.startswith("failed"):
                    wrong.append(f"{name}: {note}")
            if not cells:
                print("\n".join(f"- {name}: {note}" for name, note in notes.items()), flush=True)
            if len(desks) == 1:
                print("no store to measure", file=sys.stderr)
                return 2
            print(f"{state}:", end=" ", file=sys.stderr)
            run = Bench(desks, state, working_set, options.rounds, burst=working_set // 4)
            run.run(sizes, ops)
            cells += run.cells
            wrong += [f"{state}: {text}" for text in run.wrong]
    print("\nMicroseconds per key, p50 / p99 (p50 as a multiple of SiMM's).")
    print(markdown(cells, [FLOOR, *options.peers]))
    for text in dict.fromkeys(wrong):
        print(f"\nFAILED {text}")
    if options.json is not None:
        settings = {"working_set_bytes": working_set, "rounds": options.rounds, "cores": options.cores}
        result: dict[str, Any] = {"machine": about, "peers": notes, "settings": settings, "failed": wrong}
        result["cells"] = [asdict(cell) for cell in cells]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


def courses(options: argparse.Namespace) -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield what the same servers measure: a state, sizes and operations.

    Stores are filled with values of one size. None of them is at its best when the old values are of another one.
    """
    for state in options.states:
        if state == ROOM:
            yield state, options.sizes, options.ops
            continue
        for number, size in enumerate(options.sizes):
            ops = [op for op in options.ops if not (number and op.endswith("exists"))]
            if ops:
                yield state, [size], ops


@contextlib.contextmanager
def ending_all() -> Iterator[contextlib.ExitStack]:
    """Yield a stack of what ends servers, and run it at the end, which nothing may interrupt."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            stack.close()
        finally:
            restore_signals()


def open_desk(
    name: str, state: str, index: int, home: Path, arrays: tuple[Array, Array], servers: contextlib.ExitStack
) -> tuple[str, Desk | None]:
    """Start a store in one state. Return its version and its desk, or why there is none."""
    kind = PEERS[name]
    if (reason := kind.missing()) is not None:
        return f"skipped: {reason}", None
    size = arrays[0].nbytes
    peer = kind(Path(tempfile.mkdtemp(dir=home)) / name, HELD_FACTOR * size, 2 * size, state)
    servers.callback(peer.close)
    try:
        peer.start()
        return peer.version(), StoreDesk(peer, index, *arrays)
    except Exception as error:
        peer.close()
        return f"failed to start: {type(error).__name__}: {error}", None
    finally:
        restore_signals()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    restore_signals()
    if options.cores is not None:
        # Every server that is started from here on inherits this.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    home = Path(tempfile.mkdtemp(prefix="simm-peers-"))
    try:
        try:
            return bench(options, home)
        finally:
            shutil.rmtree(home, True)
    except KeyboardInterrupt:
        return 130
    finally:
        restore_signals()


if __name__ == "__main__":
    sys.exit(main())
