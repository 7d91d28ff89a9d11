"""Trace events: made of operations, read back from files, checked, and merged for Perfetto.

A span is a *complete event* of Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open::

    {"name": "get", "cat": "simm", "ph": "X", "ts": 81.5, "dur": 12.25, "pid": 4711, "tid": 4712,
     "args": {"trace_id": "32 digits", "span_id": "16 digits", "parent_id": "16 digits", "keys": 1, ...}}

``ts`` and ``dur`` are microseconds of the host's monotonic clock. A server's spans lie on a track of their own. So do
those that go on beside each other while their thread does something else, as transfers by RDMA (``lane``). On one
track complete events must nest: Perfetto cuts or drops one that begins within another and ends after it. So
:func:`document` moves such a one to a lane as well: an exchange by TCP with a second server, or a second client's
request. Files come from other processes, perhaps of another version: each event is checked, and one that is none is
counted and left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from .spans import Operation

#: One line of a file: an event has a few hundred bytes.
LINE_BYTES_MAX: Final = 8192
NAME_MAX: Final = 64
ARGUMENTS_MAX: Final = 16
#: No time and no number of an argument is larger: a float holds each of them, and sums of them.
NUMBER_MAX: Final = 1 << 64
#: Added to the pid of a server on another host: no host has such pids.
REMOTE_PIDS: Final = 10_000_000
#: Added to the thread's id for each lane: Linux has no such ids, and with LANES_MAX of them one fits 31 bits.
LANE_TIDS: Final = 1 << 22
LANES_MAX: Final = 500
_IDS: Final = {"trace_id": 32, "span_id": 16}
_PARENT: Final = 16
_HEX: Final = re.compile(r"[0-9a-f]+")
_NAME: Final = re.compile(r"[a-z][a-z0-9_ ]*")
Event = dict[str, Any]


def events_of(operation: Operation, pid: int) -> Iterator[Event]:
    """Yield an operation's events, the root first. ``pid``: of the client."""
    trace = operation.trace_id.hex()

    def event(name: str, began: int, ended: int, pid: int, tid: int, ids: tuple[bytes, bytes], more: Any) -> Event:
        span_id, parent = ids
        return {
            "name": name, "cat": "simm", "ph": "X", "ts": began / 1000, "dur": (ended - began) / 1000, "pid": pid,
            "tid": tid,
            "args": {"trace_id": trace, "span_id": span_id.hex(), "parent_id": parent.hex(), **more},
        }  # fmt: skip

    about = {**operation.about, "left_out": operation.left_out} if operation.left_out else operation.about
    ids = operation.span_id, operation.parent
    yield event(operation.name, operation.began, operation.ended, pid, operation.tid, ids, {"op": True, **about})
    for each in operation.segments:
        where, thread = pid, operation.tid
        if each.pid:
            where = thread = each.pid + (REMOTE_PIDS if each.remote else 0)
        more: dict[str, Any] = {"of": operation.name, "server": True} if each.pid else {"of": operation.name}
        if each.lane:
            more["lane"] = lane = min(each.lane, LANES_MAX)
            thread += lane * LANE_TIDS
        if each.size:
            more["bytes"] = each.size
        if "path" in about:
            more["path"] = about["path"]
        yield event(each.name, each.began, each.ended, where, thread, (each.span_id, each.parent), more)


def fault_of(event: Any) -> str:
    """Return what is wrong with an event that should be a span; empty if nothing is. O(size of the event)."""
    if not isinstance(event, dict):
        return "it is no object"
    if event.get("ph") != "X" or event.get("cat") != "simm":
        return "it is no complete event of simm"
    name = event.get("name")
    if not isinstance(name, str) or len(name) > NAME_MAX or not _NAME.fullmatch(name):
        return "its name is none"
    for field in ("ts", "dur"):
        value = event.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= NUMBER_MAX:
            return f"its {field} is no time"
    for field in ("pid", "tid"):
        value = event.get(field)
        if type(value) is not int or not 0 <= value < 1 << 31:
            return f"its {field} is none"
    args = event.get("args")
    if not isinstance(args, dict) or len(args) > ARGUMENTS_MAX:
        return "its args are none"
    for field, digits in _IDS.items():
        value = args.get(field)
        if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
            return f"its {field} is none"
    parent = args.get("parent_id")
    if not isinstance(parent, str) or (parent and (len(parent) != _PARENT or not _HEX.fullmatch(parent))):
        return "its parent_id is none"
    if not all(_plain(value) for value in args.values()):
        return "an argument is neither a number nor a short text"
    return ""


