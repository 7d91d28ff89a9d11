"""``simm status`` and ``simm node``: show the cluster; empty a data server before it stops, or take it back.

The manager performs a drain. ``simm node drain`` requests it and then watches, so Ctrl-C, ``--timeout`` or the end of
the terminal end only the watching. The same command resumes it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TextIO

from ..client import Client
from ..cluster.nodes import GONE
from ..config.settings import Settings
from ..errors import SimmError, TransportError, UsageError, printable
from ..net.channel import Refused
from ..sdk.manager_link import ManagerClient
from ..wire.messages import Status
from .connect import manager_client

#: Long enough to try every path once; a server that does not answer is shown as down.
REACH_S: Final = 3.0
#: Between two requests to the manager, and between two lines where lines cannot be rewritten, seconds.
POLL_S: Final = 0.25
LINE_S: Final = 5.0
#: The watching ends after this time without a manager, seconds; until then another one may take over.
SILENCE_S: Final = 60.0
#: How old the counts of a status may be: a worker tells them once a second, the manager hears them a second later, and
#: gives the same answer for a second.
COUNTS_S: Final = 3.5
_RUNNING: Final = ("running", "draining")
_UNITS: Final = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
_EMPTY: Final = "no data server has joined: start one with `simm dataserver --manager HOST:PORT`"


# --- the cluster ------------------------------------------------------------------------------------


def collect(settings: Settings, client: Client) -> dict[str, Any]:
    """Return the manager's status, with ``path`` and ``reason`` of each worker as seen from this host.

    Loads (bytes, entries, puts, evictions) are those of each server's last heartbeat. Raises TransportError.
    """
    with manager_client(settings) as manager:
        found = manager.status()
    if any(node["workers"] for node in found["nodes"]):
        client.wait_ready(min(REACH_S, settings.deadline_ms / 1000))
    paths = {(each["node"], each["worker"]): each for each in client.stats()["workers"]}
    for node in found["nodes"]:
        for worker in node["workers"]:
            seen = paths.get((node["name"], worker["worker"]))
            worker["path"] = seen["path"] if seen is not None else "down"
            worker["reason"] = seen["reason"] if seen is not None else "it is not in the shard map"
    return found


def healthy(found: dict[str, Any]) -> bool:
    """Return whether every shard has an owner and every worker of a running server is reachable."""
    workers = [worker for node in found["nodes"] if node["state"] in _RUNNING for worker in node["workers"]]
    return bool(workers) and not found["shards_without_owner"] and all(each["path"] != "down" for each in workers)


def bytes_text(count: int) -> str:
    """Return bytes as ``1.5G``, ``512K`` or ``0``."""
    for unit, scale in _UNITS:
        if count >= scale:
            return f"{count / scale:.1f}".removesuffix(".0") + unit
    return str(count)


def columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return rows as lines with aligned columns, those in ``left`` flush left and the others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def moves_text(found: Mapping[str, Any]) -> str:
    """Return a sentence on the shards that move between servers, empty if none does."""
    if not found["shards_moving"] and not found["shards_waiting"]:
        return ""
    parts = [f"{found['shards_moving']:,} shards are moving"]
    if found["shards_waiting"]:
        parts.append(f"{found['shards_waiting']:,} wait for their turn")
    parts.append(f"{bytes_text(found['moved_bytes'])} copied")
    if found["move_rate"]:
        parts.append(f"{bytes_text(found['move_rate'])}/s")
    if found["eta_s"] is not None:
        parts.append(f"about {found['eta_s']:.0f} s for those that move")
    return ", ".join(parts)


def cluster_lines(found: Mapping[str, Any]) -> list[str]:
    """Return what there is to say of the cluster as a whole, for people."""
    moved = f", {found['shards_without_owner']:,} without an owner" if found["shards_without_owner"] else ""
    lines = [f"cluster {found['cluster']}, epoch {found['epoch']}, {found['shards']:,} shards{moved}"]
    own = found["manager"]
    if own.get("leader"):
        lines.append(f"led by the manager at {own['leader']}, term {own['term']}")
    if found["rebuilding"]:
        lines.append("the manager has lost its state and is collecting the map from the servers")
    return [*lines, *filter(None, [moves_text(found), left_out_text(found)])]


def left_out_text(found: Mapping[str, Any]) -> str:
    """Return a sentence on the data servers that a manager's status only counts, empty if there are none."""
    count = found.get("nodes_left_out", 0)  # managers of older versions name all
    return f"{count:,} more data servers are known and not shown, those that are away longest" if count else ""


