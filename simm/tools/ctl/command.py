"""``simm ctl``, also ``simmctl``: workers, clients, namespaces and slabs of this host, and why clients find nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...config.parsers import parse_duration
from ...config.settings import Settings, add_arguments
from ...errors import UsageError
from ..connect import command_settings
from ..console import EXIT_NO, EXIT_OK, Parser, end_cleanly_on_signals, guarded
from . import why
from .tables import TABLES, Row, namespace_rows, rates_text, table, worker_rows
from .workers import ask_all, require_one

_ABOUT = (
    "Show what the data servers of this host and their clients do, also without a manager. workers: memory, shards, "
    "state. clients: who is connected by shared memory, and what each has done. namespaces: entries, bytes, hit "
    "ratio. slabs: values by size of chunk, and waste. why [NAMESPACE]: why clients find few values, or none. Counts "
    "are those of clients on this host since the worker began. Exit 1 if a worker does not answer, or if why has "
    "found a cause."
)


def main(argv: Sequence[str] | None = None, prog: str = "simm ctl") -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog=prog, description=_ABOUT)
    add_arguments(parser, "client")
    parser.add_argument("what", choices=[*TABLES, "why"], metavar="|".join([*TABLES, "why"]))
    parser.add_argument("only", nargs="?", metavar="NAMESPACE", help="for why: only this one")
    parser.add_argument("--server", metavar="NAME", default="", help="only this data server's workers")
    parser.add_argument("--watch", metavar="TIME", help="show it again after this time, as 2s, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch a line each time")
    arguments = parser.parse_args(argv)
    if arguments.only is not None and arguments.what != "why":
        parser.error("a NAMESPACE goes with why")
    every_s = parse_duration(arguments.watch, "s") if arguments.watch is not None else 0.0
    if arguments.watch is not None and every_s < 0.1:
        raise UsageError("--watch is 0.1s at least")
    settings = command_settings("client", arguments)

    def look() -> tuple[Any, str, bool]:
        return _look(settings, arguments.what, arguments.server, arguments.only or "")

    return _show(look, every_s, as_json=arguments.json, watch=arguments.watch is not None)


def _look(settings: Settings, what: str, server: str, namespace: str) -> tuple[Any, str, bool]:
    """Return rows, their text, and whether all is well. Raises UsageError, TransportError."""
    asked = ask_all(settings.runtime_dir, server)
    if what == "workers":
        rows = worker_rows(asked)
        return rows, table(what, rows), not any(row["reason"] for row in rows)
    require_one(asked)
    silent = "".join(f"\n{each.name} does not answer: {each.why}" for each in asked if not each.stats)
    if what == "why":
        findings = why.explain(worker_rows(asked), namespace_rows(asked), namespace)
        return why.as_json(findings), why.text_of(findings), not any(each.bad for each in findings)
    rows = TABLES[what][0](asked)
    left = sum(each.stats.get("clients_left_out", 0) for each in asked) if what == "clients" else 0
    more = f"\nand {left:,} sessions more" if left else ""
    return rows, table(what, rows) + more + silent, not silent


def _show(
    look: Callable[[], tuple[Any, str, bool]], every_s: float, *, as_json: bool, watch: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> int:  # fmt: skip
    """Show what ``look`` returns, once or again and again, and return the exit code."""
    before: tuple[float, list[Row]] | None = None
    while True:
        rows, text, well = look()
        if watch and rows and isinstance(rows, list):
            now = time.monotonic()
            text += rates_text(rows, before[1], now - before[0]) if before is not None else ""
            before = now, rows
        if as_json:
            print(json.dumps(rows, indent=None if watch else 2), flush=True)
        else:
            clear = "\x1b[H\x1b[J" if watch and sys.stdout.isatty() else ""
            print(f"{clear}{text}", flush=True)
        if not watch:
            return EXIT_OK if well else EXIT_NO
        sleep(every_s)


def simmctl() -> int:
    """Run ``simmctl``, which is ``simm ctl``."""
    end_cleanly_on_signals()
    return guarded(lambda: main(sys.argv[1:], "simmctl"), "simmctl")
