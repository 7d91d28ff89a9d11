"""``simm top``: a live view in a terminal: rates, hit ratio, latency, data servers, hot namespaces, clients.

It looks through the workers of this host, as ``simm ctl`` does, and through the manager's status for the rest of the
cluster. Either may be missing, and the view says which. What is between two looks are rates; latencies too are those of
the calls in between.

The view uses the terminal's alternate screen, so what was there comes back. :class:`Screen` restores the terminal in
every case: `q`, Ctrl-C, SIGTERM, an error. Without a terminal it prints a few plain views, for a log.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, TextIO

from ...config.parsers import parse_duration
from ...config.settings import Settings, add_arguments
from ...errors import TransportError, UsageError, printable
from ...ipc.counts import BUCKETS
from ...ipc.tally import quantile_s
from ...sdk.manager_link import ManagerClient
from ..connect import command_settings, manager_client, on_host
from ..console import EXIT_OK, Parser
from ..nodes import bytes_text, columns, state_text
from .tables import Row, client_rows, ratio, totals_of, worker_rows
from .whose import Meant, cluster_in
from .workers import Asked, ask_all

_ABOUT = (
    "Show the cluster live: rates, hit ratio, latencies, data servers, the namespaces with most gets and puts, "
    "clients. Those of this host are asked by their sockets, the others' load comes from the manager; either may be "
    "missing. q or Ctrl-C ends it, the space bar looks at once. Without a terminal it prints plain views."
)
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_REST: Final = "\x1b[K"
_BELOW: Final = "\x1b[J"
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
#: Between two tries to reach a manager that does not answer, seconds.
RETRY_S: Final = 5.0
#: By namespace, and by operation.
_Namespaces = dict[str, dict[str, int]]
_Latencies = dict[str, list[int]]


class Look:
    """What one look has found: the workers of this host, the manager's status, and why one of them is missing."""

    def __init__(self, asked: Sequence[Asked], status: Mapping[str, Any] | None, trouble: Sequence[str]) -> None:
        self.at = time.monotonic()
        self.asked = asked
        self.status = status
        self.trouble = list(trouble)
        #: Those that have answered. One that began anew is another one.
        self.workers = {(each.name, each.stats["pid"]) for each in asked if each.stats}
        self.namespaces, self.latencies = _summed(asked)

    def of(self, workers: Set[tuple[str, int]]) -> tuple[_Namespaces, _Latencies]:
        """Return what was counted in each namespace, and the latencies, of some of the workers that have answered."""
        if workers == self.workers:
            return self.namespaces, self.latencies
        return _summed([each for each in self.asked if each.stats and (each.name, each.stats["pid"]) in workers])


def _summed(asked: Sequence[Asked]) -> tuple[_Namespaces, _Latencies]:
    totals = totals_of(asked)
    return {name: _counts(words) for name, words in totals.namespaces.items()}, totals.latencies


def _counts(words: Sequence[int]) -> dict[str, int]:
    from ...ipc.tally import counters_summary

    found = counters_summary(words)
    return {
        "hits": found["hits"], "misses": sum(found["misses"].values()), "puts": found["puts"],
        "failed": found["put_failures"], "read": found["bytes_read"], "put": found["bytes_put"],
    }  # fmt: skip


class Sight:
    """Looks at the cluster of some settings. The connection to the manager is kept, and tried again now and then."""

    def __init__(self, settings: Settings, server: str = "") -> None:
        self._settings = settings
        self._server = server
        self._link: ManagerClient | None = None
        self._retry_at = 0.0
        self._why = ""

    def look(self) -> Look:
        """Return what there is now. It takes the time of the slowest worker to answer, 3 s at most."""
        trouble = []
        status = self._status()
        try:
            settings = on_host(self._settings)
            asked = ask_all(settings.runtime_dir, self._server, settings.server_uid)
            asked = Meant(settings).to_look_at(asked, cluster_in(status or {}))
        except UsageError as exc:
            asked = []
            trouble.append(str(exc))
        trouble += [f"{each.name} does not answer: {each.why}" for each in asked if not each.stats]
        if status is None:
            trouble.append(self._why)  # which says that no manager answers, or why one refuses
        return Look(asked, status, trouble)

    def _status(self) -> Mapping[str, Any] | None:
        try:
            if self._link is None:
                if time.monotonic() < self._retry_at:
                    return None
                self._link = manager_client(self._settings)
            return self._link.status()
        except TransportError as exc:
            self.close()
            self._why, self._retry_at = str(exc), time.monotonic() + RETRY_S
            return None

    def close(self) -> None:
        """Close the connection to the manager."""
        if self._link is not None:
            self._link.close()
            self._link = None


