"""Trace events: made by the rules of the format, and checked by them when they come back from a file."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simm.tracing.perfetto import (
    LANE_TIDS,
    LANES_MAX,
    LINE_BYTES_MAX,
    REMOTE_PIDS,
    document,
    document_text,
    events_of,
    fault_of,
    read_lines,
    spans_in,
)
from simm.tracing.spans import Operation
from simm.tracing.summary import quantile, summarize, table


def operation() -> Operation:
    one = Operation("put", bytes(range(1, 17)), bytes(range(8)), kept=True)
    one.began, one.ended = 1_000_000, 1_500_000
    one.about.update(keys=1, done=1, key="00ff00ff", path="shm")
    one.segment("copy", 1_100_000, 1_200_000)
    one.segment("commit", 1_200_000, 1_400_000, span_id=b"\1" * 8)
    one.of_server(99, [("place", 1_250_000, 1_300_000)], (1_200_000, 1_400_000), b"\1" * 8, remote=False)
    one.of_server(99, [("place", 5, 25)], (1_200_000, 1_400_000), b"\1" * 8, remote=True)
    return one


def test_the_events_of_an_operation() -> None:
    events = list(events_of(operation(), 42))
    assert [fault_of(event) for event in events] == [""] * 5
    root, copied, commit, place, far = events
    assert (root["name"], root["ts"], root["dur"], root["pid"]) == ("put", 1000.0, 500.0, 42)
    assert root["args"]["parent_id"] == bytes(range(8)).hex() and root["args"]["key"] == "00ff00ff"
    assert {event["args"]["trace_id"] for event in events} == {bytes(range(1, 17)).hex()}
    assert copied["args"]["parent_id"] == commit["args"]["parent_id"] == root["args"]["span_id"]
    assert place["args"]["parent_id"] == far["args"]["parent_id"] == commit["args"]["span_id"]
    assert place["pid"] == 99 and far["pid"] == 99 + REMOTE_PIDS
    assert len({event["args"]["span_id"] for event in events}) == 5


def test_what_is_in_flight_beside_each_other_has_tracks_of_its_own() -> None:
    one = operation()
    lanes = [one.take_lane(), one.take_lane(), one.take_lane()]
    assert lanes == [1, 2, 3]
    one.free_lane(2)
    assert one.take_lane() == 2 and one.take_lane() == 4
    for lane in (1, 2, 10 * LANES_MAX):
        one.segment("fetch", 1_100_000, 1_200_000, lane=lane, size=4096)
    one.tid = LANE_TIDS - 1
    events = list(events_of(one, 42))[-3:]
    assert [fault_of(event) for event in events] == [""] * 3 and events[0]["args"]["bytes"] == 4096
    assert [event["tid"] // LANE_TIDS for event in events] == [1, 2, LANES_MAX]
    heads = [event for event in document(events)["traceEvents"] if event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in heads] == ["in flight 1", "in flight 2", f"in flight {LANES_MAX}"]


def test_the_document_names_its_processes_and_orders_its_events() -> None:
    made = json.loads(json.dumps(document(reversed(list(events_of(operation(), 42))))))
    heads = [event for event in made["traceEvents"] if event["ph"] == "M"]
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["name"] for event in heads} == {"simm client 42", "simm server 99"}
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    assert spans_in(json.dumps(made).encode()) == (spans, 0)


def test_the_text_of_a_document_is_its_json() -> None:
    events = [*events_of(operation(), 4711), *events_of(operation(), 4712)]
    assert json.loads("".join(document_text(events))) == document(events)
    assert json.loads("".join(document_text([]))) == document([])


def tracks_of(document: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Return by track what lies there: begin and end in nanoseconds, and name."""
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            began, ended = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            found.setdefault((event["pid"], event["tid"]), []).append((began, ended, event["name"]))
    return found


def crossing(document: dict[str, Any]) -> list[Any]:
    """Return pairs of spans of one track of which neither holds the other, though they overlap."""
    return [
        (one, other) for spans in tracks_of(document).values() for one in spans for other in spans
        if one[0] < other[0] < one[1] < other[1]
    ]  # fmt: skip


def test_spans_of_one_track_nest() -> None:
    """Two exchanges by TCP go on at a time, and a server has two requests at a time."""
    one = Operation("get", bytes(range(1, 17)), b"", kept=True)
    one.began, one.ended = 1_000_000, 9_000_000
    one.segment("send", 1_000_000, 3_000_000)
    one.segment("send", 2_000_000, 4_000_000, span_id=b"\2" * 8)
    one.segment("wait", 2_500_000, 2_600_000, parent=b"\2" * 8)
    one.segment("answer", 3_000_000, 3_500_000)
    one.of_server(99, [("read", 2_000_000, 2_800_000)], (0, 9_000_000), b"\2" * 8, remote=False)
    one.of_server(99, [("read", 2_400_000, 3_000_000)], (0, 9_000_000), b"\3" * 8, remote=False)
    one.segment("fetch", 4_000_000, 6_000_000, lane=1)
    one.segment("fetch", 5_000_000, 7_000_000, lane=1)
    events = list(events_of(one, 42))
    made = document(events)
    assert crossing({"traceEvents": events}) and not crossing(made)
    tid = one.tid
    assert {track: [name for _, _, name in spans] for track, spans in tracks_of(made).items()} == {
        (42, tid): ["get", "send", "answer"], (42, tid + LANE_TIDS): ["send", "wait", "fetch"],
        (42, tid + 2 * LANE_TIDS): ["fetch"], (99, 99): ["read"], (99, 99 + LANE_TIDS): ["read"],
    }  # fmt: skip
    heads = {(event["pid"], event["tid"]) for event in made["traceEvents"] if event["name"] == "thread_name"}
    assert heads == {(42, tid + LANE_TIDS), (42, tid + 2 * LANE_TIDS), (99, 99 + LANE_TIDS)}
    again = spans_in(json.dumps(made).encode())
    assert again[1] == 0 and document(again[0]) == made


