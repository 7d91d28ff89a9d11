"""Hit ratios of eviction policies by room, on a recorded trace and on generated ones: tables, and charts as SVG.

    python benchmarks/eviction.py conversation_trace.jsonl                      # a trace: tables on stdout
    python benchmarks/eviction.py --generate chat,agents                        # generated kinds
    python benchmarks/eviction.py conversation_trace.jsonl --generate all --charts docs --json figures.json

The Mooncake project publishes traces: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache License
2.0). ``simm/traces/formats.py`` describes the formats, ``simm/traces/generate.py`` the kinds.

Everything here is simulated: SiMM's own policies (``simm-*``) by the real allocator and eviction code without servers
and bytes, the others by their textbook. ``simm bench --trace`` measures a real cluster.

Rooms are in units, the size of the smallest model's blocks. For a generated trace they are shares of all its distinct
blocks. ``--count-from 0.5`` counts the second half only, for a policy that was tuned on the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from svg import Line, chart

from simm.errors import SimmError
from simm.traces.formats import Trace, read_trace
from simm.traces.generate import KINDS, generate
from simm.traces.simulate import POLICIES, known_policies, simulate

ROOMS = (1000, 3000, 11_200, 30_000)
SHARES = (0.01, 0.03, 0.1, 0.3)

#: Policy -> colour, dashes, width. A policy without an entry is drawn in the last style.
STYLES = {
    "simm-reuse": ("#c01c28", "", 3.0),
    "simm-lru": ("#1a5fb4", "", 2.5),
    "simm-fifo": ("#5e5c64", "", 2.5),
    "simm-sieve": ("#26a269", "", 2.5),
    "lru": ("#1a5fb4", "6 4", 1.5),
    "fifo": ("#5e5c64", "6 4", 1.5),
    "sieve": ("#26a269", "6 4", 1.5),
    "s3-fifo": ("#e66100", "6 4", 1.5),
    "arc": ("#813d9c", "6 4", 1.5),
    "lru-2": ("#986a44", "6 4", 1.5),
    "min": ("#000000", "2 3", 1.5),
    "unbounded": ("#000000", "", 1.0),
    "": ("#b0347e", "8 3 2 3", 1.5),
}

#: Ratios of blocks: policy -> room -> ratio.
Figures = dict[str, dict[int, float]]


def units_of(trace: Trace) -> int:
    """Return the room in which all distinct blocks fit, in units."""
    return sum({block: trace.units[each.model] for each in trace.requests for block in each.blocks}.values())


def figures_of(
    trace: Trace, rooms: Sequence[int], policies: Sequence[str], count_from: float, jobs: int
) -> Figures:  # fmt: skip
    """Simulate all policies in all rooms. ``count_from`` is a share of the requests."""
    first = int(count_from * len(trace.requests))
    with ProcessPoolExecutor(jobs) as pool:
        asked = {(name, room): pool.submit(_one, trace, room, name, first) for name in policies for room in rooms}
        return {name: {room: asked[name, room].result() for room in rooms} for name in policies}


def _one(trace: Trace, room: int, name: str, first: int) -> float:
    (outcome,) = simulate(trace, room, [name], first)
    return outcome.ratio


def table(figures: Figures) -> str:
    """Return the figures as a table in Markdown. The best of what a server can have is bold."""
    rooms = list(next(iter(figures.values())))
    bounds = ("min", "unbounded")
    best = {room: max([row[room] for name, row in figures.items() if name not in bounds], default=2) for room in rooms}
    lines = ["| policy | " + " | ".join(f"{room:,}" for room in rooms) + " |", "|---" * (len(rooms) + 1) + "|"]
    for name, row in figures.items():
        cells = []
        for room in rooms:
            text = f"{row[room]:.3f}"
            cells.append(f"**{text}**" if name not in bounds and text == f"{best[room]:.3f}" else text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drawn(title: str, figures: Figures) -> str:
    """Return the chart of one trace."""
    lines = [
        Line(name, *STYLES.get(name, STYLES[""]), [(room, ratio) for room, ratio in row.items()])
        for name, row in sorted(figures.items(), key=lambda item: -max(item[1].values()))
    ]
    return chart(title, "room, blocks of one unit", "share of blocks found", lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Hit ratios of eviction policies by room.")
    parser.add_argument("trace", nargs="*", type=Path, help="trace files")
    parser.add_argument("--generate", default="", metavar="KINDS", help=f"{', '.join(KINDS)}; all")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of --generate (%(default)s)")
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="of --generate (%(default)s)")
    parser.add_argument("--rooms", default=",".join(map(str, ROOMS)), metavar="LIST", help="of files (%(default)s)")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), metavar="LIST",
                        help="rooms of generated traces, of all distinct blocks (%(default)s)")  # fmt: skip
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="LIST", help="(%(default)s)")
    parser.add_argument("--count-from", type=float, default=0.0, metavar="SHARE", help="count the requests after it")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="write eviction-NAME.svg there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args(argv)
    try:
        kinds = KINDS if arguments.generate == "all" else tuple(filter(None, arguments.generate.split(",")))
        traces = [(path.stem, read_trace(path)) for path in arguments.trace]
        traces += [(kind, generate(kind, arguments.seed, arguments.requests)) for kind in kinds]
        policies = known_policies(arguments.policies.split(","))
        rooms = [int(room) for room in arguments.rooms.split(",")]
        shares = [float(share) for share in arguments.shares.split(",")]
    except (SimmError, OSError, ValueError) as exc:
        parser.error(str(exc))
    if not traces or min(*rooms, *shares) <= 0:
        parser.error("name a trace file or --generate KINDS; rooms and shares are positive")
    found: dict[str, Figures] = {}
    for number, (name, trace) in enumerate(traces):
        own = rooms if number < len(arguments.trace) else [max(1, int(share * units_of(trace))) for share in shares]
        found[name] = figures_of(trace, own, policies, arguments.count_from, arguments.jobs)
        size = f"{len(trace.requests):,} requests, {trace.blocks:,} blocks, {trace.distinct:,} distinct"
        print(f"\n{trace.name}: {size}\n")
        print(table(found[name]), flush=True)
        if arguments.charts is not None:
            (arguments.charts / f"eviction-{name}.svg").write_text(drawn(trace.name, found[name]), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
