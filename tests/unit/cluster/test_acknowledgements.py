"""What a node's acknowledgement of a map costs the manager in a large cluster, while shards wait to move."""

from __future__ import annotations

import pytest

from simm.cluster.machine import Cluster
from simm.cluster.nodes import NODE_WORKERS_MAX, Answer, Timing, unknown_name
from simm.cluster.placement import Placement
from tests.support.machine import ALL, answer, arrive, join, moving, tell


def acknowledge(cluster: Cluster, now: float) -> None:
    """Let all nodes say that they have the newest map, as each of them does after each map."""
    for name, node in cluster.nodes.items():
        cluster.heartbeat(now, name, node.instance, cluster.epoch)


@pytest.fixture
def rebalances(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of the one method that costs milliseconds."""
    calls: list[int] = []
    real = Placement.rebalance
    monkeypatch.setattr(Placement, "rebalance", lambda *a, **kw: calls.append(1) or real(*a, **kw))
    return calls


def test_issue_no_node_that_acknowledges_a_map_costs_a_rebalance_for_nothing(rebalances: list[int]) -> None:
    """Each MOVED makes a map, and all nodes acknowledge it: 600 servers took the manager two seconds a map."""
    cluster = Cluster(1, 0.0, ALL)
    for number in range(40):
        cluster.join(0.0, join(f"n{number}", number + 1))
    acknowledge(cluster, 0.1)
    arrive(cluster)
    acknowledge(cluster, 0.2)
    cluster.timing = Timing(moves_at_once=8)
    cluster.join(0.3, join("new", 99))
    acknowledge(cluster, 0.3)
    assert cluster.waiting > 8, "positive control: shards wait"
    for _ in range(5):
        some = [shard for shard, (_, owner) in moving(cluster).items() if owner == ("new", 0)][:1]
        assert tell(cluster, 0.4, ("new", 0), some) == 1
        before = len(rebalances)
        acknowledge(cluster, 0.4)
        assert len(rebalances) - before <= 2
        cluster.check()


def test_issue_a_name_that_nobody_has_is_compared_with_few() -> None:
    """The comparison with 20,000 names took the manager most of a second, and anybody may ask."""
    looked = 0

    class Name(str):
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal looked
            looked += 1
            return super().__iter__()

    known = [Name(f"server-{number:05}") for number in range(20_000)]
    found = unknown_name("server-7", known)
    assert isinstance(found, Answer)
    assert "the nearest name is 'server-" in answer([found])[1].text
    assert looked <= 16 * NODE_WORKERS_MAX
    assert "the nearest name is 'alpha'" in answer([unknown_name("a", ["alpha", "much-longer-than-that"])])[1].text
    assert "none has joined" in answer([unknown_name("a", [])])[1].text
