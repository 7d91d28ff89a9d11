"""The Debian packages that the machine and the tests in it need, and which of them are missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: What shows that a package is there (a program, or a path) -> the package.
NEEDED: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "/usr/bin/busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "ibv_rc_pingpong": "ibverbs-utils",
    "/etc/rdma": "rdma-core",
    "ib_read_bw": "perftest",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
    "dpkg-deb": "dpkg",
}
#: libibverbs loads it at run time: a package that brings no program.
_PROVIDERS: Final = "ibverbs-providers"
#: Programs of root's are not in everyone's PATH.
_PATH: Final = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def find_program(name: str) -> str | None:
    """Where a program is, root's included."""
    return shutil.which(name, path=_PATH)


def missing(needed: Iterable[tuple[str, str]] = tuple(NEEDED.items()), root: str = "/") -> list[str]:
    """Packages to install, sorted, each once."""
    found = {
        package
        for what, package in needed
        if not (os.path.exists(os.path.join(root, what[1:])) if what.startswith("/") else find_program(what))
    }
    if not list(Path(root, "usr/lib").glob("*/libibverbs/librxe-*.so")):
        found.add(_PROVIDERS)
    return sorted(found)


def remedy(packages: Iterable[str]) -> str:
    """The one line that installs them."""
    return f"apt-get install --no-install-recommends {' '.join(packages)}"


def why_not() -> str:
    """Why this machine can boot no other one, as far as looking tells; empty when it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the virtual machine is for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    absent = missing()
    return f"not installed; as root: {remedy(absent)}" if absent else ""
