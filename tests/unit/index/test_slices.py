"""Long messages and long events are applied in slices: others ask in between, and the end is as without them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module  # noqa: E402
from simm.index import events as events_module  # noqa: E402
from simm.index import sources as sources_module  # noqa: E402
from simm.index import streams as streams_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.events import WHOLE_MAX, Cleared, Event, Removed, Stored, decode, slices  # noqa: E402
from simm.index.keys import request_keys  # noqa: E402
from simm.index.scores import score  # noqa: E402
from simm.index.sources import Registration, Source, Space  # noqa: E402
from simm.index.streams import Stream  # noqa: E402
from tests.support.dose import dosed  # noqa: E402

TOKENS = list(range(500, 520))
CLEARED = {"type": "AllBlocksCleared"}


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])  # type: ignore[no-any-return]


def stored(names: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": len(tokens) // len(names) or None, "medium": "GPU", **more}  # fmt: skip


def removed(names: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}


def world(kind: str = "sglang") -> tuple[Blocks, Stream]:
    index = Blocks()
    return index, Stream(index, index.register(Registration("A", "m", kind, block_size=1)), replays=False)


def claim(index: Blocks) -> int:
    match = score(index, Space("m", "", "default", "", 1), request_keys(TOKENS, 1)).matches.get("A")
    return match.blocks if match else 0


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_one_long_event_lets_others_ask_in_between(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event of 400,000 pages of a token held up all questions for the better part of a second."""
    monkeypatch.setattr(streams_module, "_SLICE", 4)
    seen: list[int] = []
    index, stream = world(kind)
    monkeypatch.setattr(streams_module.time, "sleep", lambda _: seen.append(claim(index)))
    names = list(range(1, 11))
    stream.message(0, packed(stored(names, TOKENS[:10])))
    assert seen == [4, 8] and claim(index) == 10
    seen.clear()
    stream.message(1, packed(stored(list(range(11, 21)), TOKENS[10:], 10)))
    assert seen == [14, 18] and claim(index) == 20
    seen.clear()
    stream.message(2, packed(removed(list(range(20, 0, -1)))))
    assert seen == [16, 12, 8, 4] and claim(index) == 0
    assert stream.complete and not stream.source.ignored and not stream.source.blocks


def salted(count: int, index: Blocks, name: str) -> Source:
    """Return a store that has three blocks with each of so many salts."""
    source = index.register(Registration(name, "m", "mooncake", 1))
    event = {"event_type": "stored", "seq_hashes": [7, 8, 9], "medium": "CPU", "block_size": 1}
    salts = [{**event, "additional_salt": f"user-{number}"} for number in range(count)]
    index.apply(source, decode(packed(*salts)).events)
    return source


def gone(*names: list[int]) -> list[Event]:
    events = [{"event_type": "removed", "seq_hashes": each, "medium": "CPU"} for each in names]
    return list(decode(packed(*events)).events)


