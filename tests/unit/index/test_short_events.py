"""Short events that are alike are collected without a second look: they do what each of them does alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index.blocks import Blocks
from simm.index.events import EVENTS_MAX, BadEvent, decode
from simm.index.libraries import msgspec
from simm.index.sources import Registration
from tests.support.dose import dosed

SIZE = 4


def _events(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Mostly one block each, by names that come again, of engines that say different things."""
    names = [rng.getrandbits(64) for _ in range(40)]
    found = []
    for _ in range(count):
        blocks = rng.choice((1, 1, 1, 1, 3))
        event = {
            "type": "BlockStored", "block_hashes": [rng.choice(names) for _ in range(blocks)],
            "parent_block_hash": rng.choice((None, None, rng.choice(names))),
            "token_ids": [rng.randrange(9) for _ in range(SIZE * blocks)], "block_size": SIZE, "medium": "GPU",
        }  # fmt: skip
        odd = rng.randrange(25)
        if odd == 0:
            event |= {"medium": "CPU"}
        elif odd == 1:
            event["token_ids"] = event["token_ids"][1:]
        elif odd == 2:
            event |= {"lora_name": "l"}
        elif odd == 3:
            event |= {"cache_salt": "s", "dp_rank": 1}
        elif odd == 4:
            event |= {"block_size": 2, "token_ids": [1, 2] * blocks}
        elif odd == 5:
            event |= {"extra_keys": [["image"]] * blocks}
        elif odd == 6:
            event |= {"kv_cache_spec_kind": "sliding_window"}
        elif odd == 7:
            event = {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": "GPU"}
        elif odd == 8:
            event |= {"token_ids": None}
        elif odd == 9:
            event |= {"block_size": None}
        found.append(event)
    return found


def _world(events: list[dict[str, Any]], kind: str, *, together: bool) -> Any:
    """What an index knows afterwards, and what of it did not count."""
    index = Blocks()
    source = index.register(Registration("A", "m", kind, block_size=SIZE, rank=None))
    for start in range(0, len(events), 8):
        for some in [events[start : start + 8]] if together else [[each] for each in events[start : start + 8]]:
            batch = decode(msgspec.msgpack.encode([0.0, some, start % 3 // 2]))
            assert not batch.refused
            index.apply(source, batch.events, batch.rank, more=together)
    index.flush()
    held = {}
    for holder, keys, counts in index.held(1 << 20):
        assert len(keys) == holder.blocks
        if len(keys):
            held[holder.space, holder.rank, holder.group, holder.node] = dict(zip(keys.tolist(), counts.tolist()))
    return held, dict(source.ignored), source.blocks, source.waiting


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_together_they_do_what_each_does_alone(kind: str) -> None:
    rng = random.Random(5)
    for _ in range(dosed(60, quick=15)):
        events = _events(rng, rng.choice((10, 200)))
        assert _world(events, kind, together=True) == _world(events, kind, together=False)


def _by_name(index: Blocks, late: Any, source: Any, event: Any, _told: Any) -> bool:
    """Collect whatever has a new name, as if it was like the first."""
    tokens = event.tokens if type(event).__name__ == "Stored" else None
    if tokens is None or len(event.hashes) > 1 or event.hashes[0] in late.names or len(tokens) != 4 * SIZE:
        return False
    late.names[event.hashes[0]] = 7
    late.count += 1
    return True


def test_a_collector_that_looks_at_too_little_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test before."""
    monkeypatch.setattr(Blocks, "_again", _by_name)
    events = _events(random.Random(5), 200)
    assert _world(events, "vllm", together=True) != _world(events, "vllm", together=False)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda event: event | {"block_hashes": []}, lambda event: event | {"token_ids": ["x"]},
        lambda _: ["Odd"], lambda _: 7,
    ],
)
def test_a_wrong_event_among_maps_stops_no_other(wrong: Callable[[dict[str, Any]], Any]) -> None:
    events: list[Any] = [each for each in _events(random.Random(6), 30) if each["type"] == "BlockStored"]
    plain = decode(msgspec.msgpack.encode([0.0, events, 0]))
    found = decode(msgspec.msgpack.encode([0.0, [*events[:5], wrong(events[5]), *events[5:]], 0]))
    assert found.events == plain.events and len(found.refused) == 1 and len(plain.events) == len(events)
    with pytest.raises(BadEvent):
        decode(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}] * (EVENTS_MAX + 1), 0]))
