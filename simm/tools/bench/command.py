"""``simm bench``: measure this store on this machine, next to the fastest copy that the machine can do.

    simm bench                                   every operation, on a cluster of its own
    simm bench get mget --size 4K,1M --verify   (or --op get,mget)
    simm bench --path tcp --size 1M --threads 4
    simm bench --trace FILE --room 11200         hit ratios on a trace of requests: see tools/bench/replay.py
    simm bench --manager 10.0.0.5:30001          on a running cluster; its keys are deleted at the end. SIMM_MANAGER
                                                 and the settings file do not count for that

Each operation alternates with its floor (``tools/bench/floor.py``: a bare memcpy, or a bare socket for TCP) in rounds
of about ten milliseconds, in the same threads. A ratio is the median over the rounds of *bandwidth / floor's bandwidth
in the same round*, so other load on the machine affects both. A first round, which does not count, warms caches, page
tables and grants.

put and mput replace values under a rotating set of keys that were stored before. get, mget and view read them. exists
and mexists ask for keys half of which are stored. A view copies nothing: its GiB/s are bytes made readable per second.
``tools/bench/load.py`` says exactly what is timed.

Percentiles are of single calls: exact (nearest rank) up to a million calls per thread, of a random sample beyond.
``us/key`` is the median call divided by its keys.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from ...config.parsers import parse_bytes, parse_duration
from ...config.settings import Settings, add_arguments
from ...constants import VALUE_BYTES_MAX
from ...errors import SimmError, UsageError
from ...net.process import die_with_parent
from ...sdk.local_cluster import LocalCluster
from ..connect import client_arguments, command_settings, manager_client
from ..console import Parser, end_cleanly_on_signals, guarded
from .replay import asks_for_replay
from .replay import main as replay
from .report import (
    GIB,
    OPERATIONS,
    Cell,
    Progress,
    as_json,
    bar_for,
    header,
    machine,
    machine_line,
    percentiles,
    rows,
    size_text,
)

OPS: Final = tuple(OPERATIONS)
DEFAULT_SIZES: Final = "4K,64K,1M,16M"
DEFAULT_BATCH: Final = 32
#: The size of engines' questions, and of the bar for them.
DEFAULT_ASKING_BATCH: Final = 128
DEFAULT_MEMORY: Final = "1G"
DEFAULT_WORKING_SET: Final = 256 << 20
ROUNDS: Final = 10
#: From the order to the common start of all threads, seconds.
LEAD_S: Final = 0.002


# --- the plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The checked command line."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    batches: dict[str, int]
    threads: int
    processes: int
    seconds: float
    verify: bool
    ring: bool
    working_set: int
    #: Arena of the benchmark's own cluster, bytes; 0 if the manager is given.
    memory: int

    @property
    def single(self) -> bool:
        """Whether there is one thread, the case to which the bars apply."""
        return self.threads == self.processes == 1


# --- load processes ---------------------------------------------------------------------------------


class LoadProcesses:
    """The load processes, and the remote side of the raw socket if TCP may be measured. A context manager."""

    def __init__(self, plan: Plan, client: dict[str, Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        self.paths: list[str] = []
        try:
            raw = self._far_side(context, plan) if client["path"] != "shm" else None
            run = f"bench-{secrets.token_hex(6)}"
            for number in range(plan.processes):
                mine, theirs = context.Pipe()
                settings = {
                    "client": client, "run": run, "threads": plan.threads, "first": number * plan.threads,
                    "all_threads": plan.processes * plan.threads, "working_set": plan.working_set,
                    "verify": plan.verify, "raw": raw,
                }  # fmt: skip
                # A child inherits the older pipes too, and would not see its own close if it kept them.
                others = [*self._pipes, mine]
                child = context.Process(target=_load_process, args=(theirs, settings, others), daemon=True)
                child.start()
                theirs.close()
                self._children.append(child)
                self._pipes.append(mine)
            for answer in self._answers():
                self.paths = sorted({*self.paths, *answer["paths"]})
        except BaseException:
            self.close()
            raise

    def _far_side(self, context: Any, plan: Plan) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        share = plan.working_set // (plan.processes * plan.threads)
        child = context.Process(target=_far_process, args=(listener, share), daemon=True)
        child.start()
        self._children.append(child)
        host, port = listener.getsockname()
        listener.close()
        return host, port

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            if child.is_alive():
                child.terminate()
        for child in self._children:
            child.join()
        self._children = []
        self._pipes = []

    def _answers(self) -> Iterator[dict[str, Any]]:
        for pipe in self._pipes:
            try:
                answer: dict[str, Any] = pipe.recv()
            except (EOFError, OSError):
                raise SimmError("a load process ended unexpectedly; look for an out-of-memory kill in dmesg") from None
            if "failed" in answer:
                raise SimmError(answer["failed"])
            yield answer

    def ask(self, what: str, **order: Any) -> list[dict[str, Any]]:
        """Send an order to every load process and return all answers. Raises SimmError if one fails."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the answer gives the reason
                pipe.send((what, order))
        return list(self._answers())


