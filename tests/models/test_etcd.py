"""A model of etcd: one leader and its state, whatever the network does; and injected bugs that the model finds."""

from __future__ import annotations

from typing import Any

import pytest

from simm.cluster.machine import Cluster
from simm.cluster.nodes import Timing
from simm.control import election as coordinator_module
from simm.control.election import Coordinator
from simm.control.etcd import created
from simm.errors import CorruptionError
from simm.wire import messages as M
from simm.wire.messages import WorkerInfo
from tests.models.etcd import Broken, play
from tests.models.explorer import first_failure
from tests.support.dose import dosed


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a state several transactions, so that a leader may die between them."""
    monkeypatch.setattr(coordinator_module, "CHUNK_BYTES", 64)


@pytest.mark.usefixtures("small_chunks")
def test_one_leader_and_its_state_whatever_the_network_does() -> None:
    total: dict[str, int] = {}
    for seed in range(dosed(40, quick=10)):
        for name, count in play(seed).items():
            total[name] = total.get(name, 0) + count
    assert min(total.values()) > dosed(200, quick=20), total


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_one_leader_and_its_state_long() -> None:
    for seed in range(1000, 6000):
        play(seed)


def _breaks(seeds: int, *wanted: str) -> None:
    """Check that one of the first worlds breaks, and with one of these texts."""
    first_failure(range(seeds), play, Broken, CorruptionError, wanted=wanted)


def _no_condition(key: bytes, _revision: int) -> dict[str, Any]:
    return created(b"there is no such key", 0)


@pytest.mark.usefixtures("small_chunks")
class TestMutations:
    """Mutation tests: each removes one check, and the model finds it."""

    def test_without_the_leases_time_two_lead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Coordinator, "term", property(lambda self: self._held.term))
        _breaks(10, "two lead")

    def test_counting_from_the_answer_instead_of_the_question(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Coordinator, "_until", lambda self, _sent, ttl_s: self._clock() + ttl_s)
        _breaks(100, "two lead")

    def test_a_leadership_that_is_extended_after_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hold(self: Coordinator, before: Any, until: float) -> bool:
            self._held = before._replace(until=until)
            return True

        monkeypatch.setattr(Coordinator, "_hold", hold)
        _breaks(100, "is back", "two lead")

    def test_without_the_condition_of_the_term_a_deposed_leader_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            coordinator_module, "created", lambda key, at: _no_condition(key, at) if at else created(key, at)
        )
        _breaks(200, "is stored after")

    def test_without_the_condition_of_the_state_an_older_one_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator_module, "modified", _no_condition)
        _breaks(100, "is stored after")

    def test_a_leader_that_does_not_look_for_its_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Coordinator, "_no_more", lambda _self, _held: "")
        _breaks(100, "two lead")

    def test_a_manager_that_saves_in_a_later_term_than_it_has_loaded_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        any_term = property(lambda self: self.term, lambda _self, _term: None)
        monkeypatch.setattr(Coordinator, "_loaded", any_term, raising=False)
        _breaks(100, "is stored after")


@pytest.mark.parametrize("return_s", [0.0, 8.0])
def test_a_new_leader_gives_servers_time_to_find_it(return_s: float) -> None:
    """With short heartbeats too: a server is dead after five of them, but not before it can have come back."""
    timing = Timing(heartbeat_s=0.2, return_s=return_s)
    cluster = Cluster(1, 0.0, timing)
    cluster.join(0.0, M.Join(5, 0, "a", [WorkerInfo(0, 0, 1, 5, 1 << 30, "", "/run/w", "127.0.0.1", 4000)]))
    cluster.heartbeat(0.0, "a", 5, 0, [])
    follower = Cluster.from_state(cluster.to_state(), 100.0, timing, 1000)
    died_at = next(
        now for now in (step / 10 for step in range(1, 200))
        if follower.maintain(100.0 + now) and follower.status(100.0 + now)["nodes"][0]["state"] == "dead"
    )  # fmt: skip
    assert died_at == pytest.approx(max(return_s, 1.0), abs=0.3)
    assert all(node["silent_s"] >= 0 for node in follower.status(100.0 + died_at)["nodes"])
