"""``simm demo``: two engines share the KV cache of some prompts through a cluster on this machine.

What is shown is what an engine does, without one: no model runs, and no time of a model is claimed.

1. A cluster is started, a manager and a data server as processes of their own.
2. A first process, the *writer*, takes prompts that share prefixes, cut into pages of 16 tokens. For each it asks which
   pages are there, computes the absent ones (here: bytes drawn from a seed) and puts them.
3. A second process, the *reader*, takes the same prompts, some with a turn more, asks for each one's longest
   stored prefix, gets its pages into a buffer of its own, and compares every byte with what it computes itself.
4. A table: pages found, bytes per second beside a bare memcpy done in turns with them, latencies at 4 KiB.

Pages are those of Llama 3 8B in bf16: 2 x 32 layers x 16 tokens x 8 heads x 128 numbers x 2 bytes, 1 MiB of keys and
1 MiB of values. A page's name is a sha256 over the tokens up to its end, chained from page to page as engines do, so
that equal prefixes have equal names and nothing else has; ``_0_k`` and ``_0_v`` name its halves on rank 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .bench_floor import Area, memmove
from .bench_report import machine_line
from .client import Client
from .console import Parser, end_cleanly_on_sigterm, guarded
from .errors import CorruptionError, SimmError, TransportError, UsageError
from .local import LocalCluster
from .quantities import parse_bytes, paths

LAYERS: Final = 32
PAGE_TOKENS: Final = 16
HEADS: Final = 8
HEAD_NUMBERS: Final = 128
NUMBER_BYTES: Final = 2
HALF_BYTES: Final = LAYERS * PAGE_TOKENS * HEADS * HEAD_NUMBERS * NUMBER_BYTES
PAGE_BYTES: Final = 2 * HALF_BYTES
VOCABULARY: Final = 128_256

#: Pages that all prompts begin with, that a group of them shares, and that each has alone.
SYSTEM_PAGES: Final = 24
GROUP_PAGES: Final = 8
OWN_PAGES: Final = 8
GROUPS: Final = 3
#: What the reader's prompts go on with, and nobody has stored.
NEXT_TURN_PAGES: Final = 4
PROMPT_PAGES_MAX: Final = SYSTEM_PAGES + GROUP_PAGES + OWN_PAGES + NEXT_TURN_PAGES

SMALL_BYTES: Final = 4096
SMALL_KEYS: Final = 512
SMALL_CALLS: Final = 4096
DEFAULT_PROMPTS: Final = 12
READY_S: Final = 10.0
_GIB: Final = 1 << 30

assert PAGE_BYTES == 2 << 20


# --- prompts and pages ------------------------------------------------------------------------------


def prompts(count: int, seed: int, *, next_turn: bool) -> list[list[int]]:
    """Token ids of ``count`` prompts; with ``next_turn`` every second one goes on for some pages."""

    def tokens(pages: int, *what: object) -> list[int]:
        draw = random.Random(f"{seed}/{'/'.join(map(str, what))}")
        return [draw.randrange(VOCABULARY) for _ in range(pages * PAGE_TOKENS)]

    system = tokens(SYSTEM_PAGES, "system")
    groups = [tokens(GROUP_PAGES, "group", number) for number in range(GROUPS)]
    made = []
    for number in range(count):
        prompt = system + groups[number % GROUPS] + tokens(OWN_PAGES, "own", number)
        if next_turn and number % 2:
            prompt += tokens(NEXT_TURN_PAGES, "next", number)
        made.append(prompt)
    return made


def page_names(tokens: Sequence[int]) -> list[str]:
    """The name of each whole page: a sha256 over its tokens and the name of the page before it."""
    names = []
    chain = b""
    for at in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = np.array(tokens[at : at + PAGE_TOKENS], "<u4").tobytes()
        chain = hashlib.sha256(chain + page).digest()
        names.append(chain.hex())
    return names


def halves(names: Sequence[str]) -> list[str]:
    """Keys of the pages' halves: keys of attention, then values, page by page."""
    return [f"{name}_0_{half}" for name in names for half in "kv"]


def compute(key: str, target: memoryview) -> None:
    """What a model would compute for this half page: bytes that only its key decides."""
    words = np.frombuffer(target, np.uint64)
    seed = np.random.SeedSequence(int.from_bytes(hashlib.sha256(key.encode()).digest(), "little"))
    words[:] = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, len(words), np.uint64)


# --- engines ----------------------------------------------------------------------------------------


@dataclass
class Timed:
    """Bytes moved and the seconds in calls, with the same bytes by memcpy in between."""

    bytes: int = 0
    seconds: float = 0.0
    memcpy_seconds: float = 0.0


