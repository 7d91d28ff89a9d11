"""The ``simm`` command as a person meets it: what it prints, its exit codes, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm import __version__, cli
from simm.client import Client
from simm.config.settings import load
from simm.constants import VALUE_BYTES_MAX
from simm.errors import CorruptionError, TransportError
from simm.tools import demo, doctor, nodes
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the surroundings but patience; what the command changes in this process is put back."""
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")  # on a busy machine an answer may take more than the 3 s
    monkeypatch.setattr("simm.tools.nodes.REACH_S", 30.0)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def command(*argv: str) -> tuple[int, str, str]:
        code = cli.main(list(argv))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return command


@pytest.fixture
def at(cluster: Any, request: pytest.FixtureRequest) -> list[str]:
    """Flags that lead to the session's cluster, and a namespace of the test's own there."""
    return ["--manager", cluster.manager, "--namespace", f"cli-{zlib.crc32(request.node.name.encode())}"]


def healthy(run: Run, *there: str) -> tuple[str, str]:
    """What `simm status` says of a healthy cluster. READY precedes the first heartbeat, and one may be late."""
    found: tuple[int, str, str] = wait_until(
        lambda: (said := run("status", *there))[0] == 0 and said, "the data server runs"
    )
    return found[1:]


def spawn(argv: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    streams = {
        "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)}, **more,
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "simm", *argv], **streams)


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_value_goes_in_and_out(run: Run, at: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(100_000))
    assert run("put", "k", str(source), *at) == (0, "stored k (100,000 bytes)\n", "")
    assert run("exists", "k", *at) == (0, "yes  k\n", "")
    assert run("get", "k", "-o", str(target), *at) == (0, "", "")
    assert target.read_bytes() == source.read_bytes()
    assert run("delete", "k", *at) == (0, "deleted     k\n", "")
    assert run("exists", "k", *at) == (1, "no   k\n", "")
    assert run("get", "k", *at) == (1, "", "simm get: 'k' is not stored\n")
    assert run("delete", "k", "l", *at) == (1, "not stored  k\nnot stored  l\n", "")


def test_exists_of_many_is_yes_only_for_all(run: Run, at: list[str], tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"text")
    run("put", "a", str(source), *at)
    assert run("exists", "a", "b", *at) == (1, "yes  a\nno   b\n", "")
    assert run("exists", "-q", "a", *at) == (0, "", "")
    assert run("get", "a", *at) == (0, "text", "")


def test_pipes_on_both_sides(at: list[str]) -> None:
    value = os.urandom(300_000)
    put = spawn(["put", "k", "-", *at], stdin=subprocess.PIPE)
    assert put.communicate(value, WAIT_S) == (b"stored k (300,000 bytes)\n", b"") and put.returncode == 0
    get = spawn(["get", "k", *at])
    out, err = get.communicate(timeout=WAIT_S)
    assert out == value and err == b"" and get.returncode == 0


def test_the_same_word_puts_stdin_and_gets_to_stdout(run: Run, at: list[str], tmp_path: Path) -> None:
    value = bytes(range(256)) * 40 + b"\r\n\x1a\x00"
    put = spawn(["put", "k", "-", *at], stdin=subprocess.PIPE)
    assert put.communicate(value, WAIT_S) == (b"stored k (10,244 bytes)\n", b"") and put.returncode == 0
    get = spawn(["get", "k", "-", *at])
    assert get.communicate(timeout=WAIT_S) == (value, b"") and get.returncode == 0
    target = tmp_path / "out"
    assert run("get", "k", str(target), *at) == (0, "", "") and target.read_bytes() == value
    code, out, err = run("get", "k", "-", "-o", str(target), *at)
    assert (code, out) == (2, "") and "two files to write to: give FILE or -o FILE" in err
    assert run("get", "none", "-", *at) == (1, "", "simm get: 'none' is not stored\n")


