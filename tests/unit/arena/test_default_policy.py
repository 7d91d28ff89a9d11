"""The default eviction policy, on conversations as an engine reads and stores them; and that it is named once."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from simm.arena.store import Store
from simm.config.settings import load
from simm.constants import DEFAULT_POLICY, POLICY_NAMES
from simm.server.options import DataServerOptions
from simm.traces.generate import generate
from simm.traces.simulate import simulate
from tests.support.dose import dose


@pytest.mark.full
@pytest.mark.parametrize("share", dose([0.1, 0.2], quick=1))
@pytest.mark.parametrize("seed", dose([1, 2, 3], quick=1))
def test_no_policy_finds_much_more_of_a_conversation_than_the_default(seed: int, share: float) -> None:
    trace = generate("chat", seed, 1500)
    room = int(share * len({block for request in trace.requests for block in request.blocks}))
    names = [*(f"simm-{name}" for name in POLICY_NAMES), "lru", "fifo"]
    ratios = {outcome.policy: outcome.ratio for outcome in simulate(trace, room, names)}
    assert 0.1 < ratios["fifo"] < ratios["lru"] < 0.8, "a cache that is too small, but not by far"
    assert abs(ratios["simm-fifo"] - ratios["fifo"]) < 0.02, "the replay is right"
    assert ratios[f"simm-{DEFAULT_POLICY}"] > max(ratios.values()) - 0.02, ratios


def test_the_default_is_named_once() -> None:
    assert DEFAULT_POLICY in POLICY_NAMES
    assert load("dataserver", {}, {}, None).policy == DEFAULT_POLICY
    fields = {field.name: field.default for field in dataclasses.fields(DataServerOptions)}
    assert fields["policy"] == DEFAULT_POLICY
    for make in (Store.create, Store.recover):
        assert inspect.signature(make).parameters["policy"].default == DEFAULT_POLICY


def test_every_policy_can_be_chosen() -> None:
    for name in POLICY_NAMES:
        assert load("dataserver", {"policy": name}, {}, None).policy == name
