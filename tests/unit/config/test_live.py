"""Settings that change at run time: in the process that changes them, and in those that it has forked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from simm.config import logs
from simm.config.live import LiveSettings
from simm.errors import UsageError
from tests.support.segments import child, status_of


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    before = list(logs._HOOKS)
    yield
    logs._HOOKS[:] = before


def test_a_value_is_parsed_and_followed() -> None:
    live, seen = LiveSettings({"log_level": "info", "poll_us": 50}), []
    live.follow("poll_us", seen.append)
    assert live.set("poll_us", "2ms") == 50 and live["poll_us"] == 2000
    assert seen == [50], "not before the process is told"
    logs.reopen_logs()
    logs.reopen_logs()
    assert seen == [50, 2000], "once"
    live.set("log_level", "Debug")
    rows = {row["name"]: row for row in live.rows()}
    assert rows["log_level"]["value"] == "debug" and rows["log_level"]["started_with"] == "info"
    assert rows["poll_us"]["value"] == "2000" and "polls" in rows["poll_us"]["about"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("poll_us", "-1", "poll_us: "), ("poll_us", "soon", "poll_us: "), ("log_level", "loud", "must be one of"),
     ("listen", "h:1", "listen is taken at the start .*SIMM_LISTEN, .* keeps its values.; log_level, poll_us, policy"),
     ("memory", "1G", "simm ctl grow --memory SIZE.*SIMM_MEMORY.*; log_level, poll_us, policy"),
     ("trace", "1", "simm trace start --ratio.*; log_level, poll_us, policy"),
     ("deadline_ms", "1", "deadline_ms is a setting of clients.*SIMM_DEADLINE_MS"), ("", "1", "name a setting: log_"),
     ("polcy", "lru", "there is no setting 'polcy': log_level"), ("policy", "best", "policy: .*must be one of"),
     ("keep_share", "91", "keep_share: "), ("keep_share", "-1", "keep_share: "), ("poll_us", "2s", "poll_us: ")],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(name: str, value: str, text: str) -> None:
    live = LiveSettings({"log_level": "info", "poll_us": 50, "policy": "reuse", "keep_share": 50})
    with pytest.raises(UsageError, match=text):
        live.set(name, value)
    assert [row["value"] for row in live.rows()] == ["info", "50", "reuse", "50"]
    live.set("policy", "Sieve")
    live.set("keep_share", "90")
    assert (live["policy"], live["keep_share"]) == ("sieve", 90), "control"


def test_children_see_it_and_those_forked_later_too() -> None:
    live = LiveSettings({"poll_us": 50})
    ask, answer = os.pipe(), os.pipe()

    def follows() -> bool:
        seen: list[int] = []
        live.follow("poll_us", seen.append)
        os.write(answer[1], b"r")
        os.read(ask[0], 1)
        logs.reopen_logs()
        return os.write(answer[1], bytes(seen)) == len(seen)

    pid = child(lambda: not follows())
    os.close(answer[1])  # so that a child that has died ends the reads
    assert os.read(answer[0], 1) == b"r"
    live.set("poll_us", "70")
    os.write(ask[1], b"x")
    assert list(os.read(answer[0], 8)) == [50, 70]
    assert status_of(pid) == 0
    late: list[int] = []
    live.follow("poll_us", late.append)
    assert late == [70]
    for fd in (*ask, answer[0]):
        os.close(fd)
