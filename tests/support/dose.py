"""Doses: how much of a test the quick run of ``scripts/test`` has; the other runs have all of it.

There are three. A function with many sets of parameters keeps a few of them (``left_out``), or those that it names
itself (``dose``). A test that takes more than a second or two has fewer steps, seeds or states (``dosed``).

What the quick run leaves out costs it little: it makes no item of these sets of parameters (``prune``), and reads no
file that has no test of it (``has_quick``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

#: The quick run has a dose of these folders, and elsewhere the tests marked ``quick``.
QUICK: Final = ("tests/unit/", "tests/models/")
#: Sets of parameters of one test in the quick run at most. More of them find little that these do not.
QUICK_SETS: Final = 3
#: The same in the folders whose tests compute: they replay each store of an operation, run clusters in threads, or
#: engines against each kind of failure.
COSTLY_SETS: Final = 2
COSTLY: Final = (
    "tests/models/", "tests/unit/arena/", "tests/unit/cluster/", "tests/unit/connectors/", "tests/unit/gpu/",
    "tests/unit/ipc/", "tests/unit/sdk/", "tests/unit/server/", "tests/unit/shm/",
)  # fmt: skip

_T = TypeVar("_T")
_quick = False


def choose(selected: str) -> None:
    """Note whether this is the quick run, before a test module is imported.

    Args:
        selected: the argument of ``-m``. The quick run is the one that leaves out what is marked ``full``, so no run
            that has these tests has others at a small dose.
    """
    global _quick
    _quick = is_quick(selected)


def is_quick(selected: str) -> bool:
    """Return True if this argument of ``-m`` leaves out what is marked ``full``."""
    return re.search(r"\bnot\s+full\b", selected) is not None


def dosed(whole: _T, *, quick: _T) -> _T:
    """Return how many steps, seeds or states a test has: ``whole``, or ``quick`` in the quick run."""
    return quick if _quick else whole


def dose(values: Iterable[Any], quick: int) -> list[Any]:
    """Return parameters of which ``quick``, evenly spread, are in the quick run; ``--full`` has them all."""
    listed = list(values)
    chosen = {number * len(listed) // quick for number in range(quick)}
    return [each if at in chosen else _full(each) for at, each in enumerate(listed)]


def _full(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.full], id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.full)


def left_out(tests: Iterable[str]) -> set[str]:
    """Return which of these unit tests and models, given by their ids, the quick run leaves out.

    They are what is beyond ``most`` sets of parameters of a function. Those that stay are drawn by its name: each run
    has the same, and they are spread over all parameters of a test that has several.
    """
    sets: dict[str, list[str]] = {}
    for test in tests:
        sets.setdefault(test.partition("[")[0], []).append(test)
    out: set[str] = set()
    for name, each in sets.items():
        out.update(random.Random(name).sample(each, max(0, len(each) - most(name))))
    return out


def most(test: str) -> int:
    """Return how many sets of parameters of a test the quick run has at most."""
    return COSTLY_SETS if test.startswith(COSTLY) else QUICK_SETS


def has_quick(file: Path, root: Path) -> bool:
    """Return False for a test file of which the quick run has nothing. Such a file need not be imported.

    Args:
        file: its absolute path.
        root: the repository.
    """
    return file.relative_to(root).as_posix().startswith(QUICK) or "mark.quick" in file.read_text()


def prune(metafunc: Any) -> None:
    """Take from a test function, before items are made of them, the sets of parameters that the quick run leaves out.

    One set stays at least, which is left out later: without any, pytest would make an item without parameters. To make
    an item takes longer than most tests, and each process of pytest-xdist makes all.

    Args:
        metafunc: what pytest hands to ``pytest_generate_tests``, after all have parametrized it.
    """
    calls = getattr(metafunc, "_calls", [])
    if not _quick or len(calls) < 2:
        return
    test = metafunc.definition.nodeid
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    ids = {f"{test}[{call.id}]": marks | {mark.name for mark in call.marks} for call in calls}
    stay = {name for name, has in ids.items() if not has & {"full", "slow"}}
    unmarked = {name for name in stay if "quick" not in ids[name]}
    stay -= left_out(name for name in ids if name in unmarked) if test.startswith(QUICK) else unmarked
    calls[:] = [call for call in calls if f"{test}[{call.id}]" in stay] or calls[:1]
