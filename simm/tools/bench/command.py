"""``simm bench``: measure this store on this machine, next to the fastest copy that the machine can do.

    simm bench                                   every operation, on a cluster of its own
    simm bench get mget --size 4K,1M --verify   (or --op get,mget)
    simm bench --path tcp --size 1M --threads 4
    simm bench put mput --state full --batch 32,128,1024     an arena that evicts at every put of a new key
    simm bench --state full --mixed --api kv --size 4K       as engines use it
    simm bench put get --processes 4             several engines on this host
    simm bench put get --model cores=64,gpus=8   what such a host would reach, computed: see tools/bench/model.py
    simm bench --trace FILE --room 11200         hit ratios on a trace of requests: see tools/bench/replay.py
    simm bench --manager 10.0.0.5:30001          on a running cluster; its keys are deleted at the end. SIMM_MANAGER
                                                 and the settings file do not count for that

Each operation alternates with its floor (``tools/bench/floor.py``: a bare memcpy, or a bare socket for TCP) in rounds
of about ten milliseconds, in the same threads. A ratio is the median over the rounds of *bandwidth / floor's bandwidth
in the same round*, so other load on the machine affects both. A first round, which does not count, warms caches, page
tables and grants.

put and mput replace values under a rotating set of keys that were stored before. get, mget and view read them. exists
and mexists ask for keys half of which are stored. A view copies nothing: its GiB/s are bytes made readable per second.
GiB/s are of values that were moved: keys that are not served count as calls only, and not in a ratio. No bar is held
where they are more than a twentieth.
``tools/bench/load.py`` says exactly what is timed.

``--state full`` first fills the arena with values of the size until puts evict steadily. From then on every put is of a
new key, and reads are of the newest ones. ``--mixed`` draws put, get and exists (and mput, mget and mexists) at random;
most reads are of stored keys, the others of keys that were never stored. Its floor copies the same bytes in the same
order.

Percentiles are of single calls: exact (nearest rank) up to a million calls per thread, of a random sample beyond.
``us/key`` is the median call divided by its keys. ``caller`` and ``worker`` are processor time a key, in microseconds:
of the calling thread in its calls, and of the worker (``tools/bench/worker.py``), if it is this command's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ...config.settings import Settings
from ...errors import UsageError
from ...host.buffers import DEFAULT_COPY_THREADS, SPLIT_BYTES, SPREAD_BYTES
from ...sdk.local_cluster import LocalCluster
from ..connect import client_arguments, command_settings, manager_client
from ..console import end_cleanly_on_signals, guarded
from ..nodes import load_text
from . import model
from .measure import Bench
from .plan import Plan, parser_for, plan_from
from .processes import LoadProcesses, reach
from .replay import asks_for_replay
from .replay import main as replay
from .report import FULL, GIB, KV, OPERATIONS, Cell, Progress, as_json, bars_for, header, machine, machine_line, rows
from .worker import LocalWorker


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
    arguments = parser_for(prog).parse_args(words)
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
        for line in rows(cell, bars_for(cell, plan.setup), full=plan.state == FULL):
            say(line)

    def warn(line: str) -> None:
        progress("")
        print(f"{prog}: {line}", file=sys.stderr, flush=True)

    cells: list[Cell] = []
    counters: list[Any] = []
    try:
        for number, part in enumerate(plan.parts()):
            with contextlib.ExitStack() as stack:
                cluster: LocalCluster | None = None
                if plan.memory:
                    progress("starting a cluster")
                    cluster = stack.enter_context(LocalCluster(memory=plan.memory))
                else:
                    with manager_client(settings) as link:
                        lost = load_text(link.status(), plan.working_set)
                    if not number:  # before anything is put
                        say(f"{client['manager']} is a cluster in use: {lost}")
                load = stack.enter_context(LoadProcesses(part, reach(client, settings, cluster)))
                if not number:
                    for line in _about(plan, settings, "+".join(load.paths), client["manager"]):
                        say(line)
                worker = LocalWorker(cluster) if cluster is not None else None
                cells += Bench(part, load, worker, progress, done, warn).run()
                counters += [answer["client"] for answer in load.ask("end")]
    finally:
        progress("")
    results = [(cell, bars_for(cell, plan.setup)) for cell in cells]
    held = [bar.held_by(cell) for cell, bars in results for bar in bars]
    if held:
        say("")
        say(f"bars: {sum(held)} held, {len(held) - sum(held)} missed")
    if plan.host is not None:
        for line in ["", *model.report(cells, plan.host)]:
            say(line)
    if arguments.json is not None:
        report = {
            "machine": machine(), "plan": _plan_as_json(plan, settings),
            "results": [as_json(cell, bars) for cell, bars in results], "clients": counters,
            "model": None if plan.host is None else model.as_json(cells, plan.host),
        }  # fmt: skip
        text = json.dumps(report, indent=2) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            with open(arguments.json, "w", encoding="utf-8") as target:
                target.write(text)
    failed = any(cell.wrong or (cell.bad and OPERATIONS[cell.op].kind == "put") for cell in cells)
    return 1 if failed else 0


def _about(plan: Plan, settings: Settings, path: str, manager: str) -> list[str]:
    """Return what is measured, as lines, and the table's header."""
    lines = [machine_line()]
    if plan.memory and settings.origin("manager") != "default":
        named = ",".join(map(str, settings.manager))
        lines.append(
            f"not measured: {named} ({settings.origin('manager')}); to load that cluster, give --manager {named}"
        )
    where = f"a cluster of its own ({plan.memory / GIB:.1f} GiB)" if plan.memory else f"manager {manager}"
    lines.append(
        f"path {path}, {where}, {plan.processes} process(es) x {plan.threads} thread(s), "
        f"working set {plan.working_set >> 20} MiB, commits by {'ring' if plan.ring else 'socket'}, "
        f"{plan.seconds:g} s each{', values verified' if plan.verify else ''}"
    )
    special = []
    if plan.state == FULL:
        special.append("the arena is full: every put is of a new key, and evicts")
    if plan.api == KV:
        special.append("through simm.kv")
    if plan.mix is not None:
        special.append(f"in random order: {plan.mix}")
    threads = settings.copy_threads or DEFAULT_COPY_THREADS
    if threads > 1:
        special.append(
            f"{threads} threads copy values of {SPLIT_BYTES >> 20} MiB and batches of {SPREAD_BYTES >> 20} MiB, "
            "their floor is one (--copy-threads 1)"
        )
    return [*lines, *(["; ".join(special)] if special else []), "", header()]


def _plan_as_json(plan: Plan, settings: Settings) -> dict[str, Any]:
    return {
        "sizes": list(plan.sizes), "batches": {op: list(sizes) for op, sizes in plan.batches.items()},
        "threads": plan.threads, "processes": plan.processes, "seconds": plan.seconds, "verify": plan.verify,
        "ring": plan.ring, "working_set_bytes": plan.working_set, "memory_bytes": plan.memory or None,
        "state": plan.state, "api": plan.api,
        "mix": None if plan.mix is None else {"weights": plan.mix.weights, "hits": plan.mix.hits},
        "settings": {
            name: value for name, value, origin in settings.rows() if origin != "default" and name != "token_file"
        },
    }  # fmt: skip


if __name__ == "__main__":
    end_cleanly_on_signals()
    sys.exit(guarded(main, "simm bench"))