def cluster_table(found: dict[str, Any]) -> str:
    """Return the cluster's status as text, for people."""
    moves = moves_text(found)
    lines = [*cluster_lines(found), ""]
    heads = ["SERVER", "STATE", "NUMA", "ADDRESS", "USED", "OF", "ENTRIES", "PUTS", "EVICTED", "SHARDS", "PATH"]
    rows = [heads[:-1] + (["IN", "OUT"] if moves else []) + heads[-1:]]
    notes = []
    for node in found["nodes"]:
        for each in node["workers"]:
            moving = [f"{each['moving_in']:,}", f"{each['moving_out']:,}"] if moves else []
            rows.append(
                [
                    f"{node['name']}/{each['worker']}", state_text(node), str(each["numa_node"]), each["address"],
                    bytes_text(each["used_bytes"]), bytes_text(each["capacity_bytes"]), f"{each['entries']:,}",
                    f"{each['puts']:,}", f"{each['evictions']:,}", f"{each['shards']:,}", *moving, each["path"],
                ]
            )  # fmt: skip
            if each["reason"] and node["state"] in _RUNNING:
                notes.append(f"{node['name']}/{each['worker']} by {each['path']}: {each['reason']}")
    if len(rows) == 1:
        return "\n".join([*lines, _EMPTY])
    lines += columns(rows, left=(0, 1, 3, len(rows[0]) - 1))
    return "\n".join([*lines, *([""] if notes else []), *notes])


def state_text(node: Mapping[str, Any]) -> str:
    """Return a node's state as a word, with its drain if it is away or suspect."""
    if node["drained"]:
        return "drained" if node["state"] == "draining" else f"{node['state']}, drained"
    if node["draining"] and node["state"] != "draining":
        return f"{node['state']}, to drain"
    return str(node["state"])


def node_table(found: Mapping[str, Any]) -> str:
    """Return the data servers as text, for people."""
    rows = [("NAME", "STATE", "WORKERS", "SHARDS", "IN", "OUT", "USED", "OF", "ADDRESS")]
    for node in found["nodes"]:
        workers = node["workers"]

        def total(key: str, workers: Any = workers) -> int:
            return sum(worker[key] for worker in workers)

        rows.append(
            (
                node["name"], state_text(node), str(len(workers)), f"{total('shards'):,}", f"{total('moving_in'):,}",
                f"{total('moving_out'):,}", bytes_text(total("used_bytes")), bytes_text(total("capacity_bytes")),
                workers[0]["address"],
            )
        )  # fmt: skip
    if len(rows) == 1:
        return _EMPTY
    lines = columns(rows, left=(0, 1, 8))
    waiting = [node["name"] for node in found["nodes"] if node["draining"] and node["state"] not in GONE]
    if waiting:
        lines += ["", f"take one back with `simm node resume {waiting[0]}`"]
    if left_out := left_out_text(found):
        lines += ["", left_out]
    return "\n".join(lines)


# --- drains -----------------------------------------------------------------------------------------


