"""``simm demo``: two engines share the KV cache of some prompts through a cluster on this machine.

It shows an engine's use of the cache without an engine: no model runs, and no time of a model is claimed.

1. A cluster starts, with a manager and a data server as separate processes.
2. A first process, the *writer*, takes prompts that share prefixes, divided into pages of 16 tokens. For each prompt it
   asks which pages are stored, computes the missing ones (here: bytes generated from a seed) and puts them.
3. A second process, the *reader*, takes the same prompts, some with one more turn. It asks for the longest stored
   prefix of each, gets the pages into its own buffer, and compares every byte with its own computation.
4. A table shows the pages found, the bandwidth next to alternating bare copies, and latencies at 4 KiB.

Pages are those of Llama 3 8B in bf16: 2 x 32 layers x 16 tokens x 8 heads x 128 numbers x 2 bytes, 1 MiB of keys and
1 MiB of values. A page's name is a sha256 over the tokens up to its end, chained from page to page as in engines, so
only equal prefixes have equal names. ``_0_k`` and ``_0_v`` name its halves on rank 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..client import Client
from ..config.logs import hold_standard_descriptors
from ..config.parsers import parse_bytes, paths
from ..errors import CorruptionError, SimmError, TransportError, UsageError
from ..sdk.local_cluster import WITHOUT_TLS, LocalCluster, child_environment
from .bench.floor import Area, memmove
from .bench.report import machine_line
from .console import Parser, end_cleanly_on_signals, guarded

LAYERS: Final = 32
PAGE_TOKENS: Final = 16
HEADS: Final = 8
HEAD_NUMBERS: Final = 128
NUMBER_BYTES: Final = 2
HALF_BYTES: Final = LAYERS * PAGE_TOKENS * HEADS * HEAD_NUMBERS * NUMBER_BYTES
PAGE_BYTES: Final = 2 * HALF_BYTES
VOCABULARY: Final = 128_256

#: Pages at the start of all prompts, pages that a group of prompts shares, and pages of a single prompt.
SYSTEM_PAGES: Final = 24
GROUP_PAGES: Final = 8
OWN_PAGES: Final = 8
GROUPS: Final = 3
#: Further pages of the reader's prompts, which are not stored.
NEXT_TURN_PAGES: Final = 4
PROMPT_PAGES_MAX: Final = SYSTEM_PAGES + GROUP_PAGES + OWN_PAGES + NEXT_TURN_PAGES

SMALL_BYTES: Final = 4096
SMALL_KEYS: Final = 512
SMALL_CALLS: Final = 4096
DEFAULT_PROMPTS: Final = 12
READY_S: Final = 60.0
_GIB: Final = 1 << 30

assert PAGE_BYTES == 2 << 20


# --- prompts and pages ------------------------------------------------------------------------------


def prompts(count: int, seed: int, *, next_turn: bool) -> list[list[int]]:
    """Return the token ids of ``count`` prompts. With ``next_turn`` every second one has one more turn."""

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
    """Return the name of each whole page: a sha256 over its tokens and the previous page's name."""
    names = []
    chain = b""
    for at in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = np.array(tokens[at : at + PAGE_TOKENS], "<u4").tobytes()
        chain = hashlib.sha256(chain + page).digest()
        names.append(chain.hex())
    return names


def halves(names: Sequence[str]) -> list[str]:
    """Return the keys of the pages' halves: attention keys, then values, page by page."""
    return [f"{name}_0_{half}" for name in names for half in "kv"]


def compute(key: str, target: memoryview) -> None:
    """Fill ``target`` with the half page's bytes, which depend on its key only."""
    words = np.frombuffer(target, np.uint64)
    seed = np.random.SeedSequence(int.from_bytes(hashlib.sha256(key.encode()).digest(), "little"))
    words[:] = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, len(words), np.uint64)


# --- engines ----------------------------------------------------------------------------------------


@dataclass
class Timed:
    """Bytes moved, the seconds in calls, and the seconds of bare copies of the same bytes."""

    bytes: int = 0
    seconds: float = 0.0
    memcpy_seconds: float = 0.0


