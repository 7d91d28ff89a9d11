"""docs/promises.md names tests and modules that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "promises.md").read_text()
#: Of the table of operations at the end there is another test: ``tests/unit/sdk/test_every_operation.py``.
PROMISES = PAGE[: PAGE.index("\n## Each operation, everywhere")]
ROWS = [line.split(" | ") for line in PROMISES.splitlines() if line.startswith("| ") and "`" in line]


@cache
def names_in(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def faults_of(row: list[str]) -> list[str]:
    """Return what a row names that is not there."""
    what, kept_by, test = row
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
    found = [f"{what}: it names no test"] if not named else []
    found += [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    modules = re.findall(r"`([\w/.]+)`", kept_by)
    return found + [path for path in modules if not (ROOT / path).exists()] + ([] if modules else [f"{what}: nowhere"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ")[:50])
def test_all_that_is_named_is_there(row: list[str]) -> None:
    assert not faults_of(row)


def test_what_is_not_there_is_seen() -> None:
    assert len(ROWS) > 50
    what, kept_by, test = ROWS[0]
    assert faults_of([what, "`simm/nowhere.py`", test]) == ["simm/nowhere.py"]
    assert faults_of([what, kept_by, "`tests/security/test_roles.py::test_nothing` |"])
    assert faults_of([what, "somewhere", "a test |"])
