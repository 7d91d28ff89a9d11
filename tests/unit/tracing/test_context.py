"""The traceparent of a caller: W3C's form, read strictly, and what is wrong with one that is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simm.errors import UsageError
from simm.tracing.context import CONTEXT, TraceContext, context

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_parts() -> None:
    parsed = TraceContext.parse(GOOD)
    assert parsed.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert parsed.span_id.hex() == "00f067aa0ba902b7"
    assert parsed.sampled and str(parsed) == GOOD


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True), ("fe", False)]
)
def test_only_the_lowest_flag_means_sampled(flags: str, sampled: bool) -> None:
    assert TraceContext.parse(GOOD[:-2] + flags).sampled is sampled


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.parse("cc" + GOOD[2:] + "-what-comes").sampled
    assert TraceContext.parse("cc" + GOOD[2:]).sampled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "text, not NoneType"), (b"00", "text, not bytes"), ("", "is no traceparent"),
        (GOOD.upper(), "lower-case"),
        (GOOD[:-1], "is no traceparent"), (GOOD + "0", "is no traceparent"), (" " + GOOD, "is no traceparent"),
        (GOOD + "\n", "is no traceparent"), (GOOD.replace("-", "_"), "is no traceparent"),
        ("ff" + GOOD[2:], "no such version"), (GOOD + "-more", "ends after its flags"),
        (GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), "trace id .* all zeros"),
        (GOOD.replace("00f067aa0ba902b7", "0" * 16), "parent id .* all zeros"),
        ("cc" + GOOD[2:] + "more", "is no traceparent"), ("x" * 513, "513 characters"),
        (GOOD[:-2] + "\u0660\u0661", "hexadecimal"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_with_a_sentence(text: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TraceContext.parse(text)
    assert CONTEXT.get() is None


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parsed = TraceContext.parse(text)
    except UsageError as exc:
        assert len(str(exc)) < 1000
    else:
        assert text.startswith(str(parsed)[2:-2], 2)


@given(st.binary(min_size=16, max_size=16).filter(any), st.binary(min_size=8, max_size=8).filter(any), st.booleans())
def test_one_that_is_written_reads_back(trace: bytes, span: bytes, sampled: bool) -> None:
    made = TraceContext(trace, span, sampled)
    assert TraceContext.parse(str(made)) == made


def test_a_block_is_in_the_trace_and_what_follows_is_not() -> None:
    with context(GOOD) as parsed:
        assert CONTEXT.get() == parsed
        with context(GOOD[:-2] + "00") as inner:
            assert CONTEXT.get() == inner
        assert CONTEXT.get() == parsed
    assert CONTEXT.get() is None
