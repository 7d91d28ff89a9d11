"""What the quick run leaves out."""

from __future__ import annotations

import pytest

from tests.support.dose import QUICK_SETS, dose, left_out


def test_few_sets_of_parameters_stay() -> None:
    alone, few = ["a.py::test_alone"], [f"a.py::test_few[{at}]" for at in range(QUICK_SETS)]
    many = [f"a.py::test_many[{one}-{two}]" for one in range(10) for two in range(10)]
    out = left_out([*alone, *few, *many])
    assert out <= set(many) and len(out) == len(many) - QUICK_SETS
    assert out == left_out([*many, *alone]), "each run has the same"
    stay = [test for test in many if test not in out]
    assert len({test.partition("[")[2][0] for test in stay}) > 1 and len({test[-2] for test in stay}) > 1


def test_a_dose_is_spread() -> None:
    given = dose([*range(10), (1, 2), pytest.param(3, 4, id="last")], quick=3)
    marked = [bool(getattr(each, "marks", ())) for each in given]
    assert marked.count(False) == 3 and not marked[0]
    assert given[-1].values == (3, 4) and given[-1].id == "last"
