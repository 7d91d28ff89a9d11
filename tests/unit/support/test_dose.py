"""What the quick run leaves out, and that no other run leaves it out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import dose as dose_module
from tests.support.dose import COSTLY, COSTLY_SETS, QUICK_SETS, choose, dose, dosed, is_quick, left_out, most, prune

ROOT = Path(__file__).resolve().parents[3]


def sets_of(name: str, count: int) -> list[str]:
    return [f"{name}[{one}-{two}]" for one in range(count) for two in range(count)]


@pytest.mark.parametrize(("folder", "stay"), [("tests/unit/", QUICK_SETS), ("tests/unit/arena/", COSTLY_SETS)])
def test_few_sets_of_parameters_stay(folder: str, stay: int) -> None:
    alone, few = [f"{folder}test_a.py::test_alone"], [f"{folder}test_a.py::test_few[{at}]" for at in range(stay)]
    many = sets_of(f"{folder}test_a.py::test_many", 10)
    out = left_out([*alone, *few, *many])
    assert out <= set(many) and len(out) == len(many) - stay
    assert out == left_out([*many, *alone]), "each run has the same"
    kept = [test for test in many if test not in out]
    assert len({test.partition("[")[2][0] for test in kept}) > 1 and len({test[-2] for test in kept}) > 1


def test_each_function_stays_in_the_quick_run() -> None:
    names = [f"{folder}test_a.py::test_{number}" for folder in (*COSTLY, "tests/unit/tools/") for number in range(20)]
    tests = [test for name in names for test in sets_of(name, 3)]
    out = left_out(tests)
    assert {test.partition("[")[0] for test in tests if test not in out} == set(names)
    assert all(1 <= most(name) <= QUICK_SETS for name in names)


def test_the_page_for_contributors_says_how_many() -> None:
    words = {2: "two", 3: "three", 4: "four"}
    said = f"sets of parameters: {words[QUICK_SETS]}, {words[COSTLY_SETS]} in the folders"
    assert said in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_costly_folders_are_there() -> None:
    assert [folder for folder in COSTLY if not (ROOT / folder).is_dir()] == []
    assert most("tests/unit/arena/marks/test_a.py::test_b") == COSTLY_SETS
    assert most("tests/unit/test_arena.py::test_b") == most("tests/unit/shmem/test_a.py::test_b") == QUICK_SETS


def test_a_dose_is_spread() -> None:
    given = dose([*range(10), (1, 2), pytest.param(3, 4, id="last")], quick=3)
    marked = [bool(getattr(each, "marks", ())) for each in given]
    assert marked.count(False) == 3 and not marked[0]
    assert given[-1].values == (3, 4) and given[-1].id == "last"


@pytest.fixture
def chosen() -> Iterator[None]:
    """Put back what this run has."""
    before = dose_module._quick
    yield
    dose_module._quick = before


# --- what costs nothing ---------------------------------------------------------------------------


def pruned(test: str, sets: dict[str, list[str]], marks: Any = ()) -> list[str]:
    """Return which of its sets of parameters, given with their marks, a test function has left."""
    calls = [SimpleNamespace(id=name, marks=[SimpleNamespace(name=each) for each in has]) for name, has in sets.items()]
    definition = SimpleNamespace(nodeid=test, iter_markers=lambda: iter([SimpleNamespace(name=each) for each in marks]))
    prune(SimpleNamespace(definition=definition, _calls=calls))
    return [call.id for call in calls]


@pytest.mark.usefixtures("chosen")
def test_no_items_are_made_of_what_is_left_out() -> None:
    choose("not full")
    unit, system = "tests/unit/arena/test_a.py::test_a", "tests/system/test_b.py::test_b"
    many: dict[str, list[str]] = {str(number): [] for number in range(10)}
    some = {"a": ["full"], "b": [], "c": ["quick"], "d": ["slow"], "e": ["quick", "full"]}
    out = left_out(f"{unit}[{name}]" for name in many)
    assert pruned(unit, many) == [name for name in many if f"{unit}[{name}]" not in out]
    assert pruned(unit, some) == ["b", "c"] and pruned(system, some) == ["c"]
    assert pruned(system, many, ["quick"]) == list(many), "a test that is quick is so with all its sets"
    for test, marks in ((system, ()), (unit, ("full",)), (unit, ("slow",))):
        assert pruned(test, many, marks) == ["0"], "one stays, for -m to leave out"
    assert pruned(system, {"a": []}) == ["a"] and pruned(unit, {}) == []
    choose("")
    assert pruned(unit, many) == list(many) and pruned(system, some) == list(some)


@pytest.mark.parametrize("path", ["unit/test_a.py", "models/test_a.py", "system/test_quick.py", "system/helper.py"])
def test_files_with_a_quick_test_are_read(path: str, tmp_path: Path) -> None:
    file = tmp_path / "tests" / path
    file.parent.mkdir(parents=True)
    file.write_text("@pytest.mark.quick\ndef test_x(): pass\n" if "quick" in path else "def test_x(): pass\n")
    for selected in ("not slow and not full", "not slow"):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=selected), rootpath=tmp_path)
        assert conftest.pytest_ignore_collect(file, config) is None
        other = file.parent.parent / "security" / "test_other.py"
        other.parent.mkdir(exist_ok=True)
        other.write_text("def test_x(): pass\n")
        assert bool(conftest.pytest_ignore_collect(other, config)) is ("full" in selected)


# --- lengths ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("selected", "quick"),
    [
        ("not slow and not full", True),
        ("not  full", True),
        ("not slow", False),
        ("", False),
        ("full", False),
        ("quick", False),
        ("not fully", False),
    ],
)
def test_only_a_run_without_the_full_tests_is_short(selected: str, quick: bool) -> None:
    """A run that has what the quick run drops has the whole length of all else as well."""
    assert is_quick(selected) is quick
    choose(selected)
    assert dosed(40, quick=10) == (10 if quick else 40)


def test_the_script_selects_them_so() -> None:
    text = (ROOT / "scripts/test").read_text()
    tiers = {tier: is_quick(selected) for tier, selected in re.findall(r"^    (\w+)\)\s+select=\((.*?)\)", text, re.M)}
    assert tiers == {"quick": True, "full": False, "slow": False, "faults": False}


PROGRAM = """
import sys, pytest
from tests.support import dose

class Look:
    def pytest_collection_modifyitems(self, items):
        print("LENGTH", dose.dosed("whole", quick="quick"), len(items))

sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-m", sys.argv[1], sys.argv[2]], [Look()]))
"""


def collected(selected: str, file: str) -> tuple[str, int, set[str]]:
    """Return the length of a run of a file, how many items pytest makes for it, and the tests that it has."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, selected, file], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"LENGTH (\w+) (\d+)", said)
    assert found, said
    return found[1], int(found[2]), {line for line in said.splitlines() if line.startswith(f"{file}::")}


def test_runs_of_pytest() -> None:
    """The dose is chosen before a test module is imported, and all that the quick run drops is in the full run."""
    file = "tests/unit/arena/test_crash_points.py"
    quick, made, few = collected("not slow and not full", file)
    whole, made_for_all, all_of_them = collected("not slow", file)
    assert (quick, whole) == ("quick", "whole")
    assert few < all_of_them and len(few) <= made < made_for_all
    assert {test.partition("[")[0] for test in few} == {test.partition("[")[0] for test in all_of_them}
    assert len([test for test in few if "::test_death_at_every_point[" in test]) == COSTLY_SETS