@pytest.mark.parametrize(("words", "closed", "text"), [
    (["put", "k", "-"], "<&-", "stdin is empty: a value has at least one byte"),
    (["get", "k", "-"], ">&-", "stdout is closed: name a file"), (["get", "k"], ">&-", "stdout is closed: name a file"),
    (["ctl", "kv", "get", "k"], ">&-", "stdout is closed: `simm get KEY FILE` writes"),
])  # fmt: skip
def test_a_stream_that_is_closed_is_said_in_a_sentence(at: list[str], words: list[str], closed: str, text: str) -> None:
    command = shlex.join([sys.executable, "-m", "simm", *words, *at])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], env=environment, capture_output=True, text=True,
                          timeout=WAIT_S, check=False)  # fmt: skip
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(at: list[str]) -> None:
    put = spawn(["put", "k", "-", *at], stdin=subprocess.PIPE)
    put.communicate(bytes(1 << 20), WAIT_S)
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        get = spawn(["get", "k", *at], stdout=closed)
        _, err = get.communicate(timeout=WAIT_S)
    assert get.returncode == 141 and err == b""


def test_a_failed_write_leaves_the_old_file(
    run: Run, at: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    target.chmod(0o640)
    run("put", "k", str(source), *at)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        code, _, err = run("get", "k", "-o", str(target), *at)
    assert code == 2 and "No space left on device; make room there" in err
    assert target.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert run("get", "k", "-o", str(target), *at)[0] == 0
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o640
    code, _, err = run("get", "k", "-o", "/dev/full", *at)
    assert code == 2 and "No space left on device" in err


def test_binary_values_stay_off_terminals(run: Run, at: list[str], tmp_path: Path) -> None:
    values = {"binary": b"\x00\xff\x1b", "escape": b"\x1b[2J", "text": "déjà vu\n".encode()}
    for key, value in values.items():
        (tmp_path / key).write_bytes(value)
        run("put", key, str(tmp_path / key), *at)
    words: list[tuple[str, list[str], int]] = [
        ("binary", [], 2), ("escape", [], 2), ("text", [], 0), ("binary", ["-o", "-"], 0), ("binary", ["-"], 0),
    ]  # fmt: skip
    for key, extra, code in words:
        ours, theirs = os.openpty()
        get = spawn(["get", key, *extra, *at], stdout=theirs)
        os.close(theirs)
        _, err = get.communicate(timeout=WAIT_S)
        assert get.returncode == code and (b"name a file, or - to print it" in err) == (code == 2)
        if code == 0:
            assert os.read(ours, 100).replace(b"\r", b"") == values[key]
        os.close(ours)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["put", "k", "/no/such/file"], 2, "/no/such/file: No such file or directory; check the name"),
        (["put", "k", "/"], 2, "Is a directory; name a file"),
        (["put", "k", "/dev/null"], 2, "/dev/null is empty: a value has at least one byte"),
        (["put", "", __file__], 2, "a key has"),
        (["put", "k" * 257, __file__], 2, "a key has"),
        (["get", "k" * 257], 2, "a key has"),
        (["exists", ""], 2, "a key has"),
        (["put"], 2, "the following arguments are required: KEY, FILE; see `simm put --help`"),
        (["get", "k", "--path", "rdma"], 2, "path"),
        (["get", "k", "--deadline-ms", "soon"], 2, "deadline_ms (from --deadline-ms)"),
        (["get", "k", "--config", "/no/such.json"], 2, "cannot read the settings file"),
        (["bench", "walk"], 2, "'walk' is not an operation"),
        (["config", "show", "nothing"], 2, "invalid choice: 'nothing'"),
        (["config"], 2, "required"),
        (["doctor", "--now"], 2, "unrecognized arguments: --now"),
        (["demo", "--prompts", "0"], 2, "--prompts 0: a number from 1 to 1000"),
        (["demo", "--prompts", "100", "--memory", "64M"], 2, "fewer --prompts"),
        (["stauts"], 2, "did you mean `simm status`?"),
        (["zzz"], 2, "`simm --help` lists them"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, at: list[str], argv: list[str], code: int, text: str) -> None:
    extra = at if argv[0] in ("put", "get", "exists") else []
    found, out, err = run(*argv, *extra)
    assert (found, out) == (code, "") and text in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_value_that_is_too_large_is_refused_before_it_is_sent(run: Run, at: list[str], tmp_path: Path) -> None:
    source = tmp_path / "large"
    with open(source, "wb") as file:
        file.truncate(VALUE_BYTES_MAX + 1)
    code, _, err = run("put", "k", str(source), *at)
    assert code == 2 and "too large: a value has at most 67,088,384 bytes; split it" in err


