"""The wait before systemd kills the rest of a unit. Under a real systemd: tests/system/test_real_systemd.py."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys

import pytest

from simm.host import processes
from simm.tools import unit_end
from tests.support.child import ROOT


def answers(monkeypatch: pytest.MonkeyPatch, *sets: set[int]) -> list[set[int]]:
    """Make the control group look like each of ``sets`` in turn, and like the last from then on."""
    left = list(sets)
    monkeypatch.setattr(unit_end, "of_my_cgroup", lambda: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(unit_end, "_LOOK_S", 0.0)
    return left


def test_it_waits_until_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = answers(monkeypatch, {7, 8}, {8}, set(), {9})
    assert unit_end.main() == 0
    assert left == [{9}], "it looks no further"


def test_a_process_that_stays_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, {8, 7})
    monkeypatch.setattr(unit_end.wait_alone, "__defaults__", (0.0,))
    assert unit_end.main() == 1
    assert "processes [7, 8] of this unit" in capsys.readouterr().err


def test_no_control_group_is_no_crash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> set[int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(unit_end, "of_my_cgroup", none)
    assert unit_end.main() == 1
    assert "Permission denied" in capsys.readouterr().err


def test_the_unit_calls_it_within_its_own_time_limit() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    parser.read(ROOT / "deploy" / "systemd" / "simm-dataserver@.service")
    service = parser["Service"]
    assert service["ExecStopPost"] == f"-/opt/simm/bin/python -m {unit_end.__name__}"
    assert float(service["TimeoutStopSec"]) > unit_end.WAIT_S


def test_the_control_group_has_my_child_and_not_me() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with_child = processes.of_my_cgroup()
    except OSError as exc:
        pytest.skip(f"no control group to be read here: {exc}")
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert child.pid in with_child and os.getpid() not in with_child
    assert child.pid not in processes.of_my_cgroup()
