"""``simm simulate``: simulate a cluster on a fake network, with faults.

    simm simulate --nodes 1000 --clients 10000 --hours 1 --seed 7    report on one large cluster
    simm simulate --seeds 0:300                                     run many small clusters; exit 1 if one fails
    simm simulate --replay 42 -v                                    repeat one of those and print every event

The command needs no server and opens no socket. A seed gives the same run on any machine and any Python.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

from ..errors import SimmError, UsageError
from ..sim.faults import FAULTS
from ..sim.worker import Options
from ..sim.world import CLIENTS_MOST, Report, World, run_scenario

#: Number of events printed for a failure.
LAST: Final = 60
#: Default faults of a large cluster.
_LARGE: Final = ("crash", "warm", "pause", "worker", "manager", "partition", "drain", "join")


def main(argv: Sequence[str], prog: str = "simm simulate") -> int:
    """Run the command and return 0, or 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Simulate a cluster with faults: manager, data servers, movers, clients.",
        epilog="Kinds of faults: " + "; ".join(f"{name} ({fault.about})" for name, fault in FAULTS.items()) + ".",
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=100, metavar="N", help="data servers (%(default)s)")
    parser.add_argument("--clients", type=int, default=1000, metavar="N", help="clients (%(default)s)")
    parser.add_argument("--hours", type=float, default=0.25, metavar="H", help="simulated hours (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="of everything random (%(default)s)")
    parser.add_argument("--faults", metavar="KINDS", help="comma-separated, or `none`; default: all but old-file, "
                        "island and client-pause, for a large cluster " + ", ".join(_LARGE))  # fmt: skip
    parser.add_argument("--fault-s", type=float, default=60.0, metavar="S", help="mean time between two (%(default)s)")
    parser.add_argument("--seeds", metavar="A:B", help="run the small scenarios of these seeds instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes for --seeds")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one small scenario, and print its end")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every event")
    arguments = parser.parse_args(argv)
    times = arguments.hours, arguments.fault_s
    if min(arguments.nodes, arguments.clients, arguments.jobs) < 1 or not all(0 < each < math.inf for each in times):
        raise UsageError("--nodes, --clients, --jobs, --hours and --fault-s are positive")
    kinds = _kinds(arguments.faults)
    changes: dict[str, Any] = {} if kinds is None else {"faults": kinds}
    if arguments.replay is not None:
        report = run_scenario(arguments.replay, verbose=arguments.verbose, **changes)
        if not arguments.verbose:
            print_last(report)
        print_figures(report)
        return 1 if report.failure else 0
    if arguments.seeds is not None:
        return run_seeds(_range(arguments.seeds), arguments.jobs, changes)
    return _large(arguments, kinds)