# --- clusters that are not there ------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["get", "k"], ["put", "k", __file__], ["exists", "k"], ["delete", "k"], ["status"]])
def test_no_manager_is_not_a_miss(run: Run, argv: list[str], tmp_path: Path) -> None:
    code, out, err = run(*argv, "--manager", "127.0.0.1:1", "--runtime-dir", str(tmp_path))
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "no manager answers" in err and "--manager or SIMM_MANAGER" in err


def test_servers_that_are_gone_are_not_misses(run: Run, make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    one = make_cluster(memory="32M")
    there = ["--manager", one.manager]
    (tmp_path / "v").write_bytes(b"v")
    assert run("put", "k", str(tmp_path / "v"), *there)[0] == 0
    out, _ = healthy(run, *there)
    assert f"{one.name}/0" in out and "shm" in out
    one.kill("dataserver")
    there += ["--deadline-ms", "5000"]
    for argv in (["get", "k"], ["exists", "k"], ["delete", "k"], ["put", "k", str(tmp_path / "v")]):
        code, out, err = run(*argv, *there)
        assert code == 2 and out == "" and ("cannot be reached" in err or "no data server has joined" in err), argv
    assert run("status", *there)[0] == 1


# --- looking --------------------------------------------------------------------------------------------


def test_status_shows_what_is_stored_and_how_it_is_reached(run: Run, cluster: Any) -> None:
    out, err = healthy(run, "--manager", cluster.manager, "--json")
    assert err == ""
    (node,) = json.loads(out)["nodes"]
    assert node["name"] == cluster.name and node["state"] == "running"
    (worker,) = node["workers"]
    assert worker["path"] == "shm" and worker["shards"] == 16_384 and worker["capacity_bytes"] > 0
    out, _ = healthy(run, "--manager", cluster.manager, "--path", "tcp")
    header, row = out.splitlines()[2:4]
    assert header.split()[:5] == ["SERVER", "STATE", "NUMA", "ADDRESS", "USED"] and row.split()[-1] == "tcp"
    assert "path=tcp was asked for" in out


@pytest.mark.parametrize("words", [
    ["status"], ["node", "list"], ["top", "--count", "1"], ["ctl", "cluster", "status"], ["ctl", "shard", "list"],
    ["topo"],
])  # fmt: skip
def test_looking_has_no_traceback_in_a_terminal_without_utf8(cluster: Any, words: list[str]) -> None:
    with Client(cluster.manager, namespace="n\u2588") as client:
        assert client.put("k", b"v") and client.get("k") == b"v"
        process = spawn([*words, *([] if words == ["topo"] else ["--manager", cluster.manager])],
                        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"})  # fmt: skip
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, 1) and out.isascii() and out and b"Traceback" not in err, err


def test_status_is_unhealthy_with_a_shard_or_a_server_missing() -> None:
    worker = {"path": "shm", "reason": ""}
    found: dict[str, Any] = {"shards_without_owner": 0, "nodes": [{"state": "running", "workers": [worker]}]}
    assert nodes.healthy(found)
    assert not nodes.healthy({**found, "shards_without_owner": 1})
    assert not nodes.healthy({**found, "nodes": []})
    worker["path"] = "down"
    assert not nodes.healthy(found)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (250 << 20, "250M"), (3 << 40, "3T")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert nodes.bytes_text(count) == text


def test_config_show_says_where_each_value_comes_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.json").write_text('{"policy": "lru", "dataserver": {"poll_us": 7}}')
    monkeypatch.setenv("SIMM_NUMA", "0")
    code, out, err = run("config", "show", "dataserver", "--config", str(tmp_path / "s.json"), "--memory", "2G")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert re.search(r"lru +file .*s\.json$", lines["policy"])
    assert re.search(r"7 +file .*s\.json \[dataserver\]$", lines["poll_us"])
    assert lines["numa"].endswith("environment SIMM_NUMA") and lines["memory"].endswith("--memory")
    assert lines["streams"].endswith("default") and "namespace" not in lines  # a client's
    code, out, _ = run("config", "show", "--json")
    assert json.loads(out)["namespace"] == {"value": "default", "origin": "default"}


def test_a_mistyped_variable_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMM_MANGER", "h:1")
    assert run("config", "show")[0] == 0
    assert "the nearest setting is SIMM_MANAGER" in caplog.text


def test_doctor_tells_each_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [doctor.Finding("cpus", "ok", "enough"), doctor.Finding("huge-pages", "warn", "none", "echo advise")]
    monkeypatch.setattr(doctor, "run_checks", lambda: findings)
    code, out, _ = run("doctor")
    assert code == 0 and "-> echo advise" in out and "1 ok, 1 to look at, 0 that keep" in out
    findings.append(doctor.Finding("shm-size", "fail", "64M", "mount it larger"))
    code, out, _ = run("doctor", "--json")
    assert code == 1 and json.loads(out)[2] == {
        "name": "shm-size", "status": "fail", "detail": "64M", "remedy": "mount it larger",
    }  # fmt: skip


def test_help_version_and_no_command(run: Run) -> None:
    assert run("version") == run("--version") == (0, f"simm {__version__}\n", "")
    code, out, err = run("--help")
    assert code == 0 and err == "" and all(f"\n  {name} " in out for name in cli.COMMANDS)
    code, out, err = run()
    assert code == 2 and out == "" and err.startswith("usage: simm COMMAND")
    for name in cli.COMMANDS:
        code, out, err = run("help", name)
        assert (code, err) == (0, "") and f"simm {name}" in out, name


def test_a_light_command_imports_nothing_heavy() -> None:
    code = "import sys; from simm.cli import main; main(['version']); print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=WAIT_S,
    )  # fmt: skip
    assert done.stdout.split()[-1] == "False", done.stderr