def _as_child() -> None:
    """End with the parent, and leave Ctrl-C to it."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _load_process(pipe: Connection, settings: dict[str, Any], others: list[Connection]) -> None:
    _as_child()
    for other in others:
        other.close()
    from .load import serve_load  # here, to keep the command's process small and without threads

    with contextlib.suppress(EOFError, BrokenPipeError):
        serve_load(pipe, settings)


def _far_process(listener: socket.socket, share: int) -> None:
    _as_child()
    from .floor import serve_raw

    serve_raw(listener, share)


# --- the run ------------------------------------------------------------------------------------------


class Bench:
    """A run of a plan. ``progress`` receives the current step, ``done`` each finished cell."""

    def __init__(
        self, plan: Plan, load: LoadProcesses, progress: Callable[[str], None], done: Callable[[Cell], None]
    ) -> None:  # fmt: skip
        self.plan = plan
        self.load = load
        self.progress = progress
        self.done = done
        self.cells: list[Cell] = []
        self.path = "+".join(load.paths)

    def run(self) -> list[Cell]:
        """Measure and return all cells. Raises SimmError if the cluster fails."""
        plan = self.plan
        smallest = min(plan.sizes)
        work = {
            size: [op for op in plan.ops if OPERATIONS[op].kind != "ask" or size == smallest] for size in plan.sizes
        }
        total = sum(map(len, work.values()))
        for size, ops in work.items():
            if not ops:
                continue
            self.progress(f"storing values of {size_text(size)}")
            batches = self.load.ask("prepare", size=size, batches=plan.batches)[0]["batches"]
            try:
                for op in ops:
                    cell = Cell(op, size, batches.get(op, 1), self.path)
                    self._measure(cell, f"[{len(self.cells) + 1}/{total}]")
                    self.cells.append(cell)
                    self.done(cell)
            finally:
                with contextlib.suppress(SimmError):
                    self.load.ask("discard")
        return self.cells

    def _measure(self, cell: Cell, where: str) -> None:
        seconds = self.plan.seconds / ROUNDS / 2
        totals = {False: [0, 0], True: [0, 0]}
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS + 1):
            counted = number > 0
            pace = f", {rates[False][-1]:,.0f} keys/s" if rates[False] else ""
            self.progress(f"{where} {cell.op} {size_text(cell.size)} x{cell.batch}, round {number}/{ROUNDS}{pace}")
            # They alternate in who goes first.
            for floor in (False, True) if number % 2 else (True, False):
                threads = self._burst(cell, floor, seconds, counted)
                if counted:
                    totals[floor][0] += sum(thread["calls"] for thread in threads)
                    totals[floor][1] += sum(thread["keys"] for thread in threads)
                    rates[floor].append(sum(thread["keys"] * 1e9 / thread["busy_ns"] for thread in threads))
        cell.rounds = list(zip(rates[False], rates[True]))
        for floor, figures in ((False, cell.own), (True, cell.floor)):
            figures.calls, figures.keys = totals[floor]
            parts = [part for answer in self.load.ask("latencies", floor=floor) for part in answer["threads"]]
            figures.p50, figures.p99, figures.p999 = percentiles(parts, (0.5, 0.99, 0.999))
            figures.us_per_key = figures.p50 / cell.batch
            figures.keys_per_s = statistics.median(rates[floor])
            figures.gib_per_s = figures.keys_per_s * cell.size / GIB

    def _burst(self, cell: Cell, floor: bool, seconds: float, counted: bool) -> list[dict[str, int]]:
        at = time.monotonic_ns() + int(LEAD_S * 1e9)
        answers = self.load.ask("burst", op=cell.op, floor=floor, seconds=seconds, counted=counted, at=at)
        threads = [thread for answer in answers for thread in answer["threads"]]
        cell.bad += sum(thread["bad"] for thread in threads)
        # Threads count these since the size began, so the last answer has all of them.
        cell.wrong = sum(answer["wrong"] for answer in answers)
        cell.why_wrong = next((answer["error"] for answer in answers if answer["error"]), "")
        return threads


# --- the command -----------------------------------------------------------------------------------------


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog, description="Measure operations next to a bare memcpy or a bare socket.",
        epilog=f"To replay a trace of requests and measure hit ratios: `{prog} --trace FILE --room BLOCKS`; "
        f"see `{prog} --trace FILE --help`.",
    )  # fmt: skip
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--op", dest="more_ops", action="append", default=[], metavar="LIST", help="the same")
    parser.add_argument("--size", default=DEFAULT_SIZES, metavar="LIST", help=f"value sizes (default: {DEFAULT_SIZES})")
    parser.add_argument(
        "--batch", type=int, metavar="N",
        help=f"keys in a call of mput and mget ({DEFAULT_BATCH}) and mexists ({DEFAULT_ASKING_BATCH})",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads a process (default: 1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="load processes (default: 1)")
    parser.add_argument("--duration", default="1s", metavar="TIME", help="for each operation and size (default: 1s)")
    parser.add_argument("--verify", action="store_true", help="check every value that is read")
    parser.add_argument(
        "--ring", action=argparse.BooleanOptionalAction, default=True, help="commit through shared memory (default)"
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help=f"arena of the cluster that is started without --manager ({DEFAULT_MEMORY})"
    )
    parser.add_argument(
        "--working-set", metavar="BYTES", help="bytes that keys rotate over (256M, at most a quarter of the arena)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too; - is stdout")
    add_arguments(parser, "bench")
    return parser


def plan_from(arguments: argparse.Namespace, settings: Settings) -> Plan:
    """Return the plan for a command line. Raises UsageError, ConfigError."""
    named = ",".join([*arguments.ops, *arguments.more_ops]).replace(",", " ").split()
    ops = tuple(dict.fromkeys(named)) or OPS
    for op in ops:
        if op not in OPS:
            raise UsageError(f"{op!r} is not an operation; choose from {', '.join(OPS)}")
    sizes = tuple(dict.fromkeys(parse_bytes(part) for part in arguments.size.split(",") if part.strip()))
    for size in sizes:
        if not 0 < size <= VALUE_BYTES_MAX:
            raise UsageError(f"--size {size}: a value has 1 to {VALUE_BYTES_MAX} bytes")
    if not sizes:
        raise UsageError("--size names no size; write it as 4K,1M")
    for name, least in (("threads", 1), ("processes", 1), ("batch", 1)):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= 4096:
            raise UsageError(f"--{name} {value}: a number from {least} to 4096")
    # A benchmark loads a cluster and evicts from it: a name in the environment or in a file does not ask for that.
    own = settings.origin("manager") != "--manager"
    if arguments.memory is not None and not own:
        raise UsageError(f"--memory is for a cluster that this command starts; omit it or {settings.origin('manager')}")
    memory = parse_bytes(arguments.memory or DEFAULT_MEMORY) if own else 0
    if arguments.working_set is not None:
        working_set = parse_bytes(arguments.working_set)
        if own and working_set > memory // 2:
            raise UsageError(f"--working-set {arguments.working_set} is more than half of the arena: raise --memory")
    else:
        working_set = min(DEFAULT_WORKING_SET, memory // 4) if own else DEFAULT_WORKING_SET
    if working_set // (arguments.threads * arguments.processes) < max(sizes):
        raise UsageError(
            f"a working set of {working_set >> 20} MiB has no room for a value of {size_text(max(sizes))} in each "
            "thread: raise --memory or --working-set"
        )
    seconds = parse_duration(arguments.duration, "s")
    if not 0.01 <= seconds <= 86_400:
        raise UsageError(f"--duration {arguments.duration}: from 10ms to 24h")
    many = arguments.batch or DEFAULT_BATCH
    batches = {"mput": many, "mget": many, "mexists": arguments.batch or DEFAULT_ASKING_BATCH}
    return Plan(
        ops=ops, sizes=sizes, batches=batches, threads=arguments.threads, processes=arguments.processes,
        seconds=seconds, verify=arguments.verify, ring=arguments.ring, working_set=working_set, memory=memory,
    )  # fmt: skip


def _require_writable(path: str) -> None:
    """Raise UsageError if the report cannot be written, before an hour of measuring."""
    folder = os.path.dirname(os.path.abspath(path))
    target = path if os.path.exists(path) else folder
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(target, os.W_OK):
        raise UsageError(f"--json {path} cannot be written: name a file in a folder that exists and is writable")


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.tools.bench.command") -> int:
    """Measure, print and return the exit code: 1 if a put failed or a value was wrong, else 0. Raises SimmError."""
    words = sys.argv[1:] if argv is None else argv
    if asks_for_replay(words):
        return replay(words, prog)
    arguments = _parser(prog).parse_args(words)
    settings = command_settings("bench", arguments)
    plan = plan_from(arguments, settings)
    client = {**client_arguments(settings), "ring": plan.ring}
    if arguments.json not in (None, "-"):
        _require_writable(arguments.json)
    # With JSON on stdout, the table goes to stderr.
    out = sys.stderr if arguments.json == "-" else sys.stdout
    progress = Progress(sys.stderr)

    def say(line: str) -> None:
        progress("")
        print(line, file=out, flush=True)

    def done(cell: Cell) -> None:
        for line in rows(cell, bar_for(cell, ring=plan.ring, single=plan.single)):
            say(line)

    with contextlib.ExitStack() as stack:
        stack.callback(progress, "")
        if plan.memory:
            progress("starting a cluster")
            cluster = stack.enter_context(LocalCluster(memory=plan.memory))
            client |= {"manager": cluster.manager, "token": cluster.token}
        else:
            manager_client(settings).close()
        load = stack.enter_context(LoadProcesses(plan, client))
        say(machine_line())
        if plan.memory and settings.origin("manager") != "default":
            named = ",".join(map(str, settings.manager))
            say(f"not measured: {named} ({settings.origin('manager')}); to load that cluster, give --manager {named}")
        where = f"a cluster of its own ({plan.memory / GIB:.1f} GiB)" if plan.memory else f"manager {client['manager']}"
        say(
            f"path {'+'.join(load.paths)}, {where}, {plan.processes} process(es) x {plan.threads} thread(s), "
            f"working set {plan.working_set >> 20} MiB, commits by {'ring' if plan.ring else 'socket'}, "
            f"{plan.seconds:g} s each{', values verified' if plan.verify else ''}"
        )
        say("")
        say(header())
        cells = Bench(plan, load, progress, done).run()
        counters = [answer["client"] for answer in load.ask("end")]
    bars = [(cell, bar_for(cell, ring=plan.ring, single=plan.single)) for cell in cells]
    missed = sum(bar is not None and not bar.held_by(cell) for cell, bar in bars)
    if any(bar for _, bar in bars):
        say("")
        say(f"bars: {sum(bar is not None for _, bar in bars) - missed} held, {missed} missed")
    if arguments.json is not None:
        report = {
            "machine": machine(),
            "plan": {
                "sizes": list(plan.sizes), "batches": plan.batches, "threads": plan.threads,
                "processes": plan.processes, "seconds": plan.seconds, "verify": plan.verify, "ring": plan.ring,
                "working_set_bytes": plan.working_set, "memory_bytes": plan.memory or None,
                "settings": {
                    name: value
                    for name, value, origin in settings.rows()
                    if origin != "default" and name != "token_file"
                },
            },
            "results": [as_json(cell, bar) for cell, bar in bars],
            "clients": counters,
        }  # fmt: skip
        text = json.dumps(report, indent=2) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            with open(arguments.json, "w", encoding="utf-8") as target:
                target.write(text)
    failed = any(cell.wrong or (cell.bad and OPERATIONS[cell.op].kind == "put") for cell in cells)
    return 1 if failed else 0


if __name__ == "__main__":
    end_cleanly_on_signals()
    sys.exit(guarded(main, "simm bench"))
