"""simm.testing.local_cluster: a cluster in one call, and nothing of it left behind."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import simm.testing
from simm.client import Client
from simm.config.local_token import find
from simm.config.parsers import parse_address
from simm.errors import SimmError, UsageError
from simm.sdk import local_cluster as started
from simm.sdk.local_cluster import LocalCluster
from simm.testing import local_cluster
from tests.support.child import ROOT, alive, forked_by
from tests.support.client_values import MIB
from tests.support.processes import HERE, remove_left_by
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.usefixtures("patient")

# --- a cluster in one call ----------------------------------------------------------------------------


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"-local-{os.getpid()}-" in name]


def local_files() -> list[str]:
    return [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("simm-local-")]


def test_a_local_cluster_is_gone_after_its_block() -> None:
    before = set(psutil.Process().children(recursive=True))
    with local_cluster(namespace="mine") as cluster:
        manager, client = cluster
        assert client.namespace == "mine"
        assert client.put("k", b"v")
        with Client(manager, namespace="mine") as other:
            assert other.get("k") == b"v"
        servers = set(psutil.Process().children(recursive=True)) - before
        assert len(servers) >= 3  # a manager, a supervisor, a worker
        assert segments() and local_files()
    assert not [each for each in servers if alive(each)]
    assert not segments() and not local_files()
    with pytest.raises(UsageError, match="closed"):
        client.get("k")


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_commands_find_the_servers_of_a_local_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool, chosen: bool
) -> None:
    """Its sockets are in a folder of its own, or in the one that was chosen.

    Commands look there by the manager's address, or told of that folder.
    """
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="l") as folder:  # short, as a socket's path has 107 bytes
        sockets = Path(folder) if chosen else None
        with LocalCluster(memory="16M", sockets=sockets) as cluster:
            assert cluster.sockets == (sockets or Path(cluster.folder, "run"))
            line = ["--manager", cluster.manager]
            if told:
                line += ["--runtime-dir", str(cluster.sockets)]
            command = [sys.executable, "-m", "simm"]
            run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
            for what in ("workers", "settings"):
                done = run([*command, "ctl", what, *line])
                assert done.returncode == 0 and cluster.name in done.stdout, done.stderr
            done = run([*command, "top", "--count", "1", *line])
            assert done.returncode == 0 and f"{cluster.name}  running" in done.stdout, "the manager's status"
            assert "! " not in done.stdout, "nothing is missing"


def test_a_local_cluster_goes_when_its_block_raises() -> None:
    with pytest.raises(KeyError):
        with local_cluster():
            raise KeyError
    assert not segments() and not local_files()


def test_a_local_cluster_takes_its_memory() -> None:
    with local_cluster("32M") as (_, client):
        keys = [f"k{number}" for number in range(60)]
        assert all(client.put_many(keys, [bytes(MIB)] * len(keys)))
        assert 8 < sum(client.exists_many(keys)) < 32


@pytest.mark.parametrize("victim", ["manager", "dataserver", "worker"])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_issue_a_server_that_was_killed_left_its_arena(victim: str, sig: signal.Signals) -> None:
    """An embedder may kill parts of its cluster; the folder was removed then, but the segment in /dev/shm was not."""
    cluster = LocalCluster("32M")
    try:
        pids = cluster.pids
        worker = forked_by(pids["dataserver"])[0].pid
        assert segments()  # those that are left may remove them at once
        os.kill({**pids, "worker": worker}[victim], sig)
    finally:
        cluster.close()
    assert not segments() and not local_files()


def test_a_server_that_was_killed_with_all_its_processes_leaves_no_arena() -> None:
    """None of them is left to remove it."""
    cluster = LocalCluster("32M")
    try:
        server = psutil.Process(cluster.pids["dataserver"])
        family = [server, *server.children(recursive=True)]
        assert segments()  # from now on, a cluster that starts in another test may remove them
        for sig in (signal.SIGSTOP, signal.SIGKILL):  # all stand still before the first one ends
            for process in family:
                process.send_signal(sig)
        psutil.wait_procs(family[1:], WAIT_S)
    finally:
        cluster.close()
    assert not segments() and not local_files()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"memory": "1M"}, "8M to 64T are allowed"), ({"memory": "60T"}, "dataserver did not start: .*need "),
     ({"memory": "much"}, "no size"),
     ({"memory": "64M", "namespace": ""}, "namespace"), ({"path": "udp"}, "path")],
    ids=repr,
)  # fmt: skip
def test_a_local_cluster_that_cannot_start_says_why(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SimmError, match=said):
        with local_cluster(**arguments):
            raise AssertionError("it did")
    assert not segments() and not local_files()


def test_a_local_cluster_where_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SimmError, match=r"no cluster can be started on this machine: .*/nonexistent/python"):
        with local_cluster():
            raise AssertionError("it did")
    assert not local_files()


def test_a_local_cluster_whose_server_ends_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server prints nothing and ignores SIGTERM: the caller used to get an error of subprocess."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.close(1)\ntime.sleep(600)\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("simm.sdk.local_cluster.STOP_S", 0.5)
    with pytest.raises(SimmError, match="the manager did not start: it logged nothing"):
        with local_cluster():
            raise AssertionError("it did")
    assert not local_files()


def test_a_server_that_is_killed_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error used to be whatever line the server had logged last."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\n"
        "print('2026 I simm: no RDMA', file=sys.stderr, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(SimmError, match=r"the manager did not start: it was killed by signal 9 \(SIGKILL\); .*memory"):
        with local_cluster():
            raise AssertionError("it did")
    assert not local_files()


def test_a_start_may_take_as_long_as_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faulting 64 GiB in takes more than a minute; the time without progress is what is limited."""
    monkeypatch.setattr(started, "_LOOK_S", 0.01)
    looks = itertools.count()

    def progress() -> int:
        number = next(looks)
        if number == 100:  # after a second at least, twice the time without progress
            os.write(into, b"READY at last\nmore")
        return number

    out, into = os.pipe()
    try:
        assert started._first_line(out, 0.5, progress) == "READY at last"
        assert started._first_line(out, 0.05, lambda: 7) is None
    finally:
        os.close(into)
    assert started._first_line(out, 60.0, lambda: 7) == "", "its end is seen at once"
    os.close(out)


