"""Faults F01 to F32 of docs/faults.md: which tests have them, and how much of each a run has.

A test that is marked ``fault("F04", ci=4, whole=500)`` takes the fixture ``amount`` (``tests/conftest.py``): 4 in an
ordinary run, and 500 where ``scripts/test --faults`` runs it. A dose is a number or a few words. A test with one of the
two only is left out of the other kind of run.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

#: ``all``, or some faults separated by commas, whose whole doses this run has. ``scripts/test --faults`` sets it.
ENV: Final = "SIMM_TEST_FAULTS"
ALL: Final = tuple(f"F{number:02d}" for number in range(1, 33))


class Dosed(NamedTuple):
    """One mark: faults, and their doses in CI and in a whole run; None for a run that leaves the test out."""

    faults: tuple[str, ...]
    ci: Any
    whole: Any


def read(faults: Iterable[Any], doses: Mapping[str, Any]) -> Dosed:
    """Return what the arguments of a mark say. Raises ValueError for those that cannot be."""
    dosed = Dosed(tuple(faults), doses.get("ci"), doses.get("whole"))
    if not dosed.faults or not set(dosed.faults) <= set(ALL) or not doses or not set(doses) <= {"ci", "whole"}:
        raise ValueError(f"fault{dosed.faults} with {dict(doses)}: faults are F01 to F32, doses ci= and whole=")
    return dosed


def chosen(environment: Mapping[str, str] = os.environ) -> frozenset[str] | None:
    """Return the faults whose whole doses this run has, or None for an ordinary run. Raises ValueError."""
    text = environment.get(ENV, "")
    if not text:
        return None
    asked = frozenset(ALL if text == "all" else text.split(","))
    if not asked <= set(ALL):
        raise ValueError(f"{ENV}={text}: all, or some of F01 to F32 separated by commas")
    return asked


def amount(marks: Iterable[Dosed], asked: frozenset[str] | None) -> Any:
    """Return the dose that a test with these marks has in this run. None if the run leaves it out."""
    for dosed in marks:
        dose = dosed.ci if asked is None else dosed.whole if asked & set(dosed.faults) else None
        if dose is not None:
            return dose
    return None


def marks_in(text: str) -> Iterator[tuple[str, Dosed]]:
    """Yield the name of each marked test of a module, and its mark, in the module's order."""
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                doses = {str(each.arg): ast.literal_eval(each.value) for each in decorator.keywords}
                yield node.name, read(map(ast.literal_eval, decorator.args), doses)


def marks_under(folder: Path) -> Iterator[tuple[Path, str, Dosed]]:
    """Yield the path, the test and the mark of all marks under a folder, by path."""
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.fault(" in text:
            yield from ((path, name, dosed) for name, dosed in marks_in(text))
