"""Data servers without the memory that they want: each ends with one line that says what to change, or serves.

F23: one whose cgroup another process fills, so that the kernel kills. It serves on with its values.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from simm.client import Client
from simm.host.memory import huge_pages_allowed
from tests.support.cgroup import oom_kills, own_cgroup, used_bytes
from tests.support.child import READY_S, THIS_HOST, Child, Place, child_environment
from tests.support.fleet import Fleet, Server
from tests.support.measures import measured
from tests.support.processes import HERE, new_folder
from tests.support.waiting import wait_until

MIB = 1 << 20
#: What starts a program with a /dev/shm of its own, of so many bytes, of which so many are used.
OWN_SHM = (
    "mount -t tmpfs -o size=$0 tmpfs /dev/shm && head -c $1 /dev/zero >/dev/shm/other && shift && "
    '"$@"; code=$?; ls /dev/shm | grep -v other >&2; exit $code'
)


def in_own_shm(size: str, used: str) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", OWN_SHM, size, used]


SMALL = "but only 16.0 MiB are free in /dev/shm; mount -o remount,size="
#: What is short -> how the server is started, and what its one line says.
SHORT: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "/dev/shm too small": (in_own_shm("16M", "0"), (), SMALL),
    "/dev/shm full": (in_own_shm("96M", "80M"), (), SMALL),
    "/dev/shm full when its pages are taken": (
        in_own_shm("96M", "80M"), ("call=tests.system.faults.starved:expect_room",),
        "still needs 48.0 MiB, but only 0.0 MiB are free in /dev/shm",
    ),
    "a memory cgroup": ((), (), "raise the container's memory limit"),
}  # fmt: skip


@pytest.mark.fault("F15", ci=1, whole=20)
def test_a_server_with_too_little_memory_says_what_to_change(amount: int, nothing_is_left: Path) -> None:
    """All at once, as each of them is a start of Python and little else. None makes an arena, or dies of a signal."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this user may not make namespaces and mount a tmpfs")
    folder = new_folder()  # its path is short enough for sockets
    try:
        with own_cgroup(64 * MIB) as group:
            for _ in range(amount):
                start_all(folder, group)
    finally:
        shutil.rmtree(folder)


def start_all(folder: Path, group: Path | None) -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        started = {}
        for number, (what, (before, patches, _)) in enumerate(SHORT.items()):
            if what == "a memory cgroup" and group is None:
                measured("a memory cgroup below the arena: none can be made here", 0, "")
                continue
            program = ["tests.support.patched", *patches, "--"] if patches else []
            words = [
                *before, sys.executable, "-m", *program, "simm.dataserver", "--memory", "64M", "--numa", "0",
                "--name", f"{HERE}short{number}", "--runtime-dir", str(folder / "run"), "--end-with", str(os.getpid()),
            ]  # fmt: skip
            entered = group / "cgroup.procs" if what == "a memory cgroup" and group is not None else None
            log = folder / f"{number}.log"
            log.unlink(missing_ok=True)
            started[what] = stack.enter_context(
                Child(words, log=log, environment=child_environment(), preexec_fn=lambda at=entered: enter(at))  # type: ignore[misc]
            )
        for what, child in started.items():
            code, said = child.wait(READY_S), child.said()
            lines = [line for line in said.splitlines() if not line[:4].isdigit()]  # all but the log
            assert code in (1, 2), (what, code, said)
            assert len(lines) == 1 and lines[0].startswith("simm dataserver: "), (what, said)
            assert SHORT[what][2] in lines[0], (what, said)
    measured("data servers with too little memory, all at once: ended after", time.monotonic() - began, "s", "5 s each")


def enter(group: Path | None) -> None:
    """In the child: enter a cgroup."""
    if group is not None:
        group.write_text(str(os.getpid()))


class FewLocked(Place):
    """Here, with a limit of locked memory of 64 KiB."""

    def command(self, words: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'ulimit -l 64 && exec "$@"', "sh", *words]


