"""``simm bench``: how fast this store is on this machine, beside the fastest that this machine can copy.

    simm bench                                   every operation, on a cluster of its own
    simm bench get mget --size 4K,1M --verify   (or --op get,mget)
    simm bench --path tcp --size 1M --threads 4
    simm bench --manager 10.0.0.5:30001          on a running cluster; its keys are deleted at the end

Each operation takes turns with its floor (``bench_floor.py``: a bare memcpy, or a bare socket for TCP) in rounds of
some ten milliseconds, in the same threads. A ratio is the median over the rounds of *bandwidth / floor's
bandwidth in the same round*, so a neighbour that takes the machine away for a second takes it from both. One
round before the counted ones warms caches, page tables and grants.

put and mput replace values under a rotating set of keys (stored once before); get, mget and view read them;
exists and mexists ask for keys of which half are there. A view copies nothing: its GiB/s are bytes made
readable per second. ``bench_load.py`` says what exactly is timed.

Percentiles are of single calls, exact (nearest rank) up to a million calls a thread, of a random sample beyond.
``us/key`` is the median call by the keys in it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from .bench_report import (
    ASKING,
    GIB,
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
from .config import Settings, add_arguments, load_command
from .connect import client_arguments, manager_client
from .console import Parser, end_cleanly_on_sigterm, guarded
from .constants import VALUE_BYTES_MAX
from .errors import SimmError, UsageError
from .local import LocalCluster
from .process import die_with_parent
from .quantities import parse_bytes, parse_duration
from .startup import set_up_logging

OPS: Final = ("put", "get", "exists", "mput", "mget", "mexists", "view")
DEFAULT_SIZES: Final = "4K,64K,1M,16M"
DEFAULT_BATCH: Final = 32
#: The size of engines' questions, and of the bar's.
DEFAULT_ASKING_BATCH: Final = 128
DEFAULT_MEMORY: Final = "1G"
DEFAULT_WORKING_SET: Final = 256 << 20
ROUNDS: Final = 10
#: From the parent's order to the threads' common start, seconds.
LEAD_S: Final = 0.002


# --- the plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the command line asks for, checked."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    batches: dict[str, int]
    threads: int
    processes: int
    seconds: float
    verify: bool
    ring: bool
    working_set: int
    #: Arena of a cluster of our own, bytes; 0: the manager is given.
    memory: int

    @property
    def single(self) -> bool:
        """One thread: the bars are stated for that."""
        return self.threads == self.processes == 1


# --- load processes ---------------------------------------------------------------------------------


class Crew:
    """The load processes, and the raw socket's far side where TCP may be measured. A context manager."""

    def __init__(self, plan: Plan, client: dict[str, Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        self.paths: list[str] = []
        self.workers = 0
        try:
            raw = self._far_side(context, plan) if client["path"] != "shm" else None
            run = f"bench-{secrets.token_hex(6)}"
            for number in range(plan.processes):
                mine, theirs = context.Pipe()
                settings = {
                    "client": client, "run": run, "threads": plan.threads, "first": number * plan.threads,
                    "lanes": plan.processes * plan.threads, "working_set": plan.working_set, "verify": plan.verify,
                    "raw": raw,
                }  # fmt: skip
                # Every older pipe is inherited too; a child that kept them would never see its own close.
                others = [*self._pipes, mine]
                child = context.Process(target=_load_process, args=(theirs, settings, others), daemon=True)
                child.start()
                theirs.close()
                self._children.append(child)
                self._pipes.append(mine)
            for answer in self._answers():
                self.paths = sorted({*self.paths, *answer["paths"]})
                self.workers = answer["workers"]
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

    def __enter__(self) -> Crew:
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
                answer: dict[str, Any] = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise SimmError("a load process ended unexpectedly; look for an out-of-memory kill in dmesg") from None
            if "failed" in answer:
                raise SimmError(answer["failed"])
            yield answer

    def ask(self, what: str, **order: Any) -> list[dict[str, Any]]:
        """Give every load process an order, and wait for all answers. Raises SimmError when one fails."""
        body = json.dumps({"do": what, **order}).encode()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # its answer says why
                pipe.send_bytes(body)
        return list(self._answers())

    def samples(self, floor: bool) -> list[tuple[int, bytes]]:
        """Take all lanes' latencies of the last cell."""
        parts = []
        for pipe, answer in zip(self._pipes, self.ask("samples", floor=floor)):
            parts += [(count, pipe.recv_bytes()) for count in answer["counts"]]
        return parts


def _as_child() -> None:
    """The parent ends us; a Ctrl-C at the terminal is its business."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _load_process(pipe: Connection, settings: dict[str, Any], others: list[Connection]) -> None:
    _as_child()
    for other in others:
        other.close()
    from .bench_load import serve_load  # here, so that the command's process stays small and without threads

    with contextlib.suppress(EOFError, BrokenPipeError):
        serve_load(pipe, settings)


def _far_process(listener: socket.socket, share: int) -> None:
    _as_child()
    from .bench_floor import serve_raw

    serve_raw(listener, share)


# --- the run ------------------------------------------------------------------------------------------


class Bench:
    """Runs a plan on a crew. ``progress`` is told what is under way, ``done`` gets each finished cell."""

    def __init__(
        self, plan: Plan, crew: Crew, progress: Callable[[str], None], done: Callable[[Cell], None]
    ) -> None:  # fmt: skip
        self.plan = plan
        self.crew = crew
        self.progress = progress
        self.done = done
        self.cells: list[Cell] = []
        self.path = "+".join(crew.paths)

    def run(self) -> list[Cell]:
        """All cells. Raises SimmError when the cluster fails."""
        plan = self.plan
        smallest = min(plan.sizes)
        work = {size: [op for op in plan.ops if op not in ASKING or size == smallest] for size in plan.sizes}
        total = sum(map(len, work.values()))
        for size, ops in work.items():
            if not ops:
                continue
            self.progress(f"storing values of {size_text(size)}")
            batches = self.crew.ask("prepare", size=size, batches=plan.batches)[0]["batches"]
            try:
                for op in ops:
                    cell = Cell(op, size, batches.get(op, 1), self.path)
                    self._measure(cell, f"[{len(self.cells) + 1}/{total}]")
                    self.cells.append(cell)
                    self.done(cell)
            finally:
                with contextlib.suppress(SimmError):
                    self.crew.ask("forget")
        return self.cells

    def _measure(self, cell: Cell, where: str) -> None:
        seconds = self.plan.seconds / ROUNDS / 2
        totals = {False: [0, 0], True: [0, 0]}
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS + 1):
            counted = number > 0
            pace = f", {rates[False][-1]:,.0f} keys/s" if rates[False] else ""
            self.progress(f"{where} {cell.op} {size_text(cell.size)} x{cell.batch}, round {number}/{ROUNDS}{pace}")
            # Each goes first in every second round.
            for floor in (False, True) if number % 2 else (True, False):
                lanes = self._burst(cell, floor, seconds, counted)
                if counted:
                    totals[floor][0] += sum(lane["calls"] for lane in lanes)
                    totals[floor][1] += sum(lane["keys"] for lane in lanes)
                    rates[floor].append(sum(lane["keys"] * 1e9 / lane["busy_ns"] for lane in lanes))
        cell.rounds = list(zip(rates[False], rates[True]))
        for floor, figures in ((False, cell.own), (True, cell.floor)):
            figures.calls, figures.keys = totals[floor]
            parts = self.crew.samples(floor)
            figures.p50, figures.p99, figures.p999 = percentiles(parts, (0.5, 0.99, 0.999))
            figures.us_per_key = figures.p50 / cell.batch
            figures.keys_per_s = statistics.median(rates[floor])
            figures.gib_per_s = figures.keys_per_s * cell.size / GIB

    def _burst(self, cell: Cell, floor: bool, seconds: float, counted: bool) -> list[dict[str, int]]:
        at = time.monotonic_ns() + int(LEAD_S * 1e9)
        answers = self.crew.ask("burst", op=cell.op, floor=floor, seconds=seconds, counted=counted, at=at)
        lanes = [lane for answer in answers for lane in answer["lanes"]]
        cell.bad += sum(lane["bad"] for lane in lanes)
        # Counted in the lanes since the size began, so that the last answer says it all.
        cell.wrong = sum(answer["wrong"] for answer in answers)
        cell.why_wrong = next((answer["error"] for answer in answers if answer["error"]), "")
        return lanes


# --- the command -----------------------------------------------------------------------------------------


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Measure operations beside a bare memcpy or a bare socket.")
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
    """Check what was asked for. Raises UsageError, ConfigError."""
    named = ",".join([*arguments.ops, *arguments.more_ops]).replace(",", " ").split()
    ops = tuple(dict.fromkeys(named)) or OPS
    for op in ops:
        if op not in OPS:
            raise UsageError(f"{op!r} is no operation; choose from {', '.join(OPS)}")
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
    own = settings.origin("manager") == "default"
    if arguments.memory is not None and not own:
        raise UsageError(f"--memory is for a cluster of our own; leave it or {settings.origin('manager')} away")
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
    """Say so before an hour of measuring, not after."""
    folder = os.path.dirname(os.path.abspath(path))
    target = path if os.path.exists(path) else folder
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(target, os.W_OK):
        raise UsageError(f"--json {path} cannot be written: name a file in a folder that is there and yours")


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.bench") -> int:
    """Measure and print. 0; 1 when a put failed or a wrong value was read. Raises SimmError."""
    arguments = _parser(prog).parse_args(argv)
    settings = load_command("bench", arguments)
    if settings.origin("log_level") == "default":
        settings = dataclasses.replace(settings, log_level="error")
    set_up_logging(settings)
    plan = plan_from(arguments, settings)
    client = {**client_arguments(settings), "ring": plan.ring}
    if arguments.json not in (None, "-"):
        _require_writable(arguments.json)
    # With the figures as JSON on stdout, people read on stderr.
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
            client["manager"] = cluster.manager
        else:
            manager_client(settings).close()
        crew = stack.enter_context(Crew(plan, client))
        say(machine_line())
        where = f"a cluster of its own ({plan.memory / GIB:.1f} GiB)" if plan.memory else f"manager {client['manager']}"
        say(
            f"path {'+'.join(crew.paths)}, {where}, {plan.processes} process(es) x {plan.threads} thread(s), "
            f"working set {plan.working_set >> 20} MiB, commits by {'ring' if plan.ring else 'socket'}, "
            f"{plan.seconds:g} s each{', values verified' if plan.verify else ''}"
        )
        say("")
        say(header())
        cells = Bench(plan, crew, progress, done).run()
        counters = [answer["client"] for answer in crew.ask("end")]
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
    failed = any(cell.wrong or (cell.bad and cell.op in ("put", "mput")) for cell in cells)
    return 1 if failed else 0


if __name__ == "__main__":
    end_cleanly_on_sigterm()
    sys.exit(guarded(main, "simm bench"))