# -- the view ----------------------------------------------------------------------------------------


def view(now: Look, before: Look | None, history: Sequence[float], width: int, height: int) -> list[str]:
    """Return the lines of a screen, ``height`` at most, each ``width`` characters at most, without any escape."""
    lines = [*_head(now), *_rates(now, before, history, width)]
    parts = [_servers(now), _namespaces(now, before), _clients(now)]
    left = max(0, height - len(lines) - len(now.trouble))
    for place, part in enumerate(parts):
        # What the later parts need at least stays free for them.
        room = left - sum(min(len(each), 4) for each in parts[place + 1 :])
        shown = part[: max(0, room)]
        lines += shown
        left -= len(shown)
    lines += [f"! {printable(text)}" for text in now.trouble]
    return [_cut(line, width) for line in lines[:height]]


def _head(now: Look) -> list[str]:
    status = now.status
    clock = time.strftime("%H:%M:%S")
    if status is None:
        return [f"simm top  {clock}  this host alone"]
    states: dict[str, int] = {}
    for node in status["nodes"]:
        states[node["state"]] = states.get(node["state"], 0) + 1
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    lost = f", {status['shards_without_owner']:,} shards without an owner" if status["shards_without_owner"] else ""
    moving = f", {status['shards_moving']:,} shards are moving" if status["shards_moving"] else ""
    cluster = f"cluster {status['cluster']}, epoch {status['epoch']}"
    return [f"simm top  {clock}  {cluster}, data servers: {said}{lost}{moving}"]


def grown(now: Look, before: Look | None) -> tuple[dict[str, dict[str, float]], float]:
    """Return what was done in each namespace a second between two looks, and the seconds.

    Of workers that have answered both: what another has counted was not done in between, or is not known.
    """
    seconds = now.at - before.at if before is not None else 0.0
    if before is None or seconds <= 0:
        return {}, 0.0
    both = now.workers & before.workers
    (newer, _), (older, _) = now.of(both), before.of(both)
    found = {}
    for name, counts in newer.items():
        old = older.get(name, dict.fromkeys(counts, 0))
        found[name] = {key: max(0, count - old[key]) / seconds for key, count in counts.items()}
    return found, seconds


def _rates(now: Look, before: Look | None, history: Sequence[float], width: int) -> list[str]:
    done, seconds = grown(now, before)
    keys = ("hits", "misses", "puts", "failed", "read", "put")
    total = {key: sum(each[key] for each in done.values()) for key in keys}
    used, size = _memory(now)
    share = f"{used / size:.0%}" if size else "-"
    if before is None or not seconds:
        return [f"memory {bytes_text(used)} of {bytes_text(size)} ({share})", "gets, puts: after the next look"]
    gets = total["hits"] + total["misses"]
    hits = ratio(round(total["hits"] * seconds), round(total["misses"] * seconds))
    return [
        f"memory {bytes_text(used)} of {bytes_text(size)} ({share})   "
        f"hit ratio {'-' if hits is None else f'{hits:.1%}'}   latency {_latency(now, before)}",
        f"gets {gets:,.0f}/s, {bytes_text(int(total['read']))}/s   puts {total['puts']:,.0f}/s, "
        f"{bytes_text(int(total['put']))}/s, {total['failed']:,.0f}/s failed   {spark(history, min(40, width // 3))}",
    ]


def _memory(now: Look) -> tuple[int, int]:
    if now.status is not None:
        living = [node for node in now.status["nodes"] if node["state"] not in ("dead", "left")]
        workers = [each for node in living for each in node["workers"]]
        return sum(each["used_bytes"] for each in workers), sum(each["capacity_bytes"] for each in workers)
    stats = [each.stats for each in now.asked if each.stats]
    return sum(each["data_bytes"] - each["free_bytes"] for each in stats), sum(each["data_bytes"] for each in stats)