@pytest.mark.fault("F15", ci=1, whole=1)
def test_a_server_without_huge_pages_and_locked_memory_serves(nothing_is_left: Path, amount: int) -> None:
    """Both are for speed, or for RDMA, which is off without them."""
    folder = nothing_is_left / "few"
    folder.mkdir()
    with Fleet(folder, 1, memory="32M", places=[FewLocked()] * 2, server_arguments=("--huge-pages",)) as fleet:
        limits = Path(f"/proc/{fleet.servers[0].worker_pid()}/limits").read_text()
        assert "Max locked memory         65536 " in limits
        assert ("huge pages asked for" in fleet.logs()) == huge_pages_allowed()
        with Client(fleet.manager.address, path="shm", deadline_s=20.0) as client:
            value = bytes(range(256)) * 4096
            assert client.put("k", value) and client.get("k") == value
        fleet.assert_no_traceback()


# -- F23 -----------------------------------------------------------------------------------------------------

#: Takes so many MiB of its cgroup for each line that it is told, and says so. "own" memory makes its process the
#: greatest, which the kernel takes first. A file in memory that nobody maps is no process's.
EATER = """if True:
    import os, sys
    eaten, file = [], os.memfd_create("eaten")
    for line in sys.stdin:
        for _ in range(int(line)):
            if sys.argv[1] == "own":
                eaten.append(b"x" * (1 << 20))
            else:
                os.write(file, b"x" * (1 << 20))
        print("eaten", flush=True)
"""
#: A worker has some tens of MiB, and a twentieth of this is added to its score. So it goes before a supervisor that may
#: not lower its own.
LIMIT = 384 * MIB


class Group(Place):
    """Here, in a cgroup."""

    def __init__(self, group: Path) -> None:
        self.group = group

    def command(self, words: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.group / "cgroup.procs"), *words]


def eater(group: Path, kind: str) -> Child:
    words = [sys.executable, "-S", "-E", "-c", EATER, kind]
    return Child(words, name="an eater", place=Group(group), talks=True)


def eaten(child: Child, mib: int = 1) -> bool:
    """Whether it has taken so much more, and lives."""
    child.tell(str(mib))
    return child.read_line() == "eaten\n"


def died(server: Server) -> list[str]:
    """Which processes of a data server have died, in this order, by what its supervisor says."""
    names = re.findall(r": (\S.*) \(process \d+\) died", server.log.read_text())
    return ["stream" if "stream" in name else name.split()[0] for name in names]


@pytest.mark.fault("F23", ci=1, whole=20)
def test_the_kernel_kills_for_want_of_memory(nothing_is_left: Path, amount: int) -> None:
    """First whoever takes the memory. Where that is no process, the stream, then the worker, never the supervisor.

    The values stay: they are in the arena, which no process's end frees.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(own_cgroup(LIMIT))
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        fleet = stack.enter_context(Fleet(new_folder(), 1, memory="32M", places=[THIS_HOST, Group(group)]))
        server = fleet.servers[0]
        with Client(fleet.manager.address, path="shm", deadline_s=20.0) as client:
            values = {f"k{number}": f"v{number}".encode() * 5000 for number in range(60)}
            assert all(client.put_many(list(values), list(values.values())))
            for _ in range(amount):
                starve(group, server, client, values)
            assert server.child is not None and server.child.running, "the supervisor was never taken"
        fleet.assert_no_traceback()


def starve(group: Path, server: Server, client: Client, values: dict[str, bytes]) -> None:
    before, kills = len(died(server)), oom_kills(group)
    with eater(group, "own") as greedy:
        assert not eaten(greedy, 2 * LIMIT // MIB), "the kernel has killed it"
        assert greedy.wait() == -signal.SIGKILL
    assert oom_kills(group) == kills + 1 and len(died(server)) == before, "and nobody else"

    with eater(group, "a file") as hidden:
        assert eaten(hidden, (LIMIT - used_bytes(group)) // MIB - 8)
        while "worker" not in died(server)[before:]:
            assert eaten(hidden), "a small process is not taken"
            # One kill at a time, so that the log has them in the kernel's order.
            killed = lambda: len(died(server)) - before >= oom_kills(group) - kills - 1  # noqa: E731
            wait_until(killed, lambda: f"whom the kernel killed: {died(server)} {oom_kills(group)}")
            for key, got in zip(values, client.get_many(list(values))):
                assert got is None or got == values[key], f"{key} is wrong"
    order = died(server)[before:]
    measured("processes killed by the kernel until the worker was", len(order), "", order=" ".join(order))
    assert order[0] == "stream", f"a stream costs least: {order}"
    wait_until(lambda: client.get_many(list(values)) == list(values.values()), "all values are there")
    wait_until(lambda: all(client.put_many(list(values), list(values.values()))), "it serves puts again")
