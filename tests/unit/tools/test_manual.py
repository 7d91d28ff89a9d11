"""The manual page and the completions: all that commands take is in them, and the programs that read them take them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.config.settings import SETTINGS
from simm.tools.ctl import command
from simm.tools.shell import completions, manual
from simm.tools.shell.manual import CommandText, described, settings_of

TEXTS = described(cli.COMMANDS)
#: What a data server can change while it runs (``simm/server/operators/admin.py``).
LIVE = {
    "log_level", "poll_us", "move_mib_s", "slow_ms", "policy", "keep_share", "keep_namespace_share", "near_share",
}  # fmt: skip


def flags_of(name: str) -> set[str]:
    """Return the flags that a command's --help shows."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.COMMANDS[name](["--help"], f"simm {name}")
    heads = "\n".join(re.findall(r"^  (-.*?)(?:   .*)?$", out.getvalue(), re.MULTILINE))
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", heads)) - {"-h", "--help"}


@pytest.fixture(scope="module")
def page() -> str:
    return manual.man_page(TEXTS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_description_has_what_help_shows(name: str) -> None:
    (text,) = [text for text in TEXTS if text.name == name]
    assert {flag for argument in text.flags for flag in argument.flags} == flags_of(name)
    assert text.line and text.about, "what it does"


def test_commands_do_not_run_and_parse_as_before() -> None:
    before = argparse.ArgumentParser.parse_args
    ran: list[Any] = []

    def command(argv: Any, prog: str) -> int:
        """one"""
        parser = argparse.ArgumentParser(prog=prog)
        parser.add_argument("--secret", help=argparse.SUPPRESS)
        parser.parse_args(argv)
        ran.append(argv)
        return 0

    assert described({"one": command}) == [CommandText("one", "one", "")]
    assert not ran and argparse.ArgumentParser.parse_args is before
    with pytest.raises(RuntimeError, match="parses no arguments"):
        described({"none": lambda _argv, _prog: 0})
    assert argparse.ArgumentParser.parse_args is before


def test_every_setting_is_described_once_with_its_variable(page: str) -> None:
    assert list(settings_of(TEXTS)) == list(SETTINGS)
    part = page.partition(".SH SETTINGS")[2].partition(".SH EXIT")[0].replace("\\-", "-")
    for setting in SETTINGS.values():
        assert len(re.findall(rf"^\\fB{setting.flag}\\fR", part, re.MULTILINE)) == 1, setting.flag
        assert len(re.findall(rf"\({setting.env}\b", part)) == 1
    assert "==SUPPRESS==" not in page


def test_the_page_is_one(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")

    def groff(text: str) -> Any:
        words = ["groff", "-man", "-Tutf8", "-ww"]
        return subprocess.run(words, input=text, capture_output=True, text=True, check=True)

    done = groff(page)
    assert done.stderr == ""
    text = re.sub(r"\x1b\[\d+m|.\x08", "", done.stdout)
    assert "simm dataserver" in text and "--token-file FILE" in text and "SIMM_TOKEN_FILE" in text
    assert groff(".none").stderr, "control: groff says what is wrong"


@pytest.fixture(scope="module")
def in_bash() -> Iterator[Any]:
    """Return what bash completes a command line to."""
    script = completions.bash(TEXTS)
    ask = '_simm; printf "%s\\n" "${COMPREPLY[@]}"'

    def complete(*words: str) -> list[str]:
        given = f'COMP_WORDS=({" ".join(map(repr, words))}); COMP_CWORD={len(words) - 1}'
        done = subprocess.run(
            ["bash", "-c", f"set -u\n{script}\n{given}\n{ask}"], capture_output=True, text=True, check=True
        )
        assert done.stderr == "", done.stderr
        return done.stdout.split("\n")[:-1]

    yield complete


def test_bash_completes_commands_flags_and_values(in_bash: Any, tmp_path: Path) -> None:
    (tmp_path / "a b.pem").touch()
    (tmp_path / "folder").mkdir()
    assert in_bash("simm", "ma") == ["manager", "man"]
    assert in_bash("simm", "dataserver", "--polic") == ["--policy"]
    assert in_bash("simm", "dataserver", "--no-w") == ["--no-warm"]
    assert in_bash("simm", "dataserver", "--policy", "") == ["lru", "reuse", "fifo", "sieve"]
    assert in_bash("simm", "manager", "--log-format", "j") == ["json"]
    assert in_bash("simm", "node", "d") == ["drain"]
    assert in_bash("simm", "manager", "--tls-cert", f"{tmp_path}/a") == [f"{tmp_path}/a b.pem"], "one file, one word"
    assert in_bash("simm", "manager", "--state-dir", f"{tmp_path}/") == [f"{tmp_path}/folder"], "folders only"
    assert in_bash("simm", "put", "key", f"{tmp_path}/a") == [f"{tmp_path}/a b.pem"]
    assert in_bash("simm", "manager", "--listen", "") == [""], "nothing fits"
    assert set(in_bash("simm", "manager", "--")) == flags_of("manager")


def test_bash_completes_what_follows_a_word(in_bash: Any, tmp_path: Path) -> None:
    """``simm ctl node`` and ``simm node drain`` were followed by the first word's choices again."""
    assert in_bash("simm", "ctl", "no") == ["node"] and in_bash("simm", "ctl", "--json", "no") == ["node"]
    assert in_bash("simm", "ctl", "node", "") == ["list", "summary", "drain", "resume", "set"]
    assert in_bash("simm", "ctl", "settings", "set", "k") == ["keep_share", "keep_namespace_share"]
    assert in_bash("simm", "ctl", "node", "drain", "") == in_bash("simm", "node", "drain", "") == [""]
    assert in_bash("simm", "trace", "s") == ["start", "stop", "summary"]
    (tmp_path / "a.json").touch()
    assert in_bash("simm", "trace", "summary", f"{tmp_path}/a") == [f"{tmp_path}/a.json"]
    assert in_bash("simmctl", "wh") == ["why"] and in_bash("/opt/simm/bin/simmctl", "kv", "d") == ["del"]
    assert in_bash("simmctl", "--watc") == ["--watch"]


def test_fish_completes_what_follows_a_word(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "simm.fish"
    script.write_text(completions.fish(TEXTS))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def complete(line: str) -> list[str]:
        asked = ["fish", "-c", f"source {script}; complete -C'{line}'"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        assert done.stderr == ""
        return sorted(each.partition("\t")[0] for each in done.stdout.splitlines())

    assert complete("simm ma") == ["man", "manager"]
    assert complete("simm ctl no") == complete("simmctl no") == ["node"]
    assert complete("simm ctl node ") == complete("simmctl node ") == ["drain", "list", "resume", "set", "summary"]
    assert complete("simm ctl settings set k") == ["keep_namespace_share", "keep_share"]
    assert complete("simm node drain ") == complete("simm ctl node drain ") == []
    assert complete("simm ctl node --no-w") == ["--no-wait"] and complete("simm status --no-w") == []
    assert complete("simm dataserver --policy s") == ["sieve"]


def test_zsh_completes_what_follows_a_word() -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    stubs = 'compadd() { shift; print -r -- "$@"; }; _arguments() { print -r -- "$CURRENT $words"; _simm_words; }'

    def complete(*words: str) -> list[str]:
        given = f"words=({' '.join(map(repr, words))}); CURRENT={len(words)}; service={words[0]}"
        script = f"{stubs}; {given}\n{completions.zsh(TEXTS)}"
        done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    nodes = "list summary drain resume set"
    assert complete("simm", "ctl", "node", "") == ["3 ctl node ", nodes]
    assert complete("simmctl", "node", "") == ["3 ctl node ", nodes], "simmctl is simm ctl"
    assert complete("simmctl", "--json", "kv", "") == ["4 ctl --json kv ", "exist get del"]
    assert complete("simm", "ctl", "node", "drain", "") == ["4 ctl node drain "]
    assert complete("simm", "node", "drain", "") == ["3 node drain "]


def test_words_that_follow_are_those_that_the_command_takes() -> None:
    for said, words in completions.FOLLOWING.items():
        _, subject, *rest = said.split()
        assert subject in command._SUBJECTS
        if subject in ("node", "namespaces", "settings") and not rest:
            acts = {word for what, word in command._ACTIONS if what == subject}
            assert acts <= set(words)
        if rest:
            assert set(words) == LIVE


@pytest.mark.parametrize("shell", completions.SHELLS)
def test_all_flags_are_in_every_script(shell: str, tmp_path: Path) -> None:
    script = completions.SHELLS[shell](TEXTS)
    for text in TEXTS:
        assert re.search(rf"\b{text.name}\b", script)
        for argument in text.flags:
            for flag in argument.flags:
                spelt = f"-{'sl'[len(flag) > 2]} {flag.lstrip('-')} " if shell == "fish" else flag
                assert spelt in script, text.name
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script)
    done = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_print_them(capsys: pytest.CaptureFixture[str], page: str) -> None:
    assert cli.main(["man"]) == 0
    assert capsys.readouterr().out == page
    for shell, make in completions.SHELLS.items():
        assert cli.main(["completions", shell]) == 0
        assert capsys.readouterr().out == make(TEXTS)
    assert cli.main(["completions", "tcsh"]) == 2 and "tcsh" in capsys.readouterr().err