def progress_of(
    program: str, steps: Sequence[tuple[bytes, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int, int]]:
    """Start a cluster whose manager is this program, which gets nowhere. Return its progress at each step.

    A step is what the program says then, and the file for which it waits, in this folder.
    """
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{program}")
    script.chmod(0o700)
    seen = []

    def first_line(out: int, _seconds: float, progress: Callable[[], tuple[int, int, int]]) -> None:
        for said, then in steps:
            assert os.read(out, 100) == said
            seen.append(progress())
            (folder / then).touch()

    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(started, "_first_line", first_line)
    with pytest.raises(SimmError, match="the manager did not start: nothing has happened"):
        LocalCluster("32M")
    return seen


def test_data_without_a_name_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--group`` the arena's data is a memfd, which is not in /dev/shm."""
    go_on = tmp_path / "go on"
    program = (
        f"import mmap, os, time\nfd = os.memfd_create('data')\nos.ftruncate(fd, {8 * MIB})\n"
        f"data = mmap.mmap(fd, {8 * MIB})\nos.write(1, b'mapped')\n"
        f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
        f"data[:] = bytes({8 * MIB})\nos.write(1, b'faulted in')\ntime.sleep(600)\n"
    )
    seen = progress_of(program, [(b"mapped", go_on.name), (b"faulted in", go_on.name)], tmp_path, monkeypatch)
    assert seen[1][0] - seen[0][0] >= 7 * MIB


def test_what_the_children_map_and_each_new_line_of_the_log_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint on a slow machine took a minute to import its library and to register the arena, and was given up."""
    program = (
        "import mmap, os, sys, time\n"
        f"def wait(name):\n    while not os.path.exists({str(tmp_path)!r} + '/' + name): time.sleep(0.01)\n"
        f"data = mmap.mmap(-1, {8 * MIB})\n"
        "me = os.getpid()\n"
        "if not os.fork():\n"
        f"    wait('register'); data[:] = bytes({8 * MIB}); os.write(1, b'registered')\n"
        "    while os.getppid() == me: time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.write(1, b'forked')\n"
        "wait('log'); print('10:00:01 worker 0 is 17, 0x7f3a', file=sys.stderr, flush=True); os.write(1, b'logged')\n"
        "wait('again'); print('10:00:02 worker 0 is 18, 0x7e0c', file=sys.stderr, flush=True); os.write(1, b'again')\n"
        "wait('other'); print('10:00:03 joined', file=sys.stderr, flush=True); os.write(1, b'other')\n"
        "time.sleep(600)\n"
    )
    steps = [(b"forked", "register"), (b"registered", "log"), (b"logged", "again"), (b"again", "other"),
             (b"other", "end")]  # fmt: skip
    seen = progress_of(program, steps, tmp_path, monkeypatch)
    assert seen[1][0] - seen[0][0] >= 7 * MIB
    assert [steps for _, _, steps in seen] == [0, 0, 1, 1, 2]


def test_issue_children_that_end_and_are_started_again_are_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose worker died every second was waited for, for ever: what it maps goes and comes again."""
    program = (
        "import mmap, os, sys, time\nme = os.getpid()\n"
        "child = os.fork()\n"
        "if not child:\n"
        f"    data = mmap.mmap(-1, {8 * MIB}); data[:] = bytes({8 * MIB}); os.write(1, b'mapped')\n"
        f"    while os.getppid() == me and not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0); os.write(1, b'ended'); time.sleep(600)\n"
    )
    seen = progress_of(program, [(b"mapped", "end"), (b"ended", "end")], tmp_path, monkeypatch)
    assert seen[0][0] >= 8 * MIB and seen[1] == seen[0]


def test_a_data_server_waits_for_as_long_as_its_manager_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the manager did not answer within the 30 s that a data server has otherwise."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        "if 'simm.manager' in sys.argv: print('READY manager 127.0.0.1:1', flush=True)\n"
        "else: time.sleep(600)\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(started, "_LOOK_S", 0.05)
    with pytest.raises(SimmError, match="the dataserver did not start, as the manager has ended: it logged nothing"):
        with local_cluster():
            raise AssertionError("it did")
    assert not local_files()


def test_a_data_server_without_a_manager(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "simm.dataserver", "--manager", "127.0.0.1:1", "--memory", "32M", "--name", "alone",
         "--runtime-dir", str(tmp_path), "--numa", "0", "--join-timeout", "100ms"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "manager 127.0.0.1:1 not reachable for 0 s (cannot connect: " in ended.stderr


def test_a_server_that_gets_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys, time\nprint('stuck', file=sys.stderr)\ntime.sleep(600)\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(started, "START_S", 1.0)
    with pytest.raises(SimmError, match="the manager did not start: nothing has happened for 1 s"):
        with local_cluster():
            raise AssertionError("it did")
    assert not local_files()


# --- nobody closes it -----------------------------------------------------------------------------------

_MAKE = (
    "from simm.client import Client; c = Client.local('32M'); assert c.put('k', b'v'); "
    "print(c._owned.folder, flush=True)"
)


def make_elsewhere(then: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that makes a cluster and then does something; its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_MAKE}; {then}"], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def arenas_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"-local-{pid}-" in name]


@pytest.mark.parametrize("then", ["pass", "raise KeyError", "import sys; sys.exit(3)"])
def test_a_cluster_goes_with_its_interpreter(then: str) -> None:
    process, folder = make_elsewhere(then)
    process.communicate(timeout=WAIT_S)
    assert not arenas_of(process.pid) and not folder.exists()


def test_a_cluster_goes_with_its_last_reference() -> None:
    cluster = LocalCluster("32M")
    folder, servers = Path(cluster.folder), [psutil.Process(pid) for pid in cluster.pids.values()]
    assert folder.exists() and segments()
    gc.disable()
    try:
        del cluster
    finally:
        gc.enable()
    assert not folder.exists() and not segments() and not any(map(alive, servers))


def test_what_a_killed_process_leaves() -> None:
    """The arena goes with the data server, the folder with the next cluster; those of living processes stay."""
    process, folder = make_elsewhere("input()")
    other, stays = make_elsewhere("input()")
    try:
        assert arenas_of(process.pid) and folder.exists()
        servers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        wait_until(lambda: not arenas_of(process.pid), "the data server removes the arena")
        # Until then its manager may write into the folder that the next cluster removes.
        wait_until(lambda: not any(map(alive, servers)), "its servers end")
        with LocalCluster("32M"):
            assert not folder.exists() and stays.exists() and arenas_of(other.pid)
    finally:
        other.communicate("\n", timeout=WAIT_S)
    assert not stays.exists()


def test_a_named_cluster_keeps_what_it_has_suspended() -> None:
    """And leaves nothing else: ``simm local --name NAME --warm``."""
    name = f"{HERE}kept"

    def left() -> list[str]:
        return [each for each in os.listdir("/dev/shm") if f"-{name}-0-" in each]

    try:
        with LocalCluster("32M", arguments=("--warm",), name=name) as cluster:
            assert cluster.name == name and len(left()) == 2
        assert len(left()) == 2
    finally:
        remove_left_by(name)
    with LocalCluster("32M", name=name) as cluster:
        assert len(left()) == 2
        os.kill(cluster.pids["dataserver"], signal.SIGKILL)
    assert not left()


def test_a_local_cluster_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(SimmError, match="no cluster can be started on this machine"):
        with local_cluster():
            raise AssertionError("it did")


def test_the_fixtures_of_the_docstring_work(tmp_path: Path) -> None:
    lines = (simm.testing.__doc__ or "").splitlines()
    at = next(number for number, line in enumerate(lines) if "@pytest.fixture" in line)
    fixture = [line[4:] for line in lines[at : at + 3]]
    (fake_fixture,) = [line.partition("``")[2].rpartition("``")[0] for line in lines if "return FakeClient()" in line]
    code = [
        "import pytest", "from simm.testing import FakeClient, local_cluster", *fixture,
        "@pytest.fixture", "def fake():", f"    {fake_fixture}",
        "def test_cluster(simm_cluster): assert simm_cluster.client.put('k', b'v')",
        "def test_fake(fake): assert fake.put('k', b'v')",
    ]  # fmt: skip
    (tmp_path / "test_it.py").write_text("\n".join(code))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_waiting_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose server is never reached raises an error with the reason, and is removed."""
    monkeypatch.setattr(simm.testing, "READY_S", 0.0)
    monkeypatch.setattr(Client, "wait_ready", lambda self, timeout_s: False)
    with pytest.raises(SimmError, match="the cluster does not get ready: "):
        with local_cluster():
            raise AssertionError("it did")
    assert not segments() and not local_files()


# --- what else lies in the current folder --------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with modules that somebody else has put there; return a file that they make when they run."""
    trace = tmp_path / "ran"
    for name in ("numpy", "psutil", "selectors", "_posixshmem"):
        (tmp_path / f"{name}.py").write_text(f"open({str(trace)!r}, 'a').write({name!r}); raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    return trace


@pytest.mark.parametrize("search_path", ["", os.pathsep, f"/nonexistent{os.pathsep}"])
def test_a_local_cluster_runs_nothing_of_the_current_folder(
    planted: Path, monkeypatch: pytest.MonkeyPatch, search_path: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path)
    with local_cluster("32M") as (_, client):
        assert client.put("k", b"v")
    assert not planted.exists()


def test_the_command_runs_nothing_of_the_current_folder(planted: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in (["demo", "--prompts", "1", "--memory", "128M"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "simm", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert not planted.exists()


def test_the_planted_modules_would_run(planted: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simm.manager"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3 and planted.exists()


def test_a_client_finds_the_token_before_the_data_server_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who puts too early hears that there is no server yet, not that the token is wrong."""
    found: list[str] = []

    class Cluster(LocalCluster):
        def _start(self, module: str, *arguments: str) -> str:
            if module == "dataserver":
                found.append(find(tmp_path, [parse_address(self.manager)]))
                done = subprocess.run(
                    [sys.executable, "-m", "simm", "put", "k", "-", "--manager", self.manager],
                    input=b"v", capture_output=True, check=False, timeout=WAIT_S,
                )  # fmt: skip
                found.append(done.stderr.decode())
            return super()._start(module, *arguments)

    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Cluster(16 * MIB) as cluster:
        token, said = found
        assert token == cluster.token
        assert "token" not in said and "server" in said, said
