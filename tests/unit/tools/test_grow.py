"""``simm ctl grow``: which server it asks, what it shows meanwhile, and what it makes of strange answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from simm.config.settings import Settings
from simm.errors import SimmError, TransportError, UsageError
from simm.net.channel import Refused
from simm.tools.ctl import grow
from simm.wire.admin_messages import GROW, AskNodeSettings, AskSettings
from simm.wire.messages import Status
from tests.support.clock import Clock


def answer(state: str, text: str = "worker 1", **changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("worker", "numa_node", "bytes", "done_bytes", "workers", "memory_bytes"), 1)
    return {"server": "gpu", "state": state, "text": text, **numbers, **changes}


class Answers:
    """In place of a server's admin socket, or of the manager: gives these answers, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []  # type: ignore[var-annotated]
        monkeypatch.setattr(grow, "ask_admin", lambda _settings, _path, ask: self._ask(ask))
        monkeypatch.setattr(grow, "ask_from_afar", lambda _settings, ask: self._ask(ask))

    def _ask(self, ask: Any) -> bytes:
        self.asked.append(ask)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, bytes) else json.dumps(found).encode()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "gpu.admin.sock").touch()
    return Settings(runtime_dir=tmp_path)


def test_which_server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, answer("asking"), answer("asking"), answer("asking"))
    assert grow.Target(settings, "", "").begin(5, "") == answer("asking")
    grow.Target(settings, "gpu", "").begin(5, "1")
    grow.Target(settings, "", "far").begin(5, "0")
    assert answers.asked == [AskSettings(GROW, "5"), AskSettings(GROW, "5 1"), AskNodeSettings("far", GROW, "5 0")]
    with pytest.raises(TransportError, match=r"no data server 'other' in .*, but gpu$"):
        grow.Target(settings, "other", "")
    with pytest.raises(UsageError, match="name one data server"):
        grow.Target(settings, "", "*")
    (settings.runtime_dir / "next.admin.sock").touch()
    with pytest.raises(UsageError, match="--server: gpu, next"):
        grow.Target(settings, "", "")


def test_a_server_that_refuses(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, Refused(Status.BAD_REQUEST, "there is no setting 'grow': poll_us can be changed here"))
    with pytest.raises(UsageError, match="gpu: there is no setting 'grow'"):
        grow.Target(settings, "", "").begin(5, "")


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, answer("done", worker="1"), answer("done", bytes=1.5),
            [{"name": "poll_us", "value": "50"}]],
)  # fmt: skip
def test_an_answer_that_is_none(settings: Settings, monkeypatch: pytest.MonkeyPatch, raw: Any) -> None:
    Answers(monkeypatch, raw)
    with pytest.raises(TransportError, match="no answer to this"):
        grow.Target(settings, "", "").begin(5, "")



def follow(settings: Settings, first: dict[str, Any], timeout_s: float | None = None) -> tuple[dict[str, Any], str]:
    out, clock = io.StringIO(), Clock(0.0)
    found = grow.follow(grow.Target(settings, "", ""), first, out, timeout_s, clock, clock.sleep)
    return found, out.getvalue()


def test_what_it_shows(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    away = TransportError("no answer")
    Answers(monkeypatch, away, *[answer("populating", "8 MiB\x1b[31m")] * 90, away, answer("joining"), answer("done"))
    found, shown = follow(settings, answer("asking", "is to be added"))
    assert found["state"] == "done" and shown.startswith("gpu: is to be added\n")
    assert "gpu: 8 MiB" in shown and "\x1b" not in shown


def test_how_it_fails(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, answer("populating"), answer("failed", "not added: no room"))
    with pytest.raises(SimmError, match="gpu: not added: no room"):
        follow(settings, answer("asking"))
    Answers(monkeypatch, answer("none"))
    with pytest.raises(SimmError, match="started anew"):
        follow(settings, answer("asking"))
    Answers(monkeypatch, *[answer("populating")] * 99)
    with pytest.raises(SimmError, match="after 2 s; it goes on"):
        follow(settings, answer("asking"), 2.0)
    Answers(monkeypatch, *[TransportError("gone")] * 999)
    with pytest.raises(TransportError, match="gone"):
        follow(settings, answer("asking"))
