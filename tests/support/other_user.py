"""Programs that run as another user of this host. Only root can start them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.child import child_environment
from tests.support.waiting import WAIT_S

#: No account of the host has them; the kernel takes any number.
UID: Final = 61_234
GID: Final = 61_235

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's processes need root to start them")

#: The modules load before the change of user, who may have no access to where they lie.
_PREAMBLE: Final = """if True:
    import encodings.idna, os, pkgutil, sys
    import simm, tests.support
    for each in ("arena", "config", "host", "ipc", "net", "rdma", "sdk", "wire"):
        package = __import__("simm." + each, fromlist=["x"])
        for found in pkgutil.iter_modules(package.__path__):
            __import__("simm." + each + "." + found.name)
    import simm.client, tests.support.scribbler, tests.support.waiting
    os.setgroups([int(sys.argv[3])] if sys.argv[3] else [])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[1]))
    del sys.argv[1:4]
"""


def command_as(
    body: str, *arguments: str, uid: int = UID, gid: int = UID, group: int | None = GID, modules: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a program as user ``uid`` of group ``gid``, who is a member of ``group`` too.

    Its arguments are in ``sys.argv[1:]``. ``modules``: those of others that it needs.
    """
    more = "" if group is None else str(group)
    loaded = "".join(f"import {name}\n" for name in modules)
    return [sys.executable, "-c", loaded + _PREAMBLE + body, str(uid), str(gid), more, *arguments]


def run_as(
    body: str, *arguments: str, uid: int = UID, gid: int = UID, group: int | None = GID, modules: Sequence[str] = ()
) -> str:
    """Run it to its end, and return what it has printed. Raises AssertionError if it has failed."""
    done = subprocess.run(
        command_as(body, *arguments, uid=uid, gid=gid, group=group, modules=modules), env=child_environment(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def let_through(folder: Path) -> None:
    """Let all users go through a folder, and through what is above it."""
    while folder != Path("/tmp") and folder.stat().st_uid == os.geteuid() and folder != folder.parent:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o011)
        folder = folder.parent
