"""``simm node``: list the data servers, empty one before it is stopped, take it back.

A drain is the manager's business: this asks for it and then watches, so Ctrl-C, ``--timeout`` or the end of this
terminal end the watching only. Whoever runs the command again watches on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from .channel import Refused
from .errors import SimmError, TransportError, UsageError
from .manager_link import ManagerClient
from .messages import Status
from .status import bytes_text, columns, state_text

#: Between two looks at the manager, and between two lines where lines cannot be rewritten.
POLL_S: Final = 0.25
LINE_S: Final = 5.0
#: How long a manager may be silent before the watching ends; another one may be taking over.
SILENCE_S: Final = 60.0
_GONE: Final = ("dead", "left")


def request(link: ManagerClient, name: str, on: bool) -> int:
    """Ask for a drain or its end; the shards that the node owns now.

    Raises UsageError for a name that there is not, SimmError when nobody else could hold the shards, TransportError.
    """
    try:
        return link.drain(name, on)
    except Refused as exc:
        if exc.status == Status.UNKNOWN_NODE:
            raise UsageError(f"{exc}; `simm node list` shows all") from None
        if exc.status in (Status.UNAVAILABLE, Status.BUSY):
            raise SimmError(str(exc)) from None
        raise


def find(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """A node of a status."""
    return next((node for node in found["nodes"] if node["name"] == name), None)


def shards_left(node: Mapping[str, Any]) -> int:
    """Shards that a node owns, and those of others that still need it."""
    return sum(worker["shards"] + worker["moving_out"] for worker in node["workers"])


def wait_drained(
    link: ManagerClient, name: str, out: TextIO, timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
) -> None:  # fmt: skip
    """Show how a drain goes on until the node is empty; a line that is rewritten on a terminal, else plain lines.

    Raises SimmError when time is up, or the node dies or is taken back meanwhile; TransportError without a manager.
    """
    shown = _Line(out, clock)
    progress: Progress | None = None
    start = heard = clock()
    try:
        while True:
            try:
                found = link.status()
            except TransportError as exc:
                if isinstance(exc, Refused) or clock() - heard > SILENCE_S:
                    raise
                shown.show(f"{name}: no manager answers, trying again", urgent=True)
                sleep(POLL_S)
                continue
            heard = clock()
            node = find(found, name)
            if node is None or node["state"] in _GONE:
                state = node["state"] if node is not None else "forgotten"
                raise SimmError(
                    f"{name} is {state}: what had not been copied by then is lost; its shards are others' now"
                )
            if progress is None:
                progress = Progress(name, shards_left(node), start)
            text = progress.text(found, node, heard)
            if node["drained"]:
                copied, took = bytes_text(progress.copied), heard - start
                shown.end(f"{name}: drained, {copied} copied in {took:.1f} s; it may be stopped")
                return
            if not node["draining"]:
                raise SimmError(f"somebody has taken {name} back: it is not being drained any more")
            shown.show(text)
            if timeout_s is not None and heard - start >= timeout_s:
                raise SimmError(
                    f"{shards_left(node):,} shards are left after {timeout_s:g} s; the drain goes on: run this again "
                    f"to watch, or end it by `simm node resume {name}`"
                )
            sleep(POLL_S)
    finally:
        shown.end("")


class Progress:
    """How far a drain is, from one status after the other."""

    def __init__(self, name: str, shards: int, now: float) -> None:
        self.name = name
        self.total = shards
        self.started = now
        #: Bytes that arrived at other workers since we look.
        self.copied = 0
        self._before: dict[tuple[str, int], int] | None = None

    def text(self, found: Mapping[str, Any], node: Mapping[str, Any], now: float) -> str:
        """A line about it: shards left, bytes copied, rate, and the time it will take at the pace so far."""
        counts = {
            (each["name"], worker["worker"]): int(worker["moved_bytes"])
            for each in found["nodes"]
            for worker in each["workers"]
        }
        if self._before is not None:
            # A worker counts from 0 again with each step.
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


class _Line:
    """One line that is rewritten, on a terminal; else a line now and then, when it says something new."""

    def __init__(self, out: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._rewrites = out.isatty()
        self._width = 0
        self._last = ""
        self._at = -LINE_S

    def show(self, text: str, *, urgent: bool = False) -> None:
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
        """The last one; without text what stands there stays."""
        if self._rewrites and self._width:
            self._out.write("\r" + text.ljust(self._width).rstrip() + "\n" if text else "\n")
            self._width = 0
        elif text:
            self._out.write(text + "\n")
        self._out.flush()


def table(found: Mapping[str, Any]) -> str:
    """The data servers, for people."""
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
        return "no data server has joined: start one with `simm dataserver --manager HOST:PORT`"
    lines = columns(rows, left=(0, 1, 8))
    waiting = [node["name"] for node in found["nodes"] if node["draining"] and node["state"] not in _GONE]
    if waiting:
        lines += ["", f"take one back with `simm node resume {waiting[0]}`"]
    return "\n".join(lines)
