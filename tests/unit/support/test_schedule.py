"""Files go to the processes of pytest-xdist by their kinds, and a limit leaves unit tests out last."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import schedule
from tests.support.schedule import APART, ENGINES, FAULTS, SERVERS, kind, wanted

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_that_is_named_is_there() -> None:
    """A renamed file would lose its place in silence."""
    for name in (*schedule.LONG, *schedule._NOT_APART, *schedule._FOLDERS):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tests/unit/test_rpc.py", APART), ("tests/models/test_slot.py", APART),
        ("tests/unit/shm/test_segments.py", SERVERS), ("tests/system/test_cli.py", SERVERS),
        ("tests/security/test_tls.py", SERVERS),
        ("tests/system/faults/test_soak.py", FAULTS), ("tests/system/partitions/test_hosts.py", FAULTS),
        ("tests/engines/test_sglang.py", ENGINES), ("tests/rdma_vm/test_path.py", SERVERS),
    ],
)  # fmt: skip
def test_kinds(file: str, name: str) -> None:
    assert kind(file) == kind(f"{file}::test_something[a::b]") == name


@pytest.mark.parametrize("limited", [False, True])
def test_long_files_come_first_unless_time_is_limited(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    monkeypatch.setattr(schedule, "LONG", ("tests/longest.py", "tests/long.py"))
    names = ["a.py::t", "long.py::t[1]", "b.py::t", "long.py::t[2]", "longest.py::t", "a.py::u"]
    items: Any = [SimpleNamespace(nodeid=f"tests/{name}") for name in names]
    schedule.sort(items, limited=limited)
    long, short = ["long.py::t[1]", "long.py::t[2]"], ["a.py::t", "b.py::t", "a.py::u"]
    expected = [*short, *long, "longest.py::t"] if limited else ["longest.py::t", *long, *short]
    assert [item.nodeid.removeprefix("tests/") for item in items] == expected


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_a_run_from_its_begin_to_its_end(processes: int) -> None:
    """Files end in any order. What runs beside what is as the module says."""
    rng = random.Random(processes)
    queue = [APART] * 60 + [SERVERS] * 30 + [FAULTS] * 6 + [ENGINES] * 4
    given: list[list[str]] = [[] for _ in range(processes)]
    now: list[str | None] = [None] * processes
    while queue:
        node = rng.randrange(processes)
        now[node] = None
        others = [
            {**dict.fromkeys(given[each], False), **({} if (runs := now[each]) is None else {runs: True})}
            for each in range(processes) if each != node
        ]  # fmt: skip
        name = wanted(set(queue), others)
        queue.remove(name)
        given[node].append(name)
        now[node] = name
        if APART in queue:
            beside = [each for each in now if each not in (None, APART)]
            assert len(beside) <= max(1, processes // 2) and ENGINES not in beside
        if {APART, SERVERS} & set(queue):
            assert now.count(ENGINES) <= 1
    assert sum(FAULTS in each for each in given) == 1, "session fixtures of the fleets are made once"


def test_a_file_is_given_whatever_is_left() -> None:
    for name in (APART, SERVERS, ENGINES, FAULTS):
        for others in ([], [dict.fromkeys((APART, SERVERS, ENGINES, FAULTS), True)] * 3):
            assert wanted({name}, others) == name


def test_a_process_imports_from_its_own_place_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    for number in range(8):
        (folder / f"test_{number}.py").touch()
    (folder / "helper.py").touch()
    names: list[str] = []

    def load(name: str) -> None:
        names.append(name[-1])
        if name.endswith("3"):
            pytest.skip("needs what is not there")
        if name.endswith("4"):
            raise ImportError

    monkeypatch.setattr(schedule.importlib, "import_module", load)
    option = SimpleNamespace(markexpr="not slow")
    config = SimpleNamespace(rootpath=tmp_path, args=[str(tmp_path / "tests")], workerinput=None, option=option)
    schedule.import_in_turn(config)
    assert names == [], "one process compiles what it collects"
    config.workerinput = {"workerid": "gw1", "workercount": 4}
    schedule.import_in_turn(config)
    assert "".join(names) == "23456701"
    names.clear()
    config.args = [f"{folder}/test_5.py::test_x", f"{folder}/test_6.py"]
    schedule.import_in_turn(config)
    assert "".join(names) == "56"
    names.clear()
    folder.rename(tmp_path / "tests" / "system")
    (tmp_path / "tests" / "system" / "test_6.py").write_text("@pytest.mark.quick")
    config.args = [str(tmp_path / "tests")]
    option.markexpr = "not slow and not full"
    schedule.import_in_turn(config)
    assert "".join(names) == "6", "the quick run imports what it has"
