"""Checks of ``simm doctor``: their results, and how they read files."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]
#: A check's result without its name: status, detail, remedy.
Verdict = tuple[Status, str, str]


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``detail`` says what it found, ``remedy`` what to do about it (empty if ok)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> Verdict:
    """Return a verdict that needs no remedy."""
    return "ok", detail, ""


def warn(detail: str, remedy: str) -> Verdict:
    """Return a verdict on what makes SiMM slow or takes a feature away."""
    return "warn", detail, remedy


def fail(detail: str, remedy: str) -> Verdict:
    """Return a verdict on what keeps a data server from running."""
    return "fail", detail, remedy


def check(name: str) -> Callable[[Callable[[str], Verdict]], Callable[..., Finding]]:
    """Make a check of a function: its verdict on the files below ``sys_root`` becomes a finding called ``name``."""

    def decorate(judge: Callable[[str], Verdict]) -> Callable[..., Finding]:
        @functools.wraps(judge)
        def run(sys_root: str = "/") -> Finding:
            return Finding(name, *judge(sys_root))

        return run

    return decorate


def text(sys_root: str, path: str) -> str | None:
    """Return the stripped content of a small file, None if it cannot be read."""
    try:
        return Path(sys_root, path).read_text(errors="replace").strip()
    except OSError:
        return None


def entries(sys_root: str, path: str) -> list[str]:
    """Return the sorted names in a folder, an empty list if it cannot be read."""
    try:
        return sorted(os.listdir(Path(sys_root, path)))
    except OSError:
        return []


def gib(count: int) -> str:
    """Return bytes as ``1.50 GiB``."""
    return f"{count / (1 << 30):.2f} GiB"


def limit(value: int) -> str:
    """Return a resource limit as text."""
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