def _plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= NAME_MAX and value.isascii() and value.isprintable()
    return isinstance(value, bool | int | float) and -NUMBER_MAX <= value <= NUMBER_MAX


def read_lines(lines: Iterable[bytes]) -> tuple[list[Event], int]:
    """Return the events of a file with one in a line, and how many lines have none. Memory: the events."""
    events: list[Event] = []
    bad = 0
    for line in lines:
        event = None
        if len(line) <= LINE_BYTES_MAX:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
        if event is None or fault_of(event):
            bad += 1
        else:
            events.append(event)
    return events, bad


def document(events: Iterable[Event], processes: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return what Perfetto opens: all events by time, with names for the processes."""
    found = _nested(sorted(events, key=lambda event: (event["ts"], -event["dur"])))
    servers = {event["pid"] for event in found if event["args"].get("server")}
    names = {
        event["pid"]: "simm server" if event["pid"] in servers else "simm client" for event in found
    } | dict(processes or {})  # fmt: skip
    heads = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"{name} {pid % REMOTE_PIDS}"}}
        for pid, name in sorted(names.items())
    ]
    lanes = {(event["pid"], event["tid"]): event["args"]["lane"] for event in found if "lane" in event["args"]}
    heads += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": f"in flight {lane}"}}
        for (pid, tid), lane in sorted(lanes.items())
    ]
    return {"traceEvents": [*heads, *found], "displayTimeUnit": "ns", "otherData": {"clock": "CLOCK_MONOTONIC"}}


def document_text(events: Iterable[Event]) -> Iterator[str]:
    """Yield what :func:`document` returns as JSON, an event at a time: the whole text takes as much again."""
    made = document(events)
    head, _, tail = json.dumps({**made, "traceEvents": []}, separators=(",", ":")).partition("[]")
    yield head + "["
    for at, event in enumerate(made["traceEvents"]):
        yield ("," if at else "") + json.dumps(event, separators=(",", ":"))
    yield "]" + tail


def _nested(ordered: Iterable[Event]) -> list[Event]:
    """Return events, which are in the order of their begin, such that those of each track nest.

    Each stays where it is, or goes to its parent's lane, or to the first one where it fits. O(events) for the few lanes
    that there are.
    """
    found: list[Event] = []
    #: By pid and thread: for each lane the ends, in nanoseconds, of the spans that go on there, the outermost first.
    tracks: dict[tuple[int, int], dict[int, list[int]]] = {}
    lane_of: dict[tuple[int, int, str], int] = {}
    for event in ordered:
        args = event["args"]
        named = args.get("lane", 0)
        lane = named if type(named) is int and 0 < named <= LANES_MAX and named * LANE_TIDS <= event["tid"] else 0
        thread = event["pid"], event["tid"] - lane * LANE_TIDS
        lanes = tracks.setdefault(thread, {})
        began, ended = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        first = lane or lane_of.get((*thread, args["parent_id"]), 0)
        for at in (first, *(each for each in range(min(lane, 1), LANES_MAX + 1) if each != first)):
            going_on = lanes.setdefault(at, [])
            while going_on and going_on[-1] <= began:
                going_on.pop()
            if not going_on or ended <= going_on[-1]:
                break
        going_on.append(ended)
        lane_of[thread[0], thread[1], args["span_id"]] = at
        if at != lane:
            args = {**args, "lane": at}
            event = {**event, "tid": thread[1] + at * LANE_TIDS, "args": args}
        found.append(event)
    return found


def spans_in(text: bytes) -> tuple[list[Event], int]:
    """Return the spans of a document, and how many of its events are no spans though they should be.

    Raises ValueError if it is no document.
    """
    try:
        found = json.loads(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ValueError("it has no traceEvents")
    spans = [event for event in events if not (isinstance(event, dict) and event.get("ph") == "M")]
    good = [event for event in spans if not fault_of(event)]
    return good, len(spans) - len(good)
