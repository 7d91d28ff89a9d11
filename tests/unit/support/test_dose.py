"""What the quick run leaves out, and that no other run leaves it out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import dose as dose_module
from tests.support.dose import COSTLY, COSTLY_SETS, QUICK_SETS, choose, dose, dosed, is_quick, left_out, most

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


def test_costly_folders_are_there() -> None:
    assert [folder for folder in COSTLY if not (ROOT / folder).is_dir()] == []
    assert most("tests/unit/arena/marks/test_a.py::test_b") == COSTLY_SETS
    assert most("tests/unit/test_arena.py::test_b") == most("tests/unit/shmem/test_a.py::test_b") == QUICK_SETS


def test_a_dose_is_spread() -> None:
    given = dose([*range(10), (1, 2), pytest.param(3, 4, id="last")], quick=3)
    marked = [bool(getattr(each, "marks", ())) for each in given]
    assert marked.count(False) == 3 and not marked[0]
    assert given[-1].values == (3, 4) and given[-1].id == "last"


# --- lengths ------------------------------------------------------------------------------------


@pytest.fixture
def chosen() -> Iterator[None]:
    """Put back what this run has."""
    before = dose_module._quick
    yield
    dose_module._quick = before


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


def collected(selected: str, file: str) -> tuple[str, set[str]]:
    """Return the length of a run of a file, and the tests that it has."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, selected, file], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"LENGTH (\w+)", said)
    assert found, said
    return found[1], {line for line in said.splitlines() if line.startswith(f"{file}::")}


def test_runs_of_pytest() -> None:
    """The dose is chosen before a test module is imported, and all that the quick run drops is in the full run."""
    file = "tests/unit/arena/test_crash_points.py"
    quick, few = collected("not slow and not full", file)
    whole, all_of_them = collected("not slow", file)
    assert (quick, whole) == ("quick", "whole")
    assert few < all_of_them
    assert {test.partition("[")[0] for test in few} == {test.partition("[")[0] for test in all_of_them}
    assert len([test for test in few if "::test_death_at_every_point[" in test]) == COSTLY_SETS