class Engine:
    """An engine's side of the cache: a host pool of half pages, a client, and a timer.

    The pool holds the longest prompt twice and is used in rotation, so bare copies find memory as cold as the store's.
    """

    def __init__(self, manager: str, path: str) -> None:
        self.client = Client(manager, path=path, **WITHOUT_TLS)
        if not self.client.wait_ready(READY_S):
            why = "; ".join(worker["reason"] for worker in self.client.stats()["workers"]) or "no data server"
            raise TransportError(f"the cluster is not ready: {why}")
        rows = 2 * PROMPT_PAGES_MAX
        self.pool = Area(rows * HALF_BYTES)
        self.pool.fill()
        self.rows = self.pool.rows(0, rows, HALF_BYTES)
        self._pool_addresses = self.pool.addresses(0, rows, HALF_BYTES)
        # A segment made like an arena, to measure copies to and from shared memory without a store.
        self._segment = Area(rows * HALF_BYTES, shared=True)
        self._segment_addresses = self._segment.addresses(0, rows, HALF_BYTES)
        self._at = 0

    def _memcpy(self, count: int, *, into_segment: bool) -> float:
        """Return the seconds that bare copies of ``count`` half pages take."""
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
        """Store the missing pages of a prompt and return (pages found, pages stored)."""
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
        """Get and compare a prompt's longest stored prefix, and return (pages found, pages of the prompt).

        Raises CorruptionError for a byte that differs from the stored one.
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
                raise SimmError(f"{key} was stored a moment ago and is missing now")
            compute(key, expected)
            if length != HALF_BYTES or row != expected:
                raise CorruptionError(f"{key} came back with other bytes than were stored")
        return found, len(names)

    def small(self) -> dict[str, float]:
        """Return the median microseconds of put, get and exists of single 4 KiB values."""
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
    """Run an engine's process and return its figures."""
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


def _engine_process(role: str, cluster: LocalCluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run an engine in a separate Python process and return its report. Raises SimmError if it fails."""
    command = [
        sys.executable, "-m", "simm.tools.demo", "--engine", role, "--manager", cluster.manager,
        "--path", arguments.path, "--prompts", str(arguments.prompts), "--seed", str(arguments.seed),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=cluster.folder,
        env={**child_environment(), "SIMM_TOKEN_FILE": cluster.token_file},
    )  # fmt: skip
    try:
        out, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SimmError(f"the {role} ended with exit code {process.returncode}; its messages are above")
    report: dict[str, Any] = json.loads(out)
    return report


# --- the command --------------------------------------------------------------------------------------


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Two engines share the KV cache of some prompts on this machine.")
    parser.add_argument("--prompts", type=int, default=DEFAULT_PROMPTS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--path", default="auto", metavar="PATHS", help="some of shm, rdma, tcp (default: auto)")
    parser.add_argument("--memory", metavar="BYTES", help="arena (default: by the pages, at least 512M)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of tokens and pages (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--engine", choices=["writer", "reader"], help=argparse.SUPPRESS)
    parser.add_argument("--manager", help=argparse.SUPPRESS)
    return parser


def distinct_pages(count: int) -> int:
    """Return the number of different pages of ``count`` prompts."""
    return SYSTEM_PAGES + min(count, GROUPS) * GROUP_PAGES + count * OWN_PAGES


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.tools.demo") -> int:
    """Run the demo and return 0 if every byte was right. Raises SimmError."""
    hold_standard_descriptors()
    arguments = _parser(prog).parse_args(argv)
    arguments.path = paths(arguments.path)
    if not 1 <= arguments.prompts <= 1000:
        raise UsageError(f"--prompts {arguments.prompts}: a number from 1 to 1000")
    if arguments.engine is not None:
        run = run_engine(arguments.engine, arguments.manager, arguments.path, arguments.prompts, arguments.seed)
        print(json.dumps(run))
        return 0
    need = distinct_pages(arguments.prompts) * PAGE_BYTES
    # A fifth more than the pages, for prefetched grants and the 4 KiB values.
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
        writer = _engine_process("writer", cluster, arguments)
        found, stored = (sum(column) for column in zip(*writer["pages"]))
        say(
            f"2. writer: {arguments.prompts} prompts, {found + stored} pages of 2 MiB; {found} were already stored "
            f"(shared prefixes), {stored} stored by {writer['path']}"
        )
        reader = _engine_process("reader", cluster, arguments)
    hits, wanted = (sum(column) for column in zip(*reader["pages"]))
    say(
        f"3. reader: another process, {wanted} pages wanted, {hits} found by longest prefix "
        f"({wanted - hits} belong to turns that are not stored); every byte compared, all equal"
    )
    if arguments.json:
        print(json.dumps({"writer": writer, "reader": reader, "memory_bytes": memory}, indent=2))
        return 0
    print("\n4. measured")
    for line in report(writer, reader):
        print(f"   {line}")
    print(f"\n{time.monotonic() - began:.1f} s in total. `simm bench` measures more; `simm local` runs a cluster.")
    return 0


def report(writer: dict[str, Any], reader: dict[str, Any]) -> list[str]:
    """Return the lines of the closing table."""
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
    end_cleanly_on_signals()
    sys.exit(guarded(main, "simm demo"))
