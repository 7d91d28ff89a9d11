"""Data servers without the memory that they want: each ends with one line that says what to change, or serves."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from simm.client import Client
from simm.host.memory import huge_pages_allowed
from tests.support.child import Child, Place, child_environment
from tests.support.fleet import Fleet
from tests.support.measures import measured
from tests.support.processes import HERE, new_folder

MIB = 1 << 20
#: What starts a program with a /dev/shm of its own, of so many bytes, of which so many are used.
OWN_SHM = (
    "mount -t tmpfs -o size=$0 tmpfs /dev/shm && head -c $1 /dev/zero >/dev/shm/other && shift && "
    '"$@"; code=$?; ls /dev/shm | grep -v other >&2; exit $code'
)


def in_own_shm(size: str, used: str) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", OWN_SHM, size, used]


@contextlib.contextmanager
def own_cgroup(limit: int) -> Iterator[Path | None]:
    """A memory cgroup of version 1 or 2 below this process's; None where none can be made."""
    base = Path("/sys/fs/cgroup")
    made = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, where = line.split(":", 2)
        folder = base / "memory" if controllers == "memory" else base
        if controllers in ("memory", ""):
            with contextlib.suppress(OSError):
                at = folder / where.strip("/") / f"simm-{os.getpid()}"
                at.mkdir()
                bound = at / ("memory.limit_in_bytes" if controllers else "memory.max")
                if bound.exists():
                    bound.write_text(str(limit))
                    made = at
                    break
                at.rmdir()
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()


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
            code, said = child.wait(60.0), child.said()
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
