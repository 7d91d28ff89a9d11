"""``simm ctl settings`` of several data servers: what some refuse, or do not say, is said of those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simm.config.settings import Settings
from simm.errors import SimmError, TransportError, UsageError
from simm.net.channel import Refused
from simm.tools.ctl import command, tuning
from simm.wire.admin_messages import AskNodeSettings, AskSettings
from simm.wire.messages import StatsReply, Status

ROW = {"name": "poll_us", "value": "50", "started_with": "50", "about": "how long"}
SILENT = TransportError("deadline passed while waiting for a reply")
OLDER = Refused(Status.BAD_REQUEST, "there is no setting 'poll_us'")
ABSENT = Refused(Status.UNAVAILABLE, "it has not answered for 2 s")


class Link:
    """A manager that knows these data servers, with their states, and how each of them answers."""

    def __init__(self, states: dict[str, str], errors: dict[str, Exception]) -> None:
        self.states, self.errors = states, errors
        self.asked: list[str] = []

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"nodes": [{"name": name, "state": state} for name, state in self.states.items()]}

    def call(self, msg: AskNodeSettings, _: type) -> StatsReply:
        self.asked.append(msg.node)
        if msg.node in self.errors:
            raise self.errors[msg.node]
        return StatsReply(json.dumps([ROW]).encode())


Cluster = Callable[..., Link]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """Return a function that makes a manager of data servers by their states, and of errors by their names."""
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))

    def make(errors: dict[str, Exception], **states: str) -> Link:
        link = Link(states, errors)
        monkeypatch.setattr(tuning, "manager_client", lambda _: link)
        return link

    return make


Host = Callable[..., list[str]]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """Return a function that makes admin sockets with these errors, None for one that answers: whom was asked."""
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))

    def make(**errors: Exception | None) -> list[str]:
        asked: list[str] = []

        def ask_admin(_: Settings, path: str, ask: AskSettings) -> bytes:
            asked.append(path)
            if (error := errors[path]) is not None:
                raise error
            return json.dumps([ROW]).encode()

        monkeypatch.setattr(tuning, "admin_sockets", lambda *_: {name: name for name in errors})
        monkeypatch.setattr(tuning, "sockets_to_change", lambda *_: ({name: name for name in errors}, []))
        monkeypatch.setattr(tuning, "ask_admin", ask_admin)
        return asked

    return make


@pytest.mark.parametrize("words", [["list"], ["get", "poll_us"], ["set", "poll_us", "50"]])
def test_issue_servers_that_are_gone_hid_the_settings_of_all_others(
    words: list[str], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manager knows them for a day: so long ``--of '*'`` showed nothing, and no ``set`` was a success."""
    link = cluster({}, a="running", b="left", c="dead", d="suspect")
    assert command.main(["settings", *words, "--of", "*", "--json"]) == 0 and link.asked == ["a", "d"]
    out, err = capsys.readouterr()
    assert [row["server"] for row in json.loads(out)] == ["a", "d"] and err == "left out: b (left), c (dead)\n"


def test_only_servers_that_are_gone_are_none_to_ask(cluster: Cluster) -> None:
    link = cluster({}, b="left")
    with pytest.raises(UsageError, match=r"the manager knows no data server but b \(left\)$"):
        command.main(["settings", "--of", "*"])
    cluster({})
    with pytest.raises(UsageError, match=r"the manager knows no data server$"):
        command.main(["settings", "--of", "*"])
    assert not link.asked


@pytest.mark.parametrize("words", [["list"], ["get", "poll_us"]])
def test_what_others_say_is_shown_beside_who_is_silent(
    words: list[str], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster({"b": ABSENT}, a="running", b="running", c="running")
    assert command.main(["settings", *words, "--of", "*"]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["SERVER", "a", "c", "b:"] and err == ""
    assert out.endswith("b: it has not answered for 2 s\n")


def test_a_manager_that_is_lost_meanwhile_does_not_hide_who_has_taken_a_setting(cluster: Cluster) -> None:
    link = cluster({"b": SILENT}, a="running", b="running", c="running")
    with pytest.raises(SimmError, match=f"not all servers have taken it: b: {SILENT}; c: not asked; taken by a$"):
        command.main(["settings", "set", "poll_us", "50", "--of", "*"])
    assert link.asked == ["a", "b"], "each further one would cost a deadline"


@pytest.mark.parametrize("error", [OLDER, SILENT])
def test_issue_what_one_server_refuses_was_not_set_at_those_after_it(error: Exception, host: Host) -> None:
    """And those before it had it, which nobody was told: the exit code was that of wrong usage."""
    asked = host(a=None, b=error, c=None)
    with pytest.raises(SimmError) as caught:
        command.main(["settings", "set", "poll_us", "50"])
    assert str(caught.value) == f"not all servers have taken it: b: {error}; taken by a, c"
    assert type(caught.value) is SimmError and asked == ["a", "b", "c"]


@pytest.mark.parametrize(("first", "kind"), [(OLDER, UsageError), (SILENT, TransportError)])
def test_what_all_servers_refuse_is_wrong_usage(first: Exception, kind: type[Exception], host: Host) -> None:
    host(a=first, b=SILENT)
    with pytest.raises(kind, match=f"a: {first}; b: {SILENT}"):
        command.main(["settings", "set", "poll_us", "50"])


@pytest.mark.parametrize("words", [["list"], ["get", "poll_us"]])
def test_issue_a_server_of_this_host_that_hangs_was_left_out_without_a_word(
    words: list[str], host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host(a=SILENT, b=None)
    assert command.main(["settings", *words]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["SERVER", "b", "a:"] and err == ""
    assert command.main(["settings", *words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [row["server"] for row in json.loads(out)] == ["b"] and err == f"a: {SILENT}\n"