class Engine:
    """An engine's side of the cache: a host pool of half pages, a client, and the clock.

    The pool has room for the longest prompt twice: each half page in turn is the next one's, so that bare copies
    find memory as cold as the store's.
    """

    def __init__(self, manager: str, path: str) -> None:
        self.client = Client(manager, path=path)
        if not self.client.wait_ready(READY_S):
            why = "; ".join(worker["why"] for worker in self.client.stats()["workers"]) or "no data server"
            raise TransportError(f"the cluster is not ready: {why}")
        rows = 2 * PROMPT_PAGES_MAX
        self.pool = Area(rows * HALF_BYTES)
        self.pool.fill()
        self.rows = self.pool.rows(0, rows, HALF_BYTES)
        self._pool_addresses = self.pool.addresses(0, rows, HALF_BYTES)
        # What a copy to or from shared memory costs without a store: a segment of the same making.
        self._segment = Area(rows * HALF_BYTES, shared=True)
        self._segment_addresses = self._segment.addresses(0, rows, HALF_BYTES)
        self._at = 0

    def _memcpy(self, count: int, *, into_segment: bool) -> float:
        """Seconds that bare copies of ``count`` half pages take."""
        rows = [(self._at + number) % len(self.rows) for number in range(count)]
        self._at += count
        shared, private = self._segment_addresses, self._pool_addresses
        began = time.perf_counter()
        for row in rows:
            if into_segment:
                memmove(shared[row], private[row], HALF_BYTES)
            else:
                memmove(private[row], shared[row], HALF_BYTES)
        return time.perf_counter() - began

    def write(self, prompt: Sequence[int], timed: Timed) -> tuple[int, int]:
        """Store what is absent of a prompt; (pages found, pages stored)."""
        names = page_names(prompt)
        there = self.client.exists_many(halves(names))
        absent = [name for at, name in enumerate(names) if not (there[2 * at] and there[2 * at + 1])]
        keys = halves(absent)
        rows = self.rows[: len(keys)]
        for key, row in zip(keys, rows):
            compute(key, row)
        began = time.perf_counter()
        stored = self.client.put_many(keys, rows)
        timed.seconds += time.perf_counter() - began
        timed.bytes += len(keys) * HALF_BYTES
        timed.memcpy_seconds += self._memcpy(len(keys), into_segment=True)
        if not all(stored):
            raise SimmError(f"{stored.count(False)} half pages were not stored")
        return len(names) - len(absent), len(absent)

    def read(self, prompt: Sequence[int], timed: Timed) -> tuple[int, int]:
        """Get a prompt's longest stored prefix and compare it; (pages found, pages of the prompt).

        Raises CorruptionError for a byte that is not what was stored.
        """
        names = page_names(prompt)
        there = self.client.exists_many(halves(names))
        found = next((at for at in range(len(names)) if not (there[2 * at] and there[2 * at + 1])), len(names))
        keys = halves(names[:found])
        rows = self.rows[: len(keys)]
        timed.memcpy_seconds += self._memcpy(len(keys), into_segment=False)
        began = time.perf_counter()
        lengths = self.client.get_into_many(keys, rows)
        timed.seconds += time.perf_counter() - began
        timed.bytes += len(keys) * HALF_BYTES
        expected = memoryview(bytearray(HALF_BYTES))
        for key, row, length in zip(keys, rows, lengths):
            if length is None:
                raise SimmError(f"{key} was there a moment ago and is not now")
            compute(key, expected)
            if length != HALF_BYTES or row != expected:
                raise CorruptionError(f"{key} came back with other bytes than were stored")
        return found, len(names)

    def small(self) -> dict[str, float]:
        """Median microseconds of put, get and exists of single 4 KiB values."""
        keys = [hashlib.sha256(f"small {number}".encode()).hexdigest() + "_0_k" for number in range(SMALL_KEYS)]
        value, target = self.rows[0][:SMALL_BYTES], self.rows[1][:SMALL_BYTES]
        client, clock = self.client, time.perf_counter_ns
        medians = {}
        for name in ("put", "get", "exists"):
            times = []
            for number in range(SMALL_CALLS):
                key = keys[number % SMALL_KEYS]
                began = clock()
                if name == "put":
                    done: Any = client.put(key, value)
                elif name == "get":
                    done = client.get_into(key, target)
                else:
                    done = client.exists(key)
                times.append(clock() - began)
                if not done:
                    raise SimmError(f"{name} of a 4 KiB value failed")
            medians[name] = statistics.median(times[SMALL_KEYS:]) / 1000
        client.delete_many(keys)
        return medians


def run_engine(role: str, manager: str, path: str, count: int, seed: int) -> dict[str, Any]:
    """Body of an engine's process; what it measured."""
    engine = Engine(manager, path)
    timed = Timed()
    work = engine.write if role == "writer" else engine.read
    pages = [work(prompt, timed) for prompt in prompts(count, seed, next_turn=role == "reader")]
    report = {
        "pages": pages, "bytes": timed.bytes, "seconds": timed.seconds, "memcpy_seconds": timed.memcpy_seconds,
        "path": engine.client.stats()["workers"][0]["path"],
        "small_us": engine.small() if role == "reader" else {},
    }  # fmt: skip
    engine.client.close()
    return report


