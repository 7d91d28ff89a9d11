"""The image's entry point as a container engine starts it, in namespaces and a memory cgroup of its own.

Tests have no container engine. So a box has what docker gives a container by default, and a strict user more: 64 MiB of
/dev/shm, a read-only root, a user without rights, a limit of memory. The code is built from the image's sources alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.cgroup import own_cgroup
from tests.support.child import READY_S, ROOT, Child, child_environment, forked_by

MIB: Final = 1 << 20
USER: Final = "64030"
_TOOLS: Final = ("unshare", "nsenter", "setpriv", "mount", "ip")
#: What the box does before the entry point. $1: a folder for it. $2: Python. $3: its packages. $4: SiMM.
_BOOT: Final = r"""
set -eu
cd /
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/opt" "$1/work"
mount -t overlay overlay -o "lowerdir=/opt,upperdir=$1/opt,workdir=$1/work" /opt
mkdir -p /opt/python /opt/packages /opt/built
mount --bind "$2" /opt/python
mount --bind "$3" /opt/packages
mount --bind "$4" /opt/built
mount -t tmpfs -o size=64M tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -m 1777 /run/simm
mount -o remount,bind,ro /
mount -o remount,ro /opt
ip link set lo up
shift 4
exec "$@"
"""
_DROP: Final = (
    # The death of unshare has to reach it: a change of user takes back what --kill-child asked for.
    "setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--no-new-privs", "--bounding-set", "-all",
    "--inh-caps", "-all", "--pdeathsig", "KILL",
)  # fmt: skip
_CLIENT: Final = """
import os
from simm.client import Client
assert os.getuid() == 64030
try:
    open("/var/tmp/x", "w")
except OSError as error:
    assert error.errno == 30, error  # a read-only file system, where all may write
else:
    raise SystemExit("the root filesystem is writable")
with Client("127.0.0.1:30001", deadline_s=30.0) as client:
    value = os.urandom(1 << 20)
    assert client.put("key", value)
    buffer = bytearray(len(value))
    assert client.get_into("key", buffer) == len(value) and buffer == value
    (worker,) = client.stats()["workers"]
    print("path", worker["path"])
"""


def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": "/opt/built:/opt/packages", "LD_LIBRARY_PATH": "/opt/python/lib"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SiMM as the Dockerfile builds it: out of what it copies, and nothing else."""
    context = tmp_path_factory.mktemp("context")
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    shutil.copytree(ROOT / "simm", context / "simm", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(context / "built")]
    done = subprocess.run(words, cwd=context, capture_output=True, text=True, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    return context / "built"


class Box:
    """What runs the entry point, and other programs beside it."""

    def __init__(self, folder: Path, built: Path, cgroup: Path | None) -> None:
        import numpy

        self.folder = folder
        python = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        self.python = [*_DROP, python]
        self._before = [
            "unshare", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--ipc", "--net",
            "sh", "-c", _BOOT, "box", str(folder), sys.base_prefix, str(Path(numpy.__file__).parents[1]), str(built),
        ]  # fmt: skip
        self._cgroup = cgroup

    def start(self, *arguments: str, log: Path) -> Child:
        """Start the entry point with arguments."""
        return Child(
            [*self._before, *self.python, "-m", "simm", *arguments], log=log, environment=environment(),
            preexec_fn=self._enter,
        )  # fmt: skip

    def _enter(self) -> None:
        if self._cgroup is not None:
            (self._cgroup / "cgroup.procs").write_text(str(os.getpid()))

    def inside(self, server: Child, *words: str, **more: str) -> str:
        """Run Python, with further variables, beside the entry point; return what it prints."""
        enter = ["nsenter", "-t", str(forked_by(server.pid)[0].pid), "-m", "-i", "-n", "-p"]
        done = subprocess.run(
            [*enter, *self.python, *words], capture_output=True, text=True, env={**environment(), **more}, check=False,
            cwd="/", timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + server.said()
        return done.stdout


@pytest.fixture
def box(tmp_path: Path, built: Path) -> Iterator[Box]:
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing or os.geteuid() or subprocess.run(["unshare", "--mount", "--net", "true"], check=False).returncode:
        pytest.skip(f"no namespaces of one's own here; missing: {missing}")
    folder = tmp_path / "box"
    folder.mkdir()
    with own_cgroup(768 * MIB) as cgroup:
        if cgroup is None:
            pytest.skip("no memory cgroup can be made here")
        yield Box(folder, built, cgroup)


def test_it_serves_with_what_docker_gives_by_default(box: Box, tmp_path: Path) -> None:
    """``auto`` takes 80 % of the 64 MiB; values come and go by shared memory; SIGTERM ends it."""
    arguments = ("local", "--memory", "auto", "--numa", "0", "--runtime-dir", "/run/simm/server")
    with box.start(*arguments, log=tmp_path / "log") as server:
        ready = server.expect("READY ")
        token = ready.partition("token-file=")[2].split()[0]
        assert box.inside(server, "-c", _CLIENT, SIMM_TOKEN_FILE=token) == "path shm\n", ready
        with contextlib.suppress(IndexError):
            forked_by(server.pid)[0].send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM, server.said()


def test_it_says_how_to_get_more_shared_memory(box: Box, tmp_path: Path) -> None:
    arguments = ("dataserver", "--memory", "128M", "--numa", "0", "--runtime-dir", "/run/simm/server")
    with box.start(*arguments, log=tmp_path / "log") as server:
        assert server.wait(READY_S) in (1, 2)
        last = server.said().splitlines()[-1]
        assert "128.0 MiB" in last and "64.0 MiB" in last and "docker: --shm-size" in last
