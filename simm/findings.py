"""What a check of ``simm doctor`` returns, and how the checks look at files."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. `detail` is what was seen, `remedy` a line that can be acted on (empty when ok)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def text(sys_root: str, path: str) -> str | None:
    """Stripped content of a small file, None when it cannot be read."""
    try:
        return Path(sys_root, path).read_text(errors="replace").strip()
    except OSError:
        return None


def entries(sys_root: str, path: str) -> list[str]:
    """Names in a folder, sorted; none when it cannot be read."""
    try:
        return sorted(os.listdir(Path(sys_root, path)))
    except OSError:
        return []


def gib(count: int) -> str:
    """``1.50 GiB``"""
    return f"{count / (1 << 30):.2f} GiB"


def limit(value: int) -> str:
    """A resource limit as people write it."""
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
