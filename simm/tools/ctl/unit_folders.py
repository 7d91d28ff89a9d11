"""Where data servers under systemd have their sockets: in /run/simm-INSTANCE, as deploy/systemd says.

The commands that look at this host's workers find them there without being told. Only root makes folders in /run, and a
folder counts only if it is a trusted user's and nobody else makes files in it. Who answers at a socket is asked again
when it is connected to (``workers.py``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

from ...host.users import NOT_TRUSTED, others_may_make, trusts

RUN: Final = Path("/run")
#: RuntimeDirectory= of the unit, for any instance.
PATTERN: Final = "simm-*"


def with_sockets(trusted: Container[int]) -> list[Path]:
    """Return the folders with sockets that this process may use. ``trusted``: users besides its own and root."""
    return [folder for folder, why_not in _looked_at(trusted) if not why_not]


def elsewhere(runtime_dir: Path, trusted: Container[int]) -> str:
    """Return what an error about ``runtime_dir`` adds: which of these have sockets, and what keeps from others."""
    found = [(folder, why_not) for folder, why_not in _looked_at(trusted) if folder != runtime_dir]
    parts = [why_not for _, why_not in found if why_not]
    if usable := [str(folder) for folder, why_not in found if not why_not]:
        parts.insert(0, f"there are sockets in {', '.join(usable)}")
    return "; ".join(["", *(parts or [f"{RUN / PATTERN}, where units have theirs, has none either"])])


def _looked_at(trusted: Container[int]) -> Iterator[tuple[Path, str]]:
    """Yield the folders that have sockets, or may have, and why they are of no use; "" for those that are."""
    for folder in sorted(RUN.glob(PATTERN)):
        try:
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode):
                continue
            if not trusts(about.st_uid, trusted):
                yield folder, f"{folder} is of uid {about.st_uid}, {NOT_TRUSTED}"
            elif others_may_make(about, folder):
                yield folder, f"others than its owner may make files in {folder}"
            elif any(_is_socket(folder / name, trusted) for name in os.listdir(folder) if name.endswith(".sock")):
                yield folder, ""
        except PermissionError:
            yield folder, f"this user may not look into {folder}: be its user or root"
        except OSError:  # it has gone
            continue


def _is_socket(path: Path, trusted: Container[int]) -> bool:
    about = path.lstat()
    return stat.S_ISSOCK(about.st_mode) and trusts(about.st_uid, trusted)