# --- local ----------------------------------------------------------------------------------------------


def start_local(*argv: str) -> tuple[subprocess.Popen[bytes], str]:
    process = spawn(["local", "--listen", "127.0.0.1:0", "--memory", "32M", *argv])
    assert process.stdout is not None
    ready = process.stdout.readline().decode()
    assert ready.startswith("READY local "), (ready, process.communicate(timeout=WAIT_S))
    return process, ready.split()[2]


def left_by(process: subprocess.Popen[bytes]) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"-local-{process.pid}-" in name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_local_serves_until_a_signal_and_leaves_nothing(number: signal.Signals, nothing_is_left: Path) -> None:
    process, manager = start_local()
    assert left_by(process)  # the arena: so the later check can see one
    with Client(manager) as client:
        assert client.put("k", b"v") and client.get("k") == b"v"
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert not psutil.wait_procs(family, timeout=WAIT_S)[1] and not left_by(process)


@pytest.mark.parametrize("given", [(), ("--insecure",)], ids=["default", "positive control: --insecure"])
def test_local_draws_a_token(given: tuple[str, ...], nothing_is_left: Path) -> None:
    """Its port is open to every user of this host. Its own user's clients find the token."""
    process, manager = start_local(*given)
    try:
        with Client(manager) as client:
            assert client.put("k", b"v") and client.get("k") == b"v"
        if given:
            with Client(manager, token="") as client:
                assert client.get("k") == b"v"
        else:
            with pytest.raises(TransportError, match="missing token"):
                Client(manager, token="")
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def test_commands_look_where_local_was_told_to_put_its_sockets(nothing_is_left: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="l", dir=nothing_is_left) as folder:
        process, manager = start_local("--runtime-dir", folder)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "simm", "ctl", "workers", "--manager", manager, "--runtime-dir", folder],
                capture_output=True, text=True, timeout=WAIT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0 and "/0 " in done.stdout, done
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("drawn", [True, False])
def test_issue_two_local_clusters_of_a_login_have_folders_of_their_own(
    drawn: bool, nothing_is_left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where XDG_RUNTIME_DIR is set both had it, and commands for one cluster changed the other as well.

    Also where the first has its token from a file: its folder is then published without one.
    """
    with tempfile.TemporaryDirectory(prefix="x", dir=nothing_is_left) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        given = []
        if not drawn:
            token = Path(folder, "token")
            token.touch(0o600)
            token.write_text("admin all a-token-of-sixteen-bytes-or-more\n")
            monkeypatch.setenv("SIMM_TOKEN_FILE", str(token))
            given = ["--token-file", str(token)]
        # The other one's sockets are where commands look without being told.
        where = [] if drawn else ["--runtime-dir", f"{folder}/simm"]
        first, second = start_local(*given), start_local(*given, *where)
        try:
            for _, manager in (first, second):
                with Client(manager) as client:
                    assert client.put("k", b"v")
            done = subprocess.run(
                [sys.executable, "-m", "simm", "ctl", "evict", "*", "--manager", first[1]],
                capture_output=True, text=True, timeout=WAIT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done
            with Client(first[1]) as one, Client(second[1]) as other:
                assert one.get("k") is None and other.get("k") == b"v"
        finally:
            for process, _ in (first, second):
                process.terminate()
                process.communicate(timeout=WAIT_S)


def test_local_tells_a_person_where_the_page_is(nothing_is_left: Path) -> None:
    port = reserve_port()
    terminal, theirs = os.openpty()
    words = ["local", "--listen", "127.0.0.1:0", "--memory", "32M", "--http", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "simm", *words], stdout=theirs, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    os.close(theirs)
    try:
        text = ""
        while "Ctrl-C stops it" not in text:
            text += os.read(terminal, 4096).decode()
        assert f"  http://127.0.0.1:{port}/ shows what clients do" in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S) as page:
            assert b"<title>SiMM</title>" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
        os.close(terminal)


def test_local_says_which_of_its_servers_ended(nothing_is_left: Path) -> None:
    process, _ = start_local()
    (manager,) = [
        child for child in psutil.Process(process.pid).children() if "simm.manager" in child.cmdline()
    ]  # fmt: skip
    manager.kill()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and err.startswith(
        b"simm local: the manager has ended: it was killed by signal 9 (SIGKILL)"
    ) and not left_by(process)


def test_local_joins_no_other_manager() -> None:
    process = spawn(["local", "--memory", "32M", "--manager", "10.0.0.1:30001"])
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2 and out == b""
    assert err.startswith(b"simm local: --manager 10.0.0.1:30001: `simm local` starts a manager of its own")


def test_local_on_a_port_that_is_taken(cluster: Any) -> None:
    process = spawn(["local", "--listen", cluster.manager, "--memory", "32M"])
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and out == b"" and err.startswith(b"simm local: the manager did not start")
    assert b"choose another --listen" in err and err.count(b"\n") == 1


def test_local_hands_each_server_the_flags_that_are_its_own() -> None:
    settings = load(
        "local", {"memory": "2G", "warm": False, "heartbeat_ms": "50", "http": "127.0.0.1:0", "numa": "0"},
        {"SIMM_POLICY": "lru"},
    )  # fmt: skip
    flags = cli.server_flags(settings)
    assert flags["manager"] == ["--heartbeat-ms=50", "--http=127.0.0.1:0", "--listen=127.0.0.1:30001"]
    assert flags["dataserver"] == [
        "--numa=0", f"--memory={2 << 30}", "--policy=lru", "--no-warm", "--listen=127.0.0.1:0",
    ]  # fmt: skip
    assert "--memory=auto" in cli.server_flags(load("local", {"memory": "auto"}, {}))["dataserver"]
    # What the surroundings say is no flag; what somebody names is.
    flags = cli.server_flags(load("local", {}, {"XDG_RUNTIME_DIR": "/run/user/7"}))
    assert not any("--runtime-dir" in flag for each in flags.values() for flag in each)
    named = cli.server_flags(load("local", {"runtime_dir": "/x"}, {"XDG_RUNTIME_DIR": "/run/user/7"}))
    assert "--runtime-dir=/x" in named["dataserver"]
    # The children have a current folder of their own.
    assert f"--log-file={os.getcwd()}/log" in cli.server_flags(load("local", {"log_file": "log"}, {}))["manager"]


def test_ctrl_c_while_a_pipe_is_read(at: list[str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = spawn(["put", "k", str(pipe), *at])
    with open(pipe, "wb", buffering=0) as ours:
        ours.write(b"begun")
        until = time.monotonic() + WAIT_S
        while unread(ours.fileno()):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        # CPython blocks on if the signal comes between its last look at its flags and read(2): press again, then. A
        # busy machine may need some seconds for the end, which another signal would disturb.
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.communicate(timeout=30) == (b"", b"")
                break
    assert process.returncode == 130


def unread(fd: int) -> int:
    """Bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


# --- demo -----------------------------------------------------------------------------------------------


def test_prompts_share_prefixes_and_pages_are_named_by_all_that_is_before_them() -> None:
    names = [demo.page_names(prompt) for prompt in demo.prompts(6, 1, next_turn=False)]
    assert len({name for each in names for name in each}) == demo.distinct_pages(6)
    system, group = demo.SYSTEM_PAGES, demo.SYSTEM_PAGES + demo.GROUP_PAGES
    assert names[0][:system] == names[1][:system] and names[0][system] != names[1][system]
    assert names[0][:group] == names[demo.GROUPS][:group] and names[0][group] != names[demo.GROUPS][group]
    longer = demo.page_names(demo.prompts(2, 1, next_turn=True)[1])
    assert longer[: len(names[1])] == names[1] and len(longer) == len(names[1]) + demo.NEXT_TURN_PAGES
    one = list(range(40))
    assert len(demo.page_names(one)) == 2  # a page that is not full has no name
    assert demo.page_names(one)[1] != demo.page_names([one[0] + 1, *one[1:]])[1]
    assert demo.page_names(one) != demo.page_names(one[16:])


def test_the_reader_notices_every_wrong_byte(cluster: Any) -> None:
    prompt = demo.prompts(1, 5, next_turn=False)[0][: 3 * demo.PAGE_TOKENS]
    engine = demo.Engine(cluster.manager, "auto")
    with engine.client as client:
        assert engine.write(prompt, demo.Timed()) == (0, 3)
        assert engine.write(prompt, demo.Timed()) == (3, 0)
        assert engine.read(prompt, demo.Timed()) == (3, 3)
        key = demo.halves(demo.page_names(prompt))[3]
        wrong = bytearray(demo.HALF_BYTES)
        demo.compute(key, memoryview(wrong))
        wrong[-1] ^= 1
        client.put(key, wrong)
        with pytest.raises(CorruptionError, match="other bytes than were stored"):
            engine.read(prompt, demo.Timed())
        client.delete(key)
        assert engine.read(prompt, demo.Timed()) == (1, 3)
        client.delete_many(demo.halves(demo.page_names(prompt)))


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_the_demo_from_end_to_end(run: Run, path: str, nothing_is_left: Path) -> None:
    code, out, err = run("demo", "--prompts", "2", "--path", path, "--json")
    assert code == 0, err
    found = json.loads(out)
    own = demo.GROUP_PAGES + demo.OWN_PAGES
    assert found["writer"]["pages"] == [[0, demo.SYSTEM_PAGES + own], [demo.SYSTEM_PAGES, own]]
    whole = demo.SYSTEM_PAGES + own
    assert found["reader"]["pages"] == [[whole, whole], [whole, whole + demo.NEXT_TURN_PAGES]]
    assert found["reader"]["bytes"] == 2 * whole * demo.PAGE_BYTES and found["reader"]["path"] == path
    lines = demo.report(found["writer"], found["reader"])
    assert len(lines) == 8 and lines[1].endswith(" 30.0%") and lines[2].endswith(" 95.2%")  # 24 and 80 of 80 and 84


# --- scripts/demo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "venv", "text"),
    [
        ("3.9", 0, "is Python 3.9; name a 3.10 to 3.13 with PYTHON="),
        ("3.11", 1, "apt-get install python3.11-venv"),
        (None, 0, "is not installed; on Debian and Ubuntu: apt-get install python3 python3-venv"),
    ],
)
def test_scripts_demo_says_what_is_missing(tmp_path: Path, version: str | None, venv: int, text: str) -> None:
    python = tmp_path / "python"
    if version is not None:
        python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit {venv};; esac\necho {version}\n')
        python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "demo"], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1
