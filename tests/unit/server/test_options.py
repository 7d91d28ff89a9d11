"""How the options of a data server follow from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from simm.cluster.nodes import NODE_WORKERS_MAX
from simm.config.settings import load
from simm.errors import ConfigError
from simm.server import options as server_options
from simm.server.options import options_from


@pytest.mark.parametrize(
    ("numa", "workers", "nodes"), [("all", 1, [0, 1]), ("all", 2, [0, 1, 0, 1]), ("1", 3, [1, 1, 1])]
)
def test_each_node_gets_its_workers_in_turns(
    numa: str, workers: int, nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So worker n stays on its node when there are more or fewer, and a warm arena's memory is near it."""
    monkeypatch.setattr(server_options.numa, "parse_numa", lambda spec: [0, 1] if spec == "all" else [int(spec)])
    settings = load("dataserver", {"numa": numa, "workers": str(workers), "runtime_dir": str(tmp_path)}, {})
    assert options_from(settings).nodes == nodes


@pytest.mark.parametrize(
    ("given", "options"), [({}, (0, 0)), ({"slots": "9"}, (9, 0)), ({"value_size": "64K"}, (0, 65_536))]
)
def test_the_table_by_its_slots_or_by_a_values_size(
    given: dict[str, str], options: tuple[int, int], tmp_path: Path
) -> None:
    made = options_from(load("dataserver", {"numa": "0", "runtime_dir": str(tmp_path), **given}, {}))
    assert (made.slots, made.value_bytes) == options
    both = load("dataserver", {"runtime_dir": str(tmp_path), "slots": "9", "value_size": "64K"}, {})
    with pytest.raises(ConfigError, match=r"slots \(9, .*\) and value_size \(65536, .*\) both say how large"):
        options_from(both)


def test_issue_more_workers_than_a_manager_takes_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory was faulted in first, and then JOIN was refused for ever."""
    monkeypatch.setattr(server_options.numa, "parse_numa", lambda _spec: [0, 1])
    most = load("dataserver", {"workers": "32", "runtime_dir": str(tmp_path)}, {})
    assert len(options_from(most).nodes) == NODE_WORKERS_MAX
    more = load("dataserver", {"workers": "33", "runtime_dir": str(tmp_path)}, {})
    with pytest.raises(ConfigError, match=r"at most 64 workers: 33 \(workers, --workers\) on each of 2 NUMA .* are 66"):
        options_from(more)


@pytest.mark.parametrize("wrong", ["0", "67088385", "x", "-1"])
def test_no_value_has_that_size(wrong: str) -> None:
    with pytest.raises(ConfigError):
        load("dataserver", {"value_size": wrong}, {})