def request(link: ManagerClient, name: str, on: bool) -> int:
    """Start or end a drain and return the number of shards that the node owns now.

    Raises UsageError for an unknown name, SimmError if no other server could hold the shards, TransportError.
    """
    try:
        shards = link.drain(name, on)
        warn_of_trouble(link)
        return shards
    except Refused as exc:
        if exc.status == Status.UNKNOWN_NODE:
            raise UsageError(f"{exc}; `simm node list` shows all") from None
        if exc.status in (Status.UNAVAILABLE, Status.BUSY):
            raise SimmError(str(exc)) from None
        raise


def warn_of_trouble(link: ManagerClient) -> None:
    """Say it if the manager may forget an order that it has confirmed: its disk fails, or takes too long."""
    with contextlib.suppress(TransportError):
        own = link.status()["manager"]
        if own.get("trouble") and not own["state_stored"]:
            print(f"simm: {printable(own['trouble'])}: a manager that restarts now forgets this order", file=sys.stderr)


def find(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a node of a status by its name."""
    return next((node for node in found["nodes"] if node["name"] == name), None)


def shards_left(node: Mapping[str, Any]) -> int:
    """Return the number of shards that a node owns or that others still copy from it."""
    return sum(worker["shards"] + worker["moving_out"] for worker in node["workers"])


def room_text(found: Mapping[str, Any], name: str) -> str:
    """Return a sentence if the other servers have no room for a node's values; otherwise an empty string."""
    node = find(found, name)
    if node is None:
        return ""
    takers = [
        each for each in found["nodes"]
        if each["name"] != name and each["state"] in _RUNNING and not each["draining"]
    ]  # fmt: skip
    used = sum(worker["used_bytes"] for worker in node["workers"])
    room = sum(max(0, worker["capacity_bytes"] - worker["used_bytes"]) for each in takers for worker in each["workers"])
    if not takers or used <= room:
        return ""
    return (
        f"{name} holds {bytes_text(used)}, and the other servers have {bytes_text(room)} free: about "
        f"{bytes_text(used - room)} of values will be evicted there"
    )


def load_text(found: Mapping[str, Any], size: int) -> str:
    """Return a sentence on what values of so many bytes, put into a cluster in use, will evict there."""
    workers = [worker for node in found["nodes"] if node["state"] in _RUNNING for worker in node["workers"]]
    room = sum(max(0, worker["capacity_bytes"] - worker["used_bytes"]) for worker in workers)
    entries = sum(worker["entries"] for worker in workers)
    put = f"up to {bytes_text(size)} will be put, and {bytes_text(room)} are free there"
    if size <= room or not entries:
        return f"{put}: it should evict nothing"
    return f"{put}: about {bytes_text(size - room)} of the {entries:,} values there will be evicted"


def evictions_beside(found: Mapping[str, Any], name: str) -> int:
    """Return the number of values that all servers but this one have evicted so far."""
    return sum(worker["evictions"] for each in found["nodes"] if each["name"] != name for worker in each["workers"])


def _evictions_later(
    link: ManagerClient, found: Mapping[str, Any], name: str, clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> int:  # fmt: skip
    """Return :func:`evictions_beside` when the manager has counts that are younger than the status ``found``."""
    until = clock() + COUNTS_S
    while clock() < until:
        sleep(POLL_S)
        with contextlib.suppress(TransportError):
            found = link.status()
    return evictions_beside(found, name)


def wait_drained(
    link: ManagerClient, name: str, out: TextIO, timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
) -> None:  # fmt: skip
    """Show the progress of a drain until the node is empty: one rewritten line on a terminal, otherwise plain lines.

    The last line says how many values the other servers have evicted meanwhile.

    Raises SimmError at the timeout, or if the node dies or is resumed meanwhile; TransportError without a manager.
    """
    shown = Line(out, clock)
    progress: Progress | None = None
    evicted_before = 0
    start = last_seen = clock()
    try:
        while True:
            try:
                found = link.status()
            except TransportError as exc:
                if isinstance(exc, Refused) or clock() - last_seen > SILENCE_S:
                    raise
                shown.show(f"{name}: no manager answers, trying again", urgent=True)
                sleep(POLL_S)
                continue
            last_seen = clock()
            node = find(found, name)
            if node is None or node["state"] in GONE:
                state = node["state"] if node is not None else "forgotten"
                raise SimmError(
                    f"{name} is {state}: values that were not copied by then are lost; other servers own its shards now"
                )
            if progress is None:
                progress = Progress(name, shards_left(node), start)
                evicted_before = evictions_beside(found, name)
            text = progress.text(found, node, last_seen)
            if node["drained"]:
                copied, took = bytes_text(progress.copied), last_seen - start
                if out.isatty():
                    shown.show(f"{name}: drained, the other servers count what they have evicted")
                evicted = _evictions_later(link, found, name, clock, sleep) - evicted_before
                lost = f", {evicted:,} values evicted by the other servers meanwhile" if evicted > 0 else ""
                shown.end(f"{name}: drained, {copied} copied in {took:.1f} s{lost}; it may be stopped")
                return
            if not node["draining"]:
                raise SimmError(f"{name} was resumed meanwhile and is not being drained any more")
            shown.show(text)
            if timeout_s is not None and last_seen - start >= timeout_s:
                raise SimmError(
                    f"{shards_left(node):,} shards are left after {timeout_s:g} s; the drain goes on: run this again "
                    f"to watch, or end it with `simm node resume {name}`"
                )
            sleep(POLL_S)
    finally:
        shown.end("")


class Progress:
    """The progress of a drain, computed from successive statuses."""

    def __init__(self, name: str, shards: int, now: float) -> None:
        self.name = name
        self.total = shards
        self.started = now
        #: Bytes that have arrived at other workers since the watching began.
        self.copied = 0
        self._before: dict[tuple[str, int], int] | None = None

    def text(self, found: Mapping[str, Any], node: Mapping[str, Any], now: float) -> str:
        """Return a line: shards left, bytes copied, rate, and the time to go at the rate so far."""
        counts = {
            (each["name"], worker["worker"]): int(worker["moved_bytes"])
            for each in found["nodes"]
            for worker in each["workers"]
        }
        if self._before is not None:
            # A worker restarts its count at 0 with each step.
            self.copied += sum(
                count - before if count >= (before := self._before.get(key, 0)) else count
                for key, count in counts.items()
            )
        self._before = counts
        left = shards_left(node)
        self.total = max(self.total, left)
        done, elapsed = self.total - left, now - self.started
        parts = [f"{self.name}: {left:,} of {self.total:,} shards left", f"{bytes_text(self.copied)} copied"]
        if found["move_rate"]:
            parts.append(f"{bytes_text(found['move_rate'])}/s")
        if done and left and elapsed > 0:
            parts.append(f"about {left * elapsed / done:.0f} s to go")
        if not found["shards_moving"] and found["shards_waiting"]:
            parts.append("waiting for servers to take them: see `simm status`")
        return ", ".join(parts)


class Line:
    """A line that is rewritten on a terminal; otherwise an occasional line when the text changes."""

    def __init__(self, out: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._rewrites = out.isatty()
        self._width = 0
        self._last = ""
        self._at = -LINE_S

    def show(self, text: str, *, urgent: bool = False) -> None:
        """Show a text in place of the one before, or on a line of its own if it is time for one."""
        if self._rewrites:
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
            self._out.flush()
        elif text != self._last and (urgent or self._clock() - self._at >= LINE_S):
            self._at = self._clock()
            self._out.write(text + "\n")
            self._out.flush()
        self._last = text

    def end(self, text: str) -> None:
        """Show the last line; without text, keep the present one."""
        if self._rewrites and self._width:
            self._out.write("\r" + text.ljust(self._width).rstrip() + "\n" if text else "\n")
            self._width = 0
        elif text:
            self._out.write(text + "\n")
        self._out.flush()
