"""Every fault of docs/faults.md has a test with a dose for CI and a whole one, and the page names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import faults
from tests.support.faults import ALL, Dosed

ROOT = Path(__file__).resolve().parents[3]
#: Of these there is no test yet.
MISSING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def marked() -> list[tuple[str, Dosed]]:
    """The file and the mark of all marked tests."""
    found = faults.marks_under(ROOT / "tests")
    return [(str(path.relative_to(ROOT)), dosed) for path, _, dosed in found]


def rows(page: str) -> Mapping[str, list[str]]:
    """Return the table rows of a page that begin with a fault, each as its cells; a fault may have several."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if match := re.match(r"\| (F\d\d) \|", line):
            found.setdefault(match[1], []).append(line)
    return found


def test_every_fault_has_both_doses(marked: list[tuple[str, Dosed]]) -> None:
    ci = {fault for _, dosed in marked if dosed.ci is not None for fault in dosed.faults}
    whole = {fault for _, dosed in marked if dosed.whole is not None for fault in dosed.faults}
    assert (set(ALL) - ci, set(ALL) - whole) == (MISSING, MISSING)


def test_the_page_names_every_marked_file(marked: list[tuple[str, Dosed]]) -> None:
    page = rows((ROOT / "docs" / "faults.md").read_text())
    assert sorted(page) == sorted(ALL)
    for fault in ALL:
        named = {name for line in page[fault] for name in re.findall(r"`(tests/[\w/]+\.py)`", line)}
        assert named == {path for path, dosed in marked if fault in dosed.faults}, fault


def test_the_operators_page_sums_up_every_fault() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("\n### What a fault costs\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"\bF\d\d\b", section)) == set(ALL)


@pytest.mark.parametrize(
    ("arguments", "doses"),
    [((), {"ci": 1}), (("F00",), {"ci": 1}), (("F33",), {"ci": 1}), (("F04",), {}), (("F04",), {"cl": 1})],
)
def test_a_mark_that_cannot_be_is_refused(arguments: tuple[str, ...], doses: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="faults are F01 to F32"):
        faults.read(arguments, doses)


def test_a_run_has_one_kind_of_doses() -> None:
    both, ci, whole = Dosed(("F04", "F05"), 1, 9), Dosed(("F06",), 2, None), Dosed(("F06",), None, 8)
    assert [faults.amount([mark], None) for mark in (both, ci, whole)] == [1, 2, None]
    asked = faults.chosen({faults.ENV: "F05,F06"})
    assert [faults.amount([mark], asked) for mark in (both, ci, whole)] == [9, None, 8]
    assert faults.amount([both], faults.chosen({faults.ENV: "F07"})) is None
    assert faults.amount([ci, whole], faults.chosen({faults.ENV: "all"})) == 8 and faults.chosen({}) is None
    assert faults.amount([], None) is None
    with pytest.raises(ValueError, match="some of F01"):
        faults.chosen({faults.ENV: "F99"})


def test_marks_are_found_in_the_text() -> None:
    text = "@pytest.mark.fault('F01', ci='5 s', whole=200)\n@pytest.mark.slow\ndef test_x() -> None: ...\n"
    assert list(faults.marks_in(text + "def test_y() -> None: ...\n")) == [("test_x", Dosed(("F01",), "5 s", 200))]