@pytest.mark.parametrize("names", [[[7, 8]], [[7], [8]]], ids=["one event", "two events"])
def test_a_removal_of_every_salt_lets_others_ask_in_between(
    names: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 4,096 blocks held up all questions for seconds where a store had 30,000 salts."""
    monkeypatch.setattr(blocks_module, "_SEARCHES", 10)
    index = Blocks()
    source = salted(20, index, "s")
    seen: list[int] = []

    def ask() -> bool:
        if got := index.lock.acquire(blocking=False):
            seen.append(source.blocks)
            index.lock.release()
        return got

    with ThreadPoolExecutor(1) as other:
        monkeypatch.setattr(blocks_module.time, "sleep", lambda _: other.submit(ask).result())
        index.apply(source, gone(*names))
        assert list(dict.fromkeys(seen)) == [60, 50, 40, 30, 20] and source.blocks == 20
        seen.clear()
        with index.lock:
            index.apply(source, gone([9]))
        assert not seen and source.blocks == 0, "a caller that has the lock keeps it"
        index.apply(source, gone([7], [8]))
        assert seen == [0, 0], "what finds nothing lets others ask, too"


def test_what_goes_while_a_removal_waits_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holders' numbers are those of other publishers by then."""
    monkeypatch.setattr(blocks_module, "_SEARCHES", 6)
    index = Blocks()
    source = salted(20, index, "s")
    made: list[Source] = []

    def others(_: float) -> None:
        if not made:
            index.unregister(source.registration.name)
            index.sweep()
            made.append(salted(20, index, "t"))

    monkeypatch.setattr(blocks_module.time, "sleep", others)
    index.apply(source, gone([7, 8, 9]))
    assert made[0].blocks == 60 and source.blocks == 0


def test_a_slice_has_no_more_blocks_than_it_may() -> None:
    dice = random.Random(1)
    events = []
    for _ in range(300):
        names = list(range(dice.randrange(1, 12)))
        pick = dice.randrange(4)
        events.append(stored(names, [1] * len(names)) if pick > 1 else CLEARED if pick else removed(names))
    batch = decode(packed(*events))
    found = slices(batch.events, 5)
    counts = [[1 if isinstance(each, Cleared) else len(each.hashes) for each in part] for part in found]
    assert all(0 < sum(each) <= 5 for each in counts)
    assert sum(map(sum, counts)) == sum(len(each.get("block_hashes", "1")) for each in events)
    assert any(len(part) > 2 for part in found), "short ones are together"
    assert slices(batch.events, 1 << 20) == [batch.events] and slices([], 5) == []


def test_an_event_without_the_tokens_of_all_blocks_is_left_whole() -> None:
    (event,) = decode(packed(stored(list(range(9)), [1] * 9, block_size=2))).events
    assert slices([event], 4) == [[event]]
    (event,) = decode(packed(stored(list(range(9)), [1] * 18, block_size=None))).events
    parts = slices([event], 4, block_size=2)
    assert [len(each.hashes) for (each,) in parts if isinstance(each, Stored)] == [4, 4, 1]
    assert slices([event], 4) == [[event]]


def test_parts_have_what_belongs_to_their_blocks() -> None:
    pairs = [[at, at + 1] for at in range(10)]
    (event,) = decode(packed(stored([1, 2, 3, 4, 5], pairs, 77))).events  # type: ignore[arg-type]
    assert isinstance(event, Stored) and event.tokens is not None
    parts = [each for (each,) in slices([event], 2) if isinstance(each, Stored)]
    assert [(list(each.hashes), each.parent, each.rest, each.rooted, each.pairs) for each in parts] == [
        ([1, 2], 77, False, False, True), ([3, 4], 2, True, False, True), ([5], 4, True, False, True),
    ]  # fmt: skip
    assert b"".join(bytes(each.tokens or b"") for each in parts) == bytes(event.tokens)
    assert sum((each.extras for each in parts), ()) == event.extras
    gone = Removed(event.hashes, event.where)
    assert [list(each.hashes) for (each,) in slices([gone], 2) if isinstance(each, Removed)] == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("gathered", [1, 4096])
@pytest.mark.parametrize("most", [2, 1 << 20], ids=["in parts", "whole"])
def test_a_long_report_of_what_is_there_leaves_no_copies(
    most: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports without a parent what a request has found. A part of that has a parent, and is no copy either."""
    monkeypatch.setattr(streams_module, "_SLICE", most)
    monkeypatch.setattr(blocks_module, "_GATHERED", gathered)
    index, stream = world("vllm")
    names = list(range(1, 8))
    stream.message(0, packed(stored(names, TOKENS[:7])))
    stream.message(1, packed(stored(names, TOKENS[:7])))
    stream.message(2, packed(removed(names)))
    assert claim(index) == 0 and not stream.source.blocks
    stream.message(3, packed(stored([1], TOKENS[:1])))
    for number in (4, 5):
        stream.message(number, packed(stored(names[1:], TOKENS[1:7], 1)))
    stream.message(6, packed(removed(names[1:])))
    assert claim(index) == 7, "two copies, of which one has gone"


def test_a_name_that_comes_twice_without_tokens_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_SLICE", 2)
    index, stream = world("vllm")
    stream.message(0, packed(stored([1, 2, 3], TOKENS[:3])))
    again = stored([1, 2, 3], TOKENS[:3]) | {"block_hashes": [1, 2, 3, 1, 2], "token_ids": [], "medium": "CPU"}
    stream.message(1, packed(again))
    stream.message(2, packed(removed([1, 2, 3]), removed([1, 2, 3]) | {"medium": "CPU"}))
    assert claim(index) == 0 and not stream.source.blocks


@pytest.mark.parametrize("tier", ["CPU", "GPU"])
def test_blocks_that_are_told_again_stay_where_a_later_one_is_known(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of none but unknown blocks was taken for one of the tokens alone, where a later part names their salt."""
    monkeypatch.setattr(streams_module, "_SLICE", 2)
    index, stream = world("vllm")
    salted = stored([1, 2, 3, 4], TOKENS[:4], extra_keys=[["salt"], None, None, None])
    stream.message(0, packed(salted))
    stream.message(1, packed(removed([1, 2])))
    stream.message(2, packed({**(salted if tier == "GPU" else stored([1, 2, 3, 4], TOKENS[:4])), "medium": tier}))
    assert claim(index) == 0
    space = Space("m", "", "default", "salt", 1)
    match = score(index, space, request_keys(TOKENS[:4], 1)).matches.get("A")
    assert match is not None and match.blocks == 4


def test_only_what_has_tokens_and_no_extras_is_left_whole_in_other_tiers() -> None:
    names, tokens = [1, 2, 3], TOKENS[:3]
    extra = {"extra_keys": [[["image", 7]]] * 3}
    gone = {**removed(names), "medium": "CPU"}
    bare = {**stored(names, tokens), "token_ids": [], "medium": "CPU"}
    for event, cut in (
        (stored(names, tokens), True), (stored(names, tokens, medium="gpu"), True),
        (stored(names, tokens, medium=None), True), (stored(names, tokens, medium="CPU"), False),
        (stored(names, tokens, medium="CPU", **extra), True), (gone, True), (bare, True),
    ):  # fmt: skip
        events = decode(packed(event)).events
        assert len(slices(events, 2, gpu_only=True)) == 1 + cut
        assert len(slices(events, 2)) == 2


def test_an_event_that_is_not_cut_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message's blocks may be a million, and an event that is not cut held up all questions for that long."""
    many = WHOLE_MAX + 5
    events = decode(packed(stored(list(range(many)), [1] * many, medium="CPU"))).events
    parts = slices(events, 4096, gpu_only=True)
    found = [each for (each,) in parts if isinstance(each, Stored)]
    assert max(len(each.hashes) for each in found) <= 4096 and sum(len(each.hashes) for each in found) == many
    assert all(each.tokens is None for each in found)
    monkeypatch.setattr(events_module, "WHOLE_MAX", 2)
    monkeypatch.setattr(streams_module, "_SLICE", 2)
    index, stream = world("vllm")
    stream.message(0, packed(stored([1, 2, 3], TOKENS[:3], extra_keys=[["salt"], None, None])))
    stream.message(1, packed(stored([1, 2, 3, 4], TOKENS[:4], medium="CPU")))
    assert not stream.complete and stream.source.ignored == {"unknown blocks without tokens": 1}
    stream.message(2, packed(removed([1, 2, 3])))
    match = score(index, Space("m", "", "default", "salt", 1), request_keys(TOKENS[:4], 1)).matches.get("A")
    assert match is not None and match.blocks == 3, "those that are known, in their space"
    assert claim(index) == 0


@pytest.mark.parametrize("bound", [WHOLE_MAX, 2], ids=["whole", "without its tokens"])
@pytest.mark.parametrize("parent", [None, 1])
def test_a_long_report_is_as_many_copies_as_a_short_one(
    parent: int | None, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those above the bound each counted a further copy, and the blocks stayed when they were gone."""
    monkeypatch.setattr(events_module, "WHOLE_MAX", bound)
    monkeypatch.setattr(streams_module, "_SLICE", 2)
    _, stream = world("vllm")
    begin = 1 if parent else 0
    names = [1, 2, 3, 4, 5][begin:]
    stream.message(0, packed(stored([1, 2, 3, 4, 5], TOKENS[:5])))
    for number in (1, 2):
        stream.message(number, packed(stored(names, TOKENS[begin:5], parent, medium="CPU")))
    stream.message(3, packed(removed([1, 2, 3, 4, 5]), removed(names) | {"medium": "CPU"}))
    assert stream.source.blocks == (len(names) if parent else 0)
    stream.message(4, packed(removed(names) | {"medium": "CPU"}))
    assert not stream.source.blocks and stream.complete


# -- events that wait for their parent ----------------------------------------------------------------


def _held(index: Blocks) -> list[Any]:
    return [(holder.space, sorted(zip(keys.tolist(), counts.tolist()))) for holder, keys, counts
            in index.held(1 << 20)]  # fmt: skip


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_what_goes_of_an_event_that_waits_goes_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last block of a part went meanwhile, the next part waited for it, and nobody would tell of it again."""
    dice = random.Random(kind)
    waited = 0
    for _ in range(dosed(40, quick=10)):
        begins, ends = dice.randrange(2, 6), dice.randrange(7, 19)
        first = stored(list(range(begins, ends)), TOKENS[begins - 1 : ends - 1], begins - 1)
        behind = stored(list(range(ends, 21)), TOKENS[ends - 1 : 20], ends - 1)
        messages = [packed(first), packed(behind)]
        if dice.random() < 0.5:
            messages.reverse()
        messages.append(packed(first)) if dice.random() < 0.3 else None
        gone = [name for name in range(begins, 21) if dice.random() < 0.3]
        messages += [packed(removed([name])) for name in gone]
        messages.append(packed(stored(list(range(1, begins)), TOKENS[: begins - 1])))
        found = []
        for most in (1, 3, 4, 1 << 20):
            monkeypatch.setattr(streams_module, "_SLICE", most)
            index, stream = world(kind)
            for number, message in enumerate(messages):
                stream.message(number, message)
                waited = max(waited, stream.source.waiting)
            source = stream.source
            found.append((_held(index), source.blocks, source.waiting, len(source.naming), stream.complete))
            if ends - 1 not in gone:  # else the other event waits on
                assert source.waiting == source.waiting_bytes == len(source.naming) == 0
        assert found.count(found[-1]) == len(found)
    assert waited > 10


def test_an_event_that_waits_is_dropped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part was dropped for want of room, and the others stayed, of which none could be added any more."""
    monkeypatch.setattr(streams_module, "_SLICE", 3)
    monkeypatch.setattr(sources_module, "PARKED_MAX", 10)
    index, stream = world()
    stream.message(0, packed(stored(list(range(2, 10)), TOKENS[1:9], 1)))
    source = stream.source
    assert source.waiting == 8 and len(source.parked) == 1
    stream.message(1, packed(stored([101, 102, 103], [7, 8, 9], 100)))
    assert source.waiting == len(source.naming) == 3 and [name for name, _ in source.parked] == [100]
    stream.message(2, packed(stored([1], TOKENS[:1])))
    assert claim(index) == 1 and not stream.complete
    stream.message(3, packed(stored(list(range(201, 212)), TOKENS[:11], 200)))
    assert source.waiting == 3, "more than may wait"
    assert source.ignored["too many blocks to wait for a parent"] == 1
    stream.message(4, packed(stored([100], [6])))
    assert not source.waiting and not source.waiting_bytes and not source.naming and source.cut is None


def test_no_part_waits_for_one_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_SLICE", 2)
    _, stream = world()
    stream.message(0, packed(stored([1], TOKENS[:1])))
    stream.message(1, packed(stored([2, 3, 4, 5], TOKENS[:8], 1)))
    source = stream.source
    assert source.ignored == {"blocks of another size than their parent": 1}
    assert not source.waiting and not source.naming and not stream.complete


def test_an_event_without_a_block_size_does_not_take_that_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had no block of that size, and the whole message failed."""
    for most in (1, 4096):
        monkeypatch.setattr(streams_module, "_SLICE", most)
        _, stream = world()
        stream.message(0, packed(stored([2, 3], [7, 8], 1, block_size=None)))
        source = stream.source
        assert source.waiting == 2
        stream.message(1, packed(stored([50], [9]), stored([1], [5, 6]), removed([50])))
        assert source.ignored["blocks of another size than their parent"] == 1
        assert source.blocks == 1 and not source.waiting and not source.naming and not stream.complete


def _random(dice: random.Random) -> list[dict[str, Any]]:
    """Prompts that share their beginnings, in events of many blocks, with what goes of them, and comes once more.

    No block waits for its parent: if that goes in the same message, those behind it wait on.
    """
    begin = [dice.randrange(9) for _ in range(8)]
    prompts = [begin + [dice.randrange(9) for _ in range(16)] for _ in range(4)]
    events: list[dict[str, Any]] = []
    there: set[int] = set()
    for _ in range(dice.randrange(4, 40)):
        prompt = dice.choice(prompts)
        image = dice.choice((None, "image"))
        names = [hash((*prompt[: at + 1], len(image or ""))) & (1 << 62) - 1 for at in range(24)]
        have = next((at for at, name in enumerate(names) if name not in there), 24)
        start = min(dice.choice((0, have, dice.randrange(24))), have, 23)
        stop = dice.randrange(start + 1, 25)
        if dice.random() < 0.4:
            events.append(removed(names[start:]))
            there -= set(names[start:])
            continue
        there |= set(names[start:stop])
        extra = {"extra_keys": [[["image", 7]]] * (stop - start)} if image else {}
        events.append(stored(names[start:stop], prompt[start:stop], names[start - 1] if start else None, **extra))
    return events


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_slices_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(kind)
    most_held = 0
    for _ in range(dosed(30, quick=8)):
        events = _random(dice)
        found = []
        for most in (1, 3, 7, 1 << 20):
            monkeypatch.setattr(streams_module, "_SLICE", most)
            index, stream = world(kind)
            for number, at in enumerate(range(0, len(events), 5)):
                stream.message(number, packed(*events[at : at + 5]))
            found.append((_held(index), stream.source.blocks, stream.source.waiting, stream.complete))
        assert found.count(found[-1]) == len(found)
        most_held = max(most_held, found[-1][1])
    assert most_held > 20
