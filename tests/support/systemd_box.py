"""A systemd of its own for a test: process 1 of namespaces in which nothing but the units of deploy/systemd runs.

It needs root. The box has the host's files, but /etc, /opt, /var, /run and /dev/shm of its own, and no network but
loopback. It ends with its process 1, and leaves nothing. What a real host has and the box has not: a journal, a bus,
other units.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.child import ROOT, alive, forked_by
from tests.support.waiting import WAIT_S, wait_until

SYSTEMD: Final = Path("/lib/systemd/systemd")
_TOOLS: Final = ("unshare", "nsenter", "setpriv", "systemctl", "systemd-sysusers", "systemd-tmpfiles", "mount")

#: What finds ours in the box: its packages, and its library where it was built with one.
PYTHON_ENVIRONMENT: Final = {"PYTHONPATH": "/opt/source:/opt/packages", "LD_LIBRARY_PATH": "/opt/python/lib"}
#: What process 1 does before it becomes systemd. $1: a folder. $2: the Python. $3: its packages. $4: ours.
_BOOT: Final = r"""
set -eu
cd /
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
for folder in etc opt var; do
    mkdir "$1/$folder" "$1/$folder.work"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$1/$folder,workdir=$1/$folder.work" "/$folder"
done
mkdir -p /opt/simm/bin /opt/python /opt/packages /opt/source
# Units do not see /tmp and /root, where these may be.
mount --bind "$2" /opt/python
mount --bind "$3" /opt/packages
mount --bind "$4" /opt/source
ln -sfn "/opt/python/bin/$5" /opt/simm/bin/python
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
if [ -d /sys/fs/cgroup/systemd ]; then
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
else
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
ip link set lo up
mkdir -p /run/units /etc/sysusers.d /etc/tmpfiles.d
cp /opt/source/deploy/systemd/*.service /run/units
cp /opt/source/deploy/systemd/simm.sysusers.conf /etc/sysusers.d/simm.conf
grep -v ^w /opt/source/deploy/systemd/simm.tmpfiles.conf >/etc/tmpfiles.d/simm.conf  # the kernel is the host's
systemd-sysusers
systemd-tmpfiles --create simm.conf
for target in sysinit basic shutdown network-online multi-user; do
    printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" >"/run/units/$target.target"
done
for unit in /run/units/*.service; do
    mkdir "$unit.d"
    printf '[Service]\nStandardError=append:/run/stderr\n' >"$unit.d/stderr.conf"  # there is no journal
done
export container=box SYSTEMD_UNIT_PATH=/run/units
exec /lib/systemd/systemd --system --unit=basic.target --show-status=false
"""


def why_not() -> str:
    """Return why there can be no box here; empty if there may be."""
    if os.geteuid() != 0:
        return "a systemd of one's own needs root"
    missing = [name for name in _TOOLS if shutil.which(name) is None] + [str(SYSTEMD)] * (not SYSTEMD.exists())
    return f"{', '.join(missing)} not installed" if missing else ""


class SystemdBox:
    """``with SystemdBox(folder) as box``; ``folder`` is empty, and is so again at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cgroups = own_cgroups()
        python, packages = Path(sys.base_prefix), Path(os.__file__).parent / "site-packages"
        with contextlib.suppress(ImportError):
            import numpy

            packages = Path(numpy.__file__).parents[1]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        words = [
            "unshare", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--uts", "--ipc", "--net",
            "--cgroup", "bash", "-c", _BOOT, "box", str(folder), str(python), str(packages), str(ROOT), version,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=self._enter_cgroups, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> SystemdBox:
        try:
            wait_until(self._is_up, lambda: f"systemd comes up: {self._process.poll()}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter_cgroups(self) -> None:
        for folder in self._cgroups:
            (folder / "cgroup.procs").write_text("0")

    def _init(self) -> int:
        """Return the process id, out here, of process 1."""
        return forked_by(self._process.pid)[0].pid

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            raise AssertionError(f"no systemd: {self._process.stderr.read()}")
        try:
            return self.run("systemctl", "is-active", "basic.target", check=False) == "active"
        except (IndexError, subprocess.SubprocessError):
            return False

    def run(self, *words: str, check: bool = True, user: str = "") -> str:
        """Run a command in the box, as a user. Return what it prints. Raises AssertionError if it fails."""
        enter = ["nsenter", "-t", str(self._init()), "-m", "-u", "-i", "-n", "-p", "-C"]
        become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"] if user else []
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **PYTHON_ENVIRONMENT}
        done = subprocess.run(
            [*enter, *become, *words], capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False,
            cwd="/",
        )  # fmt: skip
        if check and done.returncode:
            told = self.run("cat", "/run/stderr", check=False)
            raise AssertionError(f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}\n{told}")
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        """Write a file in the box."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && printf %s "$2" >"$1"', "sh", path, text)

    def shows(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit)

    def python(self, code: str) -> str:
        """Run Python as the user of the units; return what it prints."""
        return self.run("/opt/simm/bin/python", "-c", code, user="simm")

    def close(self) -> None:
        """End all processes of the box, and remove what it made."""
        if self._process.poll() is None:
            with contextlib.suppress(IndexError):
                inside = forked_by(self._process.pid)[0]
                inside.kill()
                wait_until(lambda: not alive(inside), "the box ends")
            self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        wait_until(lambda: all(map(removed, self._cgroups)), "the cgroups of the box go")


def own_cgroups() -> list[Path]:
    """Make cgroups for a box where systemd makes some: what it makes is below them, and goes with them."""
    cgroup = Path("/sys/fs/cgroup")
    v2 = Path("/proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
    found = [cgroup / "systemd", cgroup / "unified" / v2] if (cgroup / "systemd").is_dir() else [cgroup / v2]
    made = [folder / f"simm-box-{os.getpid()}" for folder in found if folder.is_dir()]
    for folder in made:
        folder.mkdir()
    return made


def removed(cgroup: Path) -> bool:
    """Remove a cgroup with all below it. Return False while there are processes in it."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not cgroup.exists()