def _latency(now: Look, before: Look) -> str:
    both = now.workers & before.workers
    (_, newer), (_, older) = now.of(both), before.of(both)
    none = [0] * (BUCKETS + 1)
    texts = []
    for operation in ("get", "get_many", "put", "put_many"):
        grew = [max(0, one - other) for one, other in zip(newer.get(operation, none), older.get(operation, none))]
        if (p99 := quantile_s(grew, 0.99)) is not None:
            texts.append(f"{operation} {_time(quantile_s(grew, 0.5))}/{_time(p99)}")
    return ", ".join(texts[:3]) + (" (p50/p99)" if texts else "-")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    return f"{seconds * 1e3:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _cut(line: str, width: int) -> str:
    """Return a line that fits. One that is cut ends with a dot-dot-dot, and never in the middle of a number."""
    if len(line) <= width:
        return line
    return re.sub(r"(?<!\S)[0-9]\S*$", "", line[: width - 1]) + "…"


def spark(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of blocks, the greatest of them the highest."""
    shown = values[-width:] if width > 0 else []
    most = max(shown, default=0.0)
    return "".join(_BLOCKS[round(8 * value / most)] if most > 0 else _BLOCKS[0] for value in shown)


def _servers(now: Look) -> list[str]:
    rows = [["SERVER", "STATE", "USED", "OF", "ENTRIES", "SHARDS", "PUTS", "EVICTED"]]
    if now.status is not None:
        for node in now.status["nodes"]:
            sums = {key: sum(each[key] for each in node["workers"]) for key in (
                "used_bytes", "capacity_bytes", "entries", "shards", "puts", "evictions")}  # fmt: skip
            rows.append([
                printable(node["name"]), state_text(node), bytes_text(sums["used_bytes"]),
                bytes_text(sums["capacity_bytes"]), f"{sums['entries']:,}", f"{sums['shards']:,}", f"{sums['puts']:,}",
                f"{sums['evictions']:,}",
            ])  # fmt: skip
    else:
        rows += [
            [printable(row["worker"]), "silent" if row["reason"] else "fenced" if row["fenced"] else "serving",
             bytes_text(row.get("used_bytes", 0)), bytes_text(row.get("data_bytes", 0)),
             *(f"{row.get(key, 0):,}" for key in ("entries", "shards", "puts", "evictions"))]
            for row in worker_rows(now.asked)
        ]  # fmt: skip
    return ["", *columns(rows, (0, 1))] if len(rows) > 1 else []


def _namespaces(now: Look, before: Look | None) -> list[str]:
    done, _ = grown(now, before)
    rows = [["NAMESPACE", "GETS/S", "HITS", "PUTS/S", "READ/S", "PUT/S", "GETS", "HITS IN ALL"]]
    nothing = dict.fromkeys(("hits", "misses", "puts", "read", "put"), 0.0)
    order = sorted(now.namespaces.items(), key=lambda item: (
        -sum(done.get(item[0], nothing)[key] for key in ("hits", "misses", "puts")),
        -item[1]["hits"] - item[1]["misses"] - item[1]["puts"], item[0],
    ))  # fmt: skip
    for name, counts in order:
        each = done.get(name, nothing)
        gets = each["hits"] + each["misses"]
        rows.append([
            printable(name) or '""', f"{gets:,.0f}", _share(each["hits"], gets), f"{each['puts']:,.0f}",
            bytes_text(int(each["read"])), bytes_text(int(each["put"])), f"{counts['hits'] + counts['misses']:,}",
            _share(counts["hits"], counts["hits"] + counts["misses"]),
        ])  # fmt: skip
    return ["", *columns(rows, (0,))] if len(rows) > 1 else []


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _clients(now: Look) -> list[str]:
    rows: list[list[str]] = [["CLIENT", "PID", "NAMESPACE", "SERVER", "GETS", "PUTS", "GRANTED", "IDLE"]]
    row: Row
    for row in client_rows(now.asked):
        idle = row["idle_s"]
        rows.append([
            printable(row["program"]) or "-", str(row["pid"]), printable(row["namespace"]), printable(row["worker"]),
            f"{row.get('gets', 0):,}", f"{row.get('puts', 0):,}", bytes_text(row["granted_bytes"]),
            "-" if idle is None else f"{idle:.0f}s",
        ])  # fmt: skip
    return ["", *columns(rows, (0, 2, 3))] if len(rows) > 1 else []


# -- the terminal ------------------------------------------------------------------------------------


class Screen:
    """A terminal in its alternate screen that reads single keys. A context manager; it restores the terminal."""

    def __init__(self, source: TextIO, out: TextIO) -> None:
        self._source = source
        self._out = out
        self._fd = source.fileno()
        self._before: list[Any] | None = None

    def __enter__(self) -> Screen:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)  # Ctrl-C stays a signal
        mine = termios.tcgetattr(self._fd)
        mine[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with this screen
        termios.tcsetattr(self._fd, termios.TCSANOW, mine)
        self._out.write(_ENTER)
        self._out.flush()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._out.write(_PLAIN + _LEAVE)
            self._out.flush()
        if self._before is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def size(self) -> tuple[int, int]:
        """Return columns and rows as they are now."""
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(self._out.fileno())
            if found.columns and found.lines:
                return found.columns, found.lines
        return 80, 24

    def show(self, lines: Sequence[str]) -> None:
        """Show lines in place of those before, in one write, so that nothing flickers."""
        styled = []
        for place, line in enumerate(lines):
            style = _BOLD if not place or (line and lines[place - 1] == "") else _RED if line.startswith("! ") else ""
            styled.append(f"{style}{line}{_PLAIN if style else ''}{_REST}")
        self._out.write(_HOME + "\n".join(styled) + _BELOW)
        self._out.flush()

    def wait(self, seconds: float, size: tuple[int, int]) -> str:
        """Wait for a key and return it; "" after so many seconds, or when the window has not the size that was shown.

        Returns "q" when the terminal is gone.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._fd], [], [], min(left, 0.2))
            if ready:
                try:
                    return os.read(self._fd, 1).decode("latin-1") or "q"
                except OSError:
                    return "q"
            if self.size() != size:
                return ""
        return ""


