"""``simm trace``: record what calls of this host's clients spend their time on, and show it.

    simm trace start --ratio 0.01 --for 60s     ask all clients of this user on this host to record
    simm trace start --all --for 60s            ask all clients of the cluster, by an admin's token
    simm trace collect -o trace.json            a file for ui.perfetto.dev, and a table of the segments
    simm trace summary trace.json               the table again, of one file or of several
    simm trace stop                             end it before its time
    simm trace clear                            remove what is recorded
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..config.parsers import parse_duration
from ..config.settings import Settings, add_arguments
from ..errors import ConfigError, SimmError, UsageError
from ..net.channel import Refused
from ..tracing import spool
from ..tracing.perfetto import Event, document_text, spans_in
from ..tracing.summary import as_json, summarize, table
from ..wire.messages import Done, Status
from ..wire.trace_messages import RATIO_ALL, AskTrace
from .connect import command_settings, manager_client
from .console import EXIT_OK, Parser

_ABOUT: Final = (
    "Record what calls of clients spend their time on. start asks all clients of this user on this host that use the "
    "same folder, within a second; none is restarted. With --all it is all clients of the cluster. collect merges what "
    "the host's have recorded into a file for ui.perfetto.dev and prints the segments of each operation. See "
    "docs/tracing.md."
)
_ENDED: Final = (
    "what was asked for on this host ends within a second; "
    "clients that trace by their own settings, or for `start --all`, go on"
)
#: A document is read whole.
_DOCUMENT_BYTES_MAX: Final = 1 << 30


def main(argv: Sequence[str], prog: str = "simm trace") -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog=prog, description=_ABOUT)
    add_arguments(parser, "client")
    parser.add_argument("action", choices=("start", "stop", "collect", "summary", "clear"))
    parser.add_argument("files", metavar="FILE", nargs="*", help="for summary: files of collect")
    parser.add_argument("--ratio", default="1", metavar="SHARE", help="of the calls, 0 to 1 (default: %(default)s)")
    parser.add_argument("--for", default="60s", metavar="TIME", dest="seconds", help="end by itself (default: 60s)")
    parser.add_argument(
        "--all", action="store_true", help="start, stop: all clients of the cluster, by an admin's token at the manager"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="for collect: file to write; - is stdout")
    parser.add_argument("--json", action="store_true", help="collect, summary: print the table as JSON")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.files and arguments.action != "summary":
        raise UsageError(f"{arguments.action} takes no file; -o FILE names the one that collect writes")
    if arguments.json and arguments.action not in ("collect", "summary"):
        raise UsageError(f"{arguments.action} takes no --json: it is of the table, for collect and summary")
    settings = command_settings("client", arguments)
    folder = folder_of(settings)
    if arguments.all:
        return _everywhere(settings, arguments)
    if arguments.action == "start":
        return _start(folder, arguments, settings.slow_ms)
    if arguments.action == "stop":
        print(_ENDED if spool.end(folder) else "nobody was asked to trace")
        return EXIT_OK
    if arguments.action == "clear":
        print(f"removed {spool.forget_oldest(folder, keep=0)} files of {folder}")
        return EXIT_OK
    if arguments.action == "summary":
        return _print_table(_read(arguments.files), arguments.json)
    return _collect(folder, arguments)


def folder_of(settings: Settings) -> Path:
    """Return the folder for traces."""
    return settings.trace_dir or settings.runtime_dir / "trace"


def _seconds(arguments: argparse.Namespace) -> float:
    try:
        return parse_duration(arguments.seconds)
    except ConfigError as exc:
        raise UsageError(f"--for: {exc}") from None


def _everywhere(settings: Settings, arguments: argparse.Namespace) -> int:
    """Ask all clients that follow the manager's map, and those that come meanwhile."""
    if arguments.action not in ("start", "stop"):
        raise UsageError(f"{arguments.action} is of this host: run it on each, --all goes with start and stop")
    ask = AskTrace(0, 0, 0)
    if arguments.action == "start":
        seconds, ratio = spool.checked_seconds(_seconds(arguments)), spool.share_of(arguments.ratio)
        ask = AskTrace(round(ratio * RATIO_ALL), settings.slow_ms, max(1, round(seconds)))
    with manager_client(settings) as link:
        try:
            told = link.call(ask, Done).items
        except Refused as exc:
            if exc.status == Status.BAD_REQUEST:
                raise UsageError(f"{exc}; a manager of an older version cannot do it") from None
            raise
    if ask.seconds:
        share = f"{ask.ratio / RATIO_ALL:.4g}"
        print(f"{told:,} clients, and those that come, record {share} of their calls for {ask.seconds} s")
        print("each host has its own: `simm trace collect -o FILE` there, then `simm trace summary FILE...`")
    else:
        print(f"{told:,} clients end it within a second")
    return EXIT_OK


def _start(folder: Path, arguments: argparse.Namespace, slow_ms: int) -> int:
    seconds = _seconds(arguments)
    asked = spool.ask(folder, arguments.ratio, slow_ms, seconds)
    until = time.strftime("%H:%M:%S", time.localtime(asked.until))
    print(f"clients that use {folder} record {asked.ratio:.4g} of their calls until {until}")
    return EXIT_OK


def _collect(folder: Path, arguments: argparse.Namespace) -> int:
    events, bad, refused, left_out = spool.collect(folder)
    if not events:
        raise SimmError(f"{folder} has no spans: `simm trace start` first, and let clients work")
    for count, what in (
        (bad, "lines that are no spans"), (refused, "files that cannot be read or are another user's"),
        (left_out, f"spans, the oldest: {len(events):,} are collected at most"),
    ):  # fmt: skip
        if count:
            print(f"left out {count} {what}", file=sys.stderr)
    if arguments.output:
        if arguments.output == "-":
            sys.stdout.writelines(document_text(events))
            print()
            return EXIT_OK
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.writelines(document_text(events))
        traces = len({event["args"]["trace_id"] for event in events})
        print(f"{arguments.output}: {len(events):,} spans of {traces:,} traces; open it at ui.perfetto.dev",
              file=sys.stderr if arguments.json else sys.stdout, flush=True)  # fmt: skip
    return _print_table(events, arguments.json)


def _read(files: Sequence[str]) -> Iterator[Event]:
    """Yield the spans of files, of which one at a time is in memory. Raises UsageError, OSError."""
    if not files:
        raise UsageError("summary needs a file that `simm trace collect -o FILE` has written")
    for name in files:
        with open(name, "rb") as file:
            text = file.read(_DOCUMENT_BYTES_MAX + 1)
        if len(text) > _DOCUMENT_BYTES_MAX:
            raise UsageError(f"{name} is longer than {_DOCUMENT_BYTES_MAX:,} bytes")
        try:
            found, bad = spans_in(text)
        except ValueError as exc:
            raise UsageError(f"{name} is no trace: {exc}") from None
        if bad:
            print(f"{name}: left out {bad} events that are no spans", file=sys.stderr)
        yield from found


def _print_table(events: Iterable[Event], as_data: bool) -> int:
    rows = summarize(events)
    shown: Any = json.dumps(as_json(rows), indent=2) if as_data else table(rows)
    print(shown)
    return EXIT_OK
