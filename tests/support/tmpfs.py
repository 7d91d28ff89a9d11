"""A tmpfs of a test's own, for what happens in one that is small, or that nobody else uses."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def own_tmpfs(at: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of ``size`` (as mount takes it) at a new folder; skip the test where that is not allowed."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
