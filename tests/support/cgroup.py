"""A memory cgroup of a test's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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


def oom_kills(group: Path) -> int:
    """Return how many processes of a cgroup the kernel has killed for want of memory."""
    for name in ("memory.events", "memory.oom_control"):  # of version 2, and of version 1
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    raise AssertionError(f"{group} counts no kills")


def used_bytes(group: Path) -> int:
    """Return what a cgroup's processes have taken, bytes; files that the kernel can drop are part of it."""
    name = "memory.usage_in_bytes"
    return int((group / (name if (group / name).exists() else "memory.current")).read_text())