def _engine_process(role: str, manager: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run an engine as a Python of its own, as engines are. Raises SimmError with what it said."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    package = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    command = [
        sys.executable, "-m", "simm.demo", "--engine", role, "--manager", manager, "--path", arguments.path,
        "--prompts", str(arguments.prompts), "--seed", str(arguments.seed),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
    try:
        out, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SimmError(f"the {role} ended with exit code {process.returncode}; what it said is above")
    report: dict[str, Any] = json.loads(out)
    return report


# --- the command --------------------------------------------------------------------------------------


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Two engines share the KV cache of some prompts on this machine.")
    parser.add_argument("--prompts", type=int, default=DEFAULT_PROMPTS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--path", default="auto", metavar="PATHS", help="some of shm, rdma, tcp (default: auto)")
    parser.add_argument("--memory", metavar="BYTES", help="arena (default: what the pages need, 512M at least)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of tokens and pages (default: 1)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--engine", choices=["writer", "reader"], help=argparse.SUPPRESS)
    parser.add_argument("--manager", help=argparse.SUPPRESS)
    return parser


def distinct_pages(count: int) -> int:
    """Pages that ``count`` prompts have between them."""
    return SYSTEM_PAGES + min(count, GROUPS) * GROUP_PAGES + count * OWN_PAGES


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.demo") -> int:
    """Run the demo; 0 when every byte was right. Raises SimmError."""
    arguments = _parser(prog).parse_args(argv)
    arguments.path = paths(arguments.path)
    if not 1 <= arguments.prompts <= 1000:
        raise UsageError(f"--prompts {arguments.prompts}: a number from 1 to 1000")
    if arguments.engine is not None:
        run = run_engine(arguments.engine, arguments.manager, arguments.path, arguments.prompts, arguments.seed)
        print(json.dumps(run))
        return 0
    need = distinct_pages(arguments.prompts) * PAGE_BYTES
    # A fifth more than the pages: grants are handed out ahead, and the 4 KiB values need a place.
    memory = parse_bytes(arguments.memory) if arguments.memory else max(512 << 20, need * 6 // 5)
    if memory < need:
        raise UsageError(f"--memory {arguments.memory} does not hold the {need >> 20} MiB of pages: fewer --prompts")

    def say(text: str = "") -> None:
        if not arguments.json:
            print(text, flush=True)

    began = time.monotonic()
    say(machine_line())
    with LocalCluster(memory=memory) as cluster:
        say(f"\n1. cluster: manager {cluster.manager}, one data server with {memory >> 20} MiB of shared memory")
        writer = _engine_process("writer", cluster.manager, arguments)
        found, stored = (sum(column) for column in zip(*writer["pages"]))
        say(
            f"2. writer: {arguments.prompts} prompts, {found + stored} pages of 2 MiB; {found} were there already "
            f"(shared prefixes), {stored} stored by {writer['path']}"
        )
        reader = _engine_process("reader", cluster.manager, arguments)
    hits, wanted = (sum(column) for column in zip(*reader["pages"]))
    say(
        f"3. reader: another process, {wanted} pages wanted, {hits} found by longest prefix "
        f"({wanted - hits} belong to turns that nobody has stored); every byte compared, all equal"
    )
    if arguments.json:
        print(json.dumps({"writer": writer, "reader": reader, "memory_bytes": memory}, indent=2))
        return 0
    print("\n4. measured")
    for line in report(writer, reader):
        print(f"   {line}")
    print(f"\n{time.monotonic() - began:.1f} s in all. `simm bench` measures more; `simm local` keeps a cluster up.")
    return 0


def report(writer: dict[str, Any], reader: dict[str, Any]) -> list[str]:
    """The closing table."""
    found, stored = (sum(column) for column in zip(*writer["pages"]))
    hits, wanted = (sum(column) for column in zip(*reader["pages"]))
    lines = [
        f"{'':34}{'SiMM':>12}{'memcpy':>12}{'ratio':>8}",
        f"{'pages not stored twice':34}{found / (found + stored):>12.1%}",
        f"{'hit ratio of the reader':34}{hits / wanted:>12.1%}",
    ]
    for name, run in (("put, batches of absent pages", writer), ("get, batches of a prefix", reader)):
        ours, bare = (run["bytes"] / run[key] / _GIB for key in ("seconds", "memcpy_seconds"))
        lines.append(f"{name + ', GiB/s':34}{ours:>12.2f}{bare:>12.2f}{ours / bare:>8.2f}")
    lines += [f"{f'{name} of 4 KiB, median us':34}{value:>12.2f}" for name, value in reader["small_us"].items()]
    return lines


if __name__ == "__main__":
    end_cleanly_on_sigterm()
    sys.exit(guarded(main, "simm demo"))
