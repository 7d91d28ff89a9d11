"""The end of every command: what stdout cannot encode is escaped, and costs no traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import cli
from simm.config.parsers import users
from simm.errors import ConfigError
from simm.testing import FakeClient, FakeStore
from simm.tools.console import guarded
from simm.wire.messages import Status

ROOT = Path(__file__).resolve().parents[3]


def said(encoding: str, errors: str, text: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return what a command that prints ``text`` has written to such a stdout."""
    raw = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors, newline="\n"))

        def command() -> int:
            print(text)
            sys.stdout.flush()
            sys.stdout.buffer.write(b"\xff\x00")
            return 0

        assert guarded(command, "simm test") == 0
        return raw.getvalue()


@pytest.mark.parametrize(("encoding", "errors", "written"), [
    ("ascii", "strict", b"\\u2588\\xe9\\udcff"), ("latin-1", "strict", b"\\u2588\xe9\\udcff"),
    ("ascii", "surrogateescape", b"\\u2588\\xe9\\udcff"), ("ascii", "replace", b"???"),
    ("utf-8", "strict", b"\xe2\x96\x88\xc3\xa9\\udcff"), ("utf_8", "surrogateescape", b"\xe2\x96\x88\xc3\xa9\xff"),
])  # fmt: skip
def test_each_character_is_printed(
    encoding: str, errors: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(encoding, errors, "\u2588\xe9\udcff", monkeypatch) == written + b"\n\xff\x00", "bytes stay as they are"


def test_streams_that_are_none_of_ours_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    assert guarded(lambda: print("\u2588") or 0, "simm test") == 0 and other.getvalue() == "\u2588\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [
    ["topo"], ["doctor"], ["config", "show"], ["man"], ["completions", "bash"], ["bench", "--help"], ["--help"],
])  # fmt: skip
def test_looking_has_no_traceback_in_any_encoding(words: list[str], encoding: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")} | {
        "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding, "SIMM_NAMESPACE": "n\u2588",
        "SIMM_RUNTIME_DIR": str(tmp_path), "PYTHONUTF8": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "simm", *words], env=environment, capture_output=True, check=False)
    assert done.returncode in (0, 1) and done.stdout and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), 1),
     (OSError(errno.EMFILE, "Too many open files"), 1), (OSError(errno.ENOMEM, "Cannot allocate memory"), 1),
     (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2), (PermissionError(errno.EACCES, "Denied", "x"), 2),
     (OSError(errno.EIO, "Input/output error"), 1)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_issue_what_the_system_lacks_now_is_no_wrong_usage(
    raised: OSError, code: int, serves: bool, wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit is not started again after 2. Other commands answer no by 1, and nobody was asked."""

    def run() -> int:
        if wrapped:
            raise ConfigError(f"cannot read the token file: {raised}") from raised
        raise raised

    assert guarded(run, "simm x", serves=serves) == (code if serves else 2)
    assert str(raised.strerror) in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["an unknown user", "a broken disk", "no memory"])
@pytest.mark.parametrize(("words", "code"), [
    (["exists", "k"], 2), (["delete", "k"], 2), (["get", "k"], 2), (["put", "k", "-"], 2), (["ctl", "keys"], 2),
    (["index"], 1), (["events"], 1),
])  # fmt: skip
def test_issue_a_key_is_not_said_to_be_absent_if_nobody_was_asked(
    words: list[str], code: int, fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``simm exists k || refill`` refilled."""

    def fail(*_: Any, **__: Any) -> Any:
        if fails == "no memory":
            raise MemoryError
        if fails == "a broken disk":
            raise ConfigError("cannot read the file") from OSError(errno.EIO, os.strerror(errno.EIO))
        users("no-such-user-here")

    monkeypatch.setitem(cli.COMMANDS, words[0], fail)
    assert cli.main(words) == code
    assert capsys.readouterr().err.startswith(f"simm {words[0]}: ")


@pytest.mark.parametrize("words", [["drain"], ["drain", "--no-wait"], ["resume"]])
def test_json_of_a_drain_is_all_that_is_on_stdout(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    link: Any = SimpleNamespace(status=dict)
    monkeypatch.setattr("simm.tools.connect.manager_client", lambda _: contextlib.nullcontext(link))
    monkeypatch.setattr("simm.tools.nodes.room_text", lambda *_: "no room elsewhere")
    monkeypatch.setattr("simm.tools.nodes.request", lambda *_: 7)
    monkeypatch.setattr("simm.tools.nodes.wait_drained", lambda _link, _name, out, _timeout: print("empty", file=out))
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["node", words[0], "a", *words[1:], "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"node": "a", "draining": words[0] == "drain", "shards": 7}
    assert ("no room elsewhere" in err) == (words[0] == "drain") and ("empty" in err) == (words == ["drain"])


@pytest.mark.parametrize("quota", [False, True])
def test_a_value_that_is_not_stored_has_a_reason(
    quota: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each failure was said to be a want of room."""
    (tmp_path / "value").write_bytes(b"12345")
    client = FakeClient(store=FakeStore(4))
    says = "no room in the FakeStore"
    if quota:
        says = "the values of this namespace hold all that its quota allows at fake/0"
        monkeypatch.setattr(client._puts, "store", lambda digests, *_: [Status.OVER_QUOTA] * len(digests))
        monkeypatch.setattr(client._puts, "_explain", lambda _, status: says if status == Status.OVER_QUOTA else "")
    monkeypatch.setattr(cli, "_client", lambda _: client)
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["put", "k", str(tmp_path / "value")]) == 1
    assert capsys.readouterr() == ("", f"simm put: 'k' of 5 bytes was not stored: {says}; see `simm status`\n")
