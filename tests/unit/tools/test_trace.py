"""``simm trace``: what it asks of clients, what it collects, and the sentence for what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.constants import TRACE_CONTROL
from simm.testing import FakeClient
from simm.tools import trace
from simm.tracing import spool
from simm.tracing.perfetto import fault_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("SIMM_TRACE_DIR", str(path))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["trace", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def recorded(folder: Path) -> Path:
    with FakeClient(trace=1, trace_dir=str(folder)) as client:
        assert client.put("k", b"v") and client.get("k") == b"v" and client.get("none") is None
    return folder


def test_start_and_stop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "start", "--ratio", "0.25", "--for", "5m", "--slow-ms", "20")
    assert code == 0 and "record 0.25 of their calls until" in out
    asked = json.loads((folder / TRACE_CONTROL).read_text())
    assert (asked["ratio"], asked["slow_ms"]) == (0.25, 20)
    code, out, _ = run(capsys, "stop")
    assert code == 0 and "on this host ends within a second" in out and "`start --all`, go on" in out
    assert not (folder / TRACE_CONTROL).exists()
    assert run(capsys, "stop")[:2] == (0, "nobody was asked to trace\n")


def test_the_folder_is_in_the_runtime_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "start", "--runtime-dir", str(tmp_path / "run"))[0] == 0
    assert (tmp_path / "run" / "trace" / TRACE_CONTROL).exists()


def test_a_file_for_perfetto_and_the_table(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "trace.json"
    code, out, err = run(capsys, "collect", "-o", str(output))
    assert code == 0 and err == "" and f"{output}: " in out and "3 traces" in out
    found = json.loads(output.read_text())
    spans = [event for event in found["traceEvents"] if event["ph"] != "M"]
    assert [event["name"] for event in spans if event["args"].get("op")] == ["put", "get", "get"]
    assert not [event for event in spans if fault_of(event)]
    code, again, _ = run(capsys, "summary", str(output))
    assert code == 0 and out.endswith(again) and again.splitlines()[0].split() == [
        "operation", "spans", "p50", "us", "p99", "us", "share",
    ]  # fmt: skip
    rows = json.loads(run(capsys, "summary", "--json", str(output))[1])
    assert {row["operation"]: row["spans"] for row in rows if not row["segment"]} == {"get": 2, "put": 1}


def test_issue_the_oldest_spans_are_left_out_with_a_word(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were read, in thirteen times the memory that the files take."""
    monkeypatch.setattr(spool, "EVENTS_MAX", 2)
    output = tmp_path / "trace.json"
    code, _, err = run(capsys, "collect", "-o", str(output))
    assert code == 0 and "left out " in err and "spans, the oldest: 2 are collected at most" in err
    assert len([event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] != "M"]) == 2


def test_issue_a_long_file_is_no_broken_one(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut, and then called no trace."""
    output = tmp_path / "trace.json"
    assert run(capsys, "collect", "-o", str(output))[0] == 0
    for least, code in ((output.stat().st_size, 0), (output.stat().st_size - 1, 2)):
        monkeypatch.setattr(trace, "_DOCUMENT_BYTES_MAX", least)
        ended, _, err = run(capsys, "summary", str(output))
        assert ended == code and ("is longer than" in err) is bool(code)


def test_json_is_all_that_is_on_stdout(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "collect", "-o", str(tmp_path / "trace.json"), "--json")
    assert code == 0 and {row["operation"] for row in json.loads(out)} == {"get", "put"}
    assert "open it at ui.perfetto.dev" in err and (tmp_path / "trace.json").exists()


def test_to_stdout(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "collect", "-o", "-")
    assert code == 0 and len(json.loads(out)["traceEvents"]) >= 3


def test_what_is_no_span_is_left_out_with_a_word(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "9-17979cfe362a0000.spans").write_text("nothing\n")
    (recorded / "9-17979cfe362a0001.spans").symlink_to("/etc/passwd")
    code, _, err = run(capsys, "collect")
    assert code == 0 and "left out 1 lines that are no spans" in err and "left out 1 files" in err


def test_clear(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("2024-10.old", "notes.old", "brain.spans"):
        (recorded / name).write_bytes(b"mine")
    assert run(capsys, "clear")[1] == f"removed 1 files of {recorded}\n"
    assert sorted(path.name for path in recorded.iterdir()) == ["2024-10.old", "brain.spans", "notes.old"]
    code, _, err = run(capsys, "collect")
    assert code == 1 and "has no spans" in err


@pytest.mark.parametrize(("words", "says"), [
    (("start", "--ratio", "2"), "0 to 1"), (("start", "--ratio", "off"), "simm trace stop"),
    (("start", "--for", "soon"), "--for: "), (("start", "--for", "2000h"), "at most 86400 s"),
    (("summary",), "summary needs a file"), (("summary", "/dev/null"), "is no trace"), (("stop", "x"), "takes no file"),
    (("collect", "--all"), "run it on each"), (("start", "--all", "--ratio", "2"), "0 to 1"),
    (("start", "--all", "--for", "2000h"), "at most 86400 s"),
    (("clear", "--json"), "clear takes no --json"), (("start", "--all", "--json"), "start takes no --json"),
    (("summary", "/nowhere/x"), "check the name"), (("begin",), "--help"),
])  # fmt: skip
def test_mistakes_get_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str], words: Any, says: str) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and says in err and len(err.splitlines()) == 1