def _kinds(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    kinds = tuple(kind for kind in text.split(",") if kind and kind != "none")
    for kind in kinds:
        if kind not in FAULTS:
            raise UsageError(f"there is no fault {kind!r}; there are {', '.join(FAULTS)}")
    return kinds


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        seeds = range(int(first), int(last))
    except ValueError:
        raise UsageError(f"--seeds is FIRST:LAST, like 0:300, not {text!r}") from None
    if not seeds:
        raise UsageError(f"--seeds {text} names none")
    return seeds


# --- small ones, many of them -----------------------------------------------------------------------


def _one(seed: int, changes: dict[str, Any]) -> tuple[int, str, int]:
    report = run_scenario(seed, **changes)
    return seed, report.failure, report.figures["events"]


def failures(seeds: Sequence[int], jobs: int, changes: dict[str, Any]) -> tuple[list[tuple[int, str]], int]:
    """Return (seed, failure) of the failed scenarios, and the total number of events.

    Raises SimmError if one of its processes was ended.
    """
    if jobs == 1 or len(seeds) == 1:
        results = [_one(seed, changes) for seed in seeds]
    else:
        chunk = max(1, min(16, len(seeds) // (4 * jobs)))
        try:
            with ProcessPoolExecutor(jobs) as pool:
                results = list(pool.map(_one, seeds, repeat(changes), chunksize=chunk))
        except BrokenProcessPool as exc:
            raise SimmError(
                "a process of the simulation was ended, perhaps for want of memory: give fewer --jobs"
            ) from exc
    return [(seed, failure) for seed, failure, _ in results if failure], sum(events for _, _, events in results)


def run_seeds(seeds: Sequence[int], jobs: int, changes: dict[str, Any]) -> int:
    """Run scenarios, print the failures and return 1 if there are any."""
    began = time.monotonic()
    bad, events = failures(seeds, jobs, changes)
    seconds = time.monotonic() - began
    for seed, failure in bad:
        print(f"seed {seed}: {failure}   (again: simm simulate --replay {seed} -v)")
    print(
        f"{len(seeds)} scenarios, {events:,} events in {seconds:.1f} s ({len(seeds) / seconds:.1f} a second): "
        + (f"{len(bad)} FAILED" if bad else "nothing wrong")
    )
    return 1 if bad else 0


# --- a large one -------------------------------------------------------------------------------------


def large_options(nodes: int, clients: int, hours: float, seed: int, **changes: Any) -> Options:
    """Return the options of a cluster of that size. The load is sampled; the report's first lines explain how."""
    options = Options(
        nodes=nodes, clients=clients, seconds=hours * 3600, seed=seed, faults=_LARGE, fault_s=60.0,
        fault_lasts_s=(1.0, 60.0), keys=max(2000, 10 * nodes), op_s=5.0, entries=100_000, value_bytes=1 << 20,
        move_bytes_s=1 << 30, sampling=1000,
    )  # fmt: skip
    return replace(options, **changes)


def _large(arguments: argparse.Namespace, kinds: tuple[str, ...] | None) -> int:
    changes: dict[str, Any] = {"fault_s": arguments.fault_s, "verbose": arguments.verbose}
    if kinds is not None:
        changes["faults"] = kinds
    options = large_options(arguments.nodes, arguments.clients, arguments.hours, arguments.seed, **changes)
    print(
        f"{options.nodes:,} data servers, {options.clients:,} clients, {arguments.hours:g} h, seed {options.seed}\n"
        f"sampled: {min(options.clients, CLIENTS_MOST)} clients act, one operation every {options.op_s:g} s each; each "
        f"of the {options.keys:,} values stands for {options.sampling:,} of {options.value_bytes >> 20} MiB",
        flush=True,
    )
    began = time.monotonic()
    report = World(options).run()
    print_large(report, time.monotonic() - began)
    if report.failure:
        print_last(report)
    return 1 if report.failure else 0


def print_large(report: Report, seconds: float) -> None:
    """Print the report of a large cluster."""
    figures, options = report.figures, report.options
    simulated = figures["simulated_s"] or 1.0
    factor = max(1, options.clients) / max(1, min(options.clients, CLIENTS_MOST))
    rate = figures["manager_node_messages"] / simulated + factor * figures["manager_client_messages"] / simulated
    rows = [
        ("simulated", f"{simulated:,.0f} s in {seconds:.0f} s, {figures['events']:,} events, trace {report.trace}"),
        ("faults", ", ".join(f"{count} {name}" for name, count in figures["faults"].items()) or "none"),
        ("detection of a dead server", _spread(figures["detection_s"], "s")),
        ("epochs", f"{figures['epochs']:,} maps, the last is {figures['epoch']:,}"),
        ("moved", f"{figures['moves']:,} shards, {figures['moved_bytes'] / (1 << 30):,.1f} GiB copied"),
        ("operations", f"{figures['gets']:,} gets ({figures['misses']:,} misses), {figures['puts']:,} puts "
                       f"({figures['failed']:,} failed), slowest {figures['slowest_op_s']:.3f} s"),
        ("map", f"{figures['map_bytes']:,} bytes"),
        ("manager", f"{rate:,.0f} messages a second, all {options.clients:,} clients counted"),
        ("checked", f"{figures['checks']:,} times; {figures['exempt_reads']} superseded reads by clients cut off with "
                    f"the server, {figures['split_writes']} mutations there"),
        ("result", f"FAILED: {report.failure}" if report.failure else "nothing wrong"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "none died"
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return f"{len(ordered)}: {ordered[0]:.2f} to {ordered[-1]:.2f} {unit}, median {middle:.2f} {unit}"


def print_last(report: Report) -> None:
    """Print the last events of a run."""
    for when, text in report.last[-LAST:]:
        print(f"{when:10.4f}  {text}")


def print_figures(report: Report) -> None:
    """Print a scenario's figures and its result."""
    for name, value in report.figures.items():
        print(f"{name:24} {value}")
    print(f"{'trace':24} {report.trace}")
    print(f"FAILED: {report.failure}" if report.failure else "nothing wrong")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