def main(argv: Sequence[str] | None = None, prog: str = "simm top") -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog=prog, description=_ABOUT)
    add_arguments(parser, "client")
    parser.add_argument("--every", metavar="TIME", default="2s", help="between two looks, 0.2s at least (default: 2s)")
    parser.add_argument("--server", metavar="NAME", default="", help="only this data server's workers")
    parser.add_argument("--count", metavar="N", type=int, default=0, help="end after so many views; 0: do not end")
    arguments = parser.parse_args(argv)
    every_s = parse_duration(arguments.every, "s")
    if every_s < 0.2 or arguments.count < 0:
        raise UsageError("--every is 0.2s at least, and --count is not negative")
    settings = command_settings("client", arguments)
    with contextlib.closing(Sight(settings, arguments.server)) as sight:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with Screen(sys.stdin, sys.stdout) as screen:
                return _live(sight.look, screen, every_s, arguments.count)
        for lines in _plain(sight.look, every_s, arguments.count or 2):
            print("\n".join(lines), flush=True)
    return EXIT_OK


def _live(look: Callable[[], Look], screen: Screen, every_s: float, count: int) -> int:
    """Show views until `q`, or so many of them."""
    history: list[float] = []
    before: Look | None = None
    shown = 0
    while True:
        now = look()
        _remember(history, now, before)
        shown += 1
        end = time.monotonic() + every_s
        while True:
            size = screen.size()
            screen.show(view(now, before, history, *size))
            left = end - time.monotonic()
            key = screen.wait(left, size) if left > 0 else ""
            if key in ("q", "Q") or (count and shown >= count):
                return EXIT_OK
            if time.monotonic() >= end or key == " ":
                break
        before = now


def _plain(look: Callable[[], Look], every_s: float, count: int) -> Iterator[list[str]]:
    """Yield views without a terminal: all lines."""
    history: list[float] = []
    before: Look | None = None
    for number in range(count):
        if number:
            time.sleep(every_s)
        now = look()
        _remember(history, now, before)
        yield [*view(now, before, history, shutil.get_terminal_size((120, 40)).columns, 1 << 16), ""]
        before = now


def _remember(history: list[float], now: Look, before: Look | None) -> None:
    done, seconds = grown(now, before)
    if seconds:
        history.append(sum(each["hits"] + each["misses"] for each in done.values()))
        del history[:-200]