def test_more_spans_at_a_time_than_lanes_are_kept() -> None:
    one = Operation("get", bytes(range(1, 17)), b"", kept=True)
    one.began, one.ended = 0, 10**9
    events = list(events_of(one, 42))
    for number in range(LANES_MAX + 20):
        events.append({**events[0], "ts": 1.0 + number, "dur": 10_000.0})
    assert len(tracks_of(document(events))) == LANES_MAX + 1


@pytest.mark.parametrize("lane", [-1, 0, True, 1.5, "1", LANES_MAX + 1, 3])
def test_a_lane_that_a_file_makes_up_ends_nothing(lane: object) -> None:
    event = next(events_of(operation(), 42))
    event["args"]["lane"] = lane
    assert fault_of(event) == ""
    assert [each for each in document([event])["traceEvents"] if each["ph"] == "X"] == [event]


DAMAGES: dict[str, Any] = {
    "ph": "B", "cat": "other", "name": "a\nb", "ts": -1.0, "dur": float("inf"), "pid": "1", "tid": True, "args": [],
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "trace_id": "0" * 31, "span_id": "g" * 16, "parent_id": "12", "key": "\x1b[2J", "keys": [1], "path": "x" * 65,
}  # fmt: skip


@pytest.mark.parametrize("field", [*DAMAGES, *ARGUMENTS])
def test_what_is_no_span_is_left_out(field: str) -> None:
    event = next(events_of(operation(), 42))
    bad = copy.deepcopy(event)
    if field in DAMAGES:
        bad[field] = DAMAGES[field]
    else:
        bad["args"][field] = ARGUMENTS[field]
    assert fault_of(event) == "" and fault_of(bad)
    assert read_lines([json.dumps(event).encode(), json.dumps(bad).encode()]) == ([event], 1)


@pytest.mark.parametrize("field", ["ts", "dur", "pid", "keys"])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN", str(1 << 65)])
def test_a_number_that_no_clock_has_is_left_out(field: str, number: str) -> None:
    """Also an integer that no float holds: it must not end the command with an OverflowError."""
    event = next(events_of(operation(), 42))
    target = event if field in event else event["args"]
    target[field] = "NUMBER"
    line = json.dumps(event).replace('"NUMBER"', number).encode()
    assert read_lines([line]) == ([], 1)
    assert spans_in(b'{"traceEvents": [' + line + b"]}") == ([], 1)


def test_lines_that_are_none() -> None:
    deep = b"[" * 5000
    assert read_lines([b"", b"\xff\xff", b"null", b"7", deep, b" " * (LINE_BYTES_MAX + 1)]) == ([], 6)


@given(st.binary(max_size=300))
def test_any_bytes_are_read(line: bytes) -> None:
    events, bad = read_lines([line])
    assert len(events) + bad == 1
    try:
        spans_in(line)
    except ValueError:
        pass


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"traceEvents": 3}', b"nothing", b"[" * 5000])
def test_what_is_no_document(text: bytes) -> None:
    with pytest.raises(ValueError):
        spans_in(text)


def test_the_summary_counts_operations_and_their_segments() -> None:
    rows = summarize([event for _ in range(3) for event in events_of(operation(), 42)])
    found = {(row.operation, row.segment): row for row in rows}
    assert found["put shm", ""].spans == 3 and found["put shm", ""].p50_us == 500.0
    assert found["put shm", "commit"].share == pytest.approx(0.4)
    assert found["put shm", "server place"].spans == 6
    assert [row.segment for row in rows][:2] == ["", "commit"]
    assert "server place" in table(rows) and table([]).count("\n") == 0


@pytest.mark.parametrize(("count", "share", "value"), [
    (1, 0.99, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.5, 50), (100, 0.99, 99), (101, 0.99, 100), (4, 1.0, 4), (9, 0.0, 1),
    (100, 0.07, 7), (100, 0.29, 29),
])  # fmt: skip
def test_a_quantile_is_one_of_the_values_by_nearest_rank(count: int, share: float, value: int) -> None:
    """The p99 of a hundred was the greatest; 0.07 * 100 is a little more than 7."""
    assert quantile(range(1, count + 1), share) == value
