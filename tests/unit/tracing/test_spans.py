"""Operations and their segments: bounds, places of what a server says, and who decides what is recorded."""

from __future__ import annotations

import pytest

from simm.errors import UsageError
from simm.tracing import spans
from simm.tracing.context import context
from simm.tracing.spans import SEGMENTS_MAX, Decision, Operation, Recorder, ratio_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


def operation() -> Operation:
    return Operation("get", bytes(range(16)), b"", kept=True)


def test_segments_are_bounded_and_the_rest_is_counted() -> None:
    one = operation()
    for at in range(SEGMENTS_MAX + 3):
        one.segment("copy", at, at + 1)
    one.of_server(7, [("place", 0, 1)], (0, 9), one.span_id, remote=False)
    assert len(one.segments) == SEGMENTS_MAX and one.left_out == 4


def test_every_id_differs() -> None:
    one = operation()
    one._ids = 0xFFFF_FFFF_FFFF_FFFE  # the next ones wrap around zero, which is no id
    for _ in range(4):
        one.segment("copy", 0, 1)
    ids = [each.span_id for each in one.segments]
    assert len({*ids, one.span_id}) == 5 and bytes(8) not in ids
    assert {each.parent for each in one.segments} == {one.span_id}


def test_a_server_of_this_host_keeps_its_times() -> None:
    one = operation()
    one.of_server(7, [("place", 120, 150)], (100, 200), one.span_id, remote=False)
    assert [(each.began, each.ended, each.pid, each.remote) for each in one.segments] == [(120, 150, 7, False)]


def test_a_server_elsewhere_is_laid_on_the_middle_of_the_wait() -> None:
    one = operation()
    one.of_server(7, [("look", 9_000, 9_020), ("send", 9_020, 9_060)], (100, 200), one.span_id, remote=True)
    assert [(each.began, each.ended) for each in one.segments] == [(120, 140), (140, 180)]


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_server_says_stays_within_the_wait(remote: bool) -> None:
    one = operation()
    said = [("place", 0, 1 << 63), ("publish", 500, 400), ("answer", (1 << 64) - 1, 0)]
    one.of_server(7, said, (100, 200), one.span_id, remote=remote)
    assert len(one.segments) == 3
    assert all(100 <= each.began <= each.ended <= 200 for each in one.segments)


def test_a_recorder_keeps_so_many_and_counts_the_rest() -> None:
    recorder = Recorder(most=2)
    every = [operation() for _ in range(3)]
    for each in every:
        recorder.add(each)
    assert recorder.take() == every[:2] and recorder.left_out == 1 and recorder.take() == []
    recorder.add(every[2])
    recorder.clear()
    assert len(recorder) == recorder.left_out == 0


def test_issue_a_recorder_keeps_so_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs cost 282 MiB: the operations were bounded, and their segments were not."""
    monkeypatch.setattr(spans, "KEPT_SEGMENTS_MAX", 5)
    recorder = Recorder()
    for _ in range(2):
        every = [operation() for _ in range(4)]
        for each in every:
            each.segment("copy", 0, 1)
            each.segment("copy", 1, 2)
            recorder.add(each)
        assert recorder.take() == every[:3], "the third one goes beyond it"
    assert recorder.left_out == 2


@pytest.mark.parametrize(
    ("ratio", "chance", "kept"), [(0.0, 0.0, False), (0.5, 0.4, True), (0.5, 0.5, False), (1.0, 0.99, True)]
)
def test_a_share_is_recorded(ratio: float, chance: float, kept: bool) -> None:
    decision = Decision(ratio, Recorder())
    decision._random = lambda: chance
    begun = decision.begin("get")
    assert (begun is not None) is kept
    if begun is not None:
        assert begun.parent == b"" and len(begun.trace_id) == 16
        assert not decision.end(begun) and decision.recorder.take() == [begun]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_caller_decides_for_its_calls(ratio: float) -> None:
    decision = Decision(ratio, Recorder())
    with context(SAMPLED):
        begun = decision.begin("get")
        assert begun is not None and begun.kept
        assert begun.trace_id.hex() == TRACE and begun.parent.hex() == SPAN
    with context(SAMPLED[:-2] + "00"):
        assert decision.begin("get") is None


def test_issue_a_recorder_that_keeps_nothing_records_no_caller() -> None:
    """Its trace was named as if it were recorded."""
    decision = Decision(0.0, Recorder(0), slow_ns=1)
    with context(SAMPLED):
        begun = decision.begin("get")
    assert begun is not None and not begun.kept and begun.trace_id.hex() == TRACE
    with context(SAMPLED):
        assert Decision(0.0, Recorder(0)).begin("get") is None


def test_a_slow_call_is_watched_and_not_recorded() -> None:
    decision = Decision(0.0, Recorder(), slow_ns=1)
    begun = decision.begin("get")
    assert begun is not None and not begun.kept
    begun.began -= 10
    assert decision.end(begun) and len(decision.recorder) == 0


def test_a_call_that_is_as_fast_as_wanted_is_not_slow() -> None:
    decision = Decision(0.0, Recorder(), slow_ns=1 << 60)
    begun = decision.begin("get")
    assert begun is not None and not decision.end(begun)


@pytest.mark.parametrize(("text", "ratio"), [("off", None), ("0", 0.0), ("1", 1.0), ("0.25", 0.25)])
def test_shares(text: str, ratio: float | None) -> None:
    assert ratio_of(text) == ratio


@pytest.mark.parametrize("text", ["", "2", "-1", "nan", "inf", "1%", "on"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(UsageError, match="0 to 1"):
        ratio_of(text)
