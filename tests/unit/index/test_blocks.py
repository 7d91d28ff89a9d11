"""Events of every form, applied to the index, against a model of dicts, and the scores that follow."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

import xxhash  # noqa: E402

from simm.index import blocks as blocks_module  # noqa: E402
from simm.index import sources as sources_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.events import BadEvent, decode  # noqa: E402
from simm.index.keys import chain, request_keys, token_bytes  # noqa: E402
from simm.index.scores import WEIGHTS, Scores  # noqa: E402
from simm.index.sources import Registration, Space  # noqa: E402
from tests.support.dose import dose  # noqa: E402
from tests.support.index_events import MODEL, SIZE, SPACE, apply, asked, engine, message, prompt, removed, stored  # noqa: E402

DOCS = Path(__file__).parents[3] / "docs"
# -- keys ----------------------------------------------------------------------------------------------


def test_keys_are_the_rolling_hash_of_the_standard() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first, second = request_keys(tokens, 4)
    local = [xxhash.xxh3_64_intdigest(bytes(token_bytes(tokens))[at : at + 16], 1337) for at in (0, 16)]
    assert first == local[0]
    assert second == xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in (first, local[1])), 1337)
    assert chain(token_bytes(tokens[4:]), 4, parent=first) == [second]
    assert request_keys(range(1000, 1009), 4) == request_keys(list(range(1000, 1009)), 4)


# -- forms of events -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        stored([11, 12], prompt(2)),
        stored([11, 12], prompt(2), medium="GPU", lora_name=None, group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([b"x" * 24 + (11).to_bytes(8, "big"), b"y" * 24 + (12).to_bytes(8, "big")], prompt(2)),
        ["BlockStored", [11, 12], None, prompt(2), SIZE],
        ["BlockStored", [11, 12], None, prompt(2), SIZE, None, "GPU", None, [None, None], 0, "full_attention", None],
        {"event_type": "stored", "event_id": 1, "timestamp": 5, "model_name": MODEL, "block_size": SIZE,
         "tenant_id": "default", "seq_hashes": [11, 12], "base_block_idx": 0, "parent_hash": None,
         "token_ids": prompt(2), "medium": "gpu", "dp_rank": 0},
    ],
)  # fmt: skip
def test_every_form_of_a_stored_block_is_read(event: Any) -> None:
    index = Blocks()
    source = engine(index)
    assert apply(index, source, event) == []
    assert asked(index, prompt(3)).matches["A"].tiers["gpu"] == 2
    gone = removed([12]) if isinstance(event, dict) else ["BlockRemoved", [12], "GPU"]
    assert apply(index, source, gone) == []
    assert asked(index, prompt(3)).matches["A"].blocks == 1
    apply(index, source, {"type": "AllBlocksCleared"} if isinstance(event, dict) else ["AllBlocksCleared"])
    assert asked(index, prompt(3)).matches == {} and index.entries == 0


def test_a_bad_event_stops_no_other() -> None:
    index = Blocks()
    bad: list[Any] = [
        7, None, [], {}, {"type": "Nonsense"}, stored([], []), stored(["text"], prompt(1)), stored([1.5], prompt(1)),
        stored([1], prompt(1), group_idx=1 << 20), stored([1], [-1, 2, 3, 4]), stored([1], [1 << 32, 2, 3, 4]),
        stored([1], [True, 2.5, 3, 4]), stored([1], prompt(1), lora_name="x" * 10_000), stored([b""], prompt(1)),
        {**stored([1], prompt(1)), "block_size": 0}, {**stored([1], prompt(1)), "block_size": 1 << 40},
        ["BlockStored"], ["BlockStored", 5], [["BlockStored"]],
        stored([1], prompt(1), extra_keys=[["x" * 10_000]]),
    ]  # fmt: skip
    source = engine(index)
    refused = apply(index, source, *bad, stored([11], prompt(1)))
    assert len(refused) == len(bad), refused
    assert asked(index, prompt(1)).matches["A"].blocks == 1


def test_no_message_harms() -> None:
    whole = message(stored([11, 12], prompt(2)), removed([11]), ["AllBlocksCleared"], rank=0)
    rng = random.Random(5)
    cut = [whole[:at] for at in range(len(whole))]
    flipped = [whole[:at] + bytes((whole[at] ^ 1 << rng.randrange(8),)) + whole[at + 1 :] for at in range(len(whole))]
    deep = [b"\x91" * 5000 + b"\x01", b"\x93\xcb" + bytes(8) + b"\x91" * 5000 + b"\x01"]
    claims = [b"\xdd\xff\xff\xff\xff", b"\x92\x00\xdd\xff\xff\xff\xff\x00", b"", b"\xc0"]
    index = Blocks()
    source = engine(index)
    for payload in (*cut, *flipped, *deep, *claims):
        try:
            batch = decode(payload)
        except BadEvent:
            continue
        index.apply(source, batch.events, batch.rank)
    with pytest.raises(BadEvent, match="at most"):
        decode(bytes(17 << 20))


# -- a model of dicts ----------------------------------------------------------------------------------


class Model:
    """What an engine's events mean, by dicts: blocks are tuples of all tokens before their end."""

    def __init__(self) -> None:
        self.alias: dict[int, tuple[int, ...]] = {}
        self.copies: Counter[tuple[tuple[int, ...], str]] = Counter()

    def stored(self, names: Sequence[int], before: tuple[int, ...], tokens: Sequence[int], tier: str) -> None:
        for at, name in enumerate(names):
            self.alias[name] = before + tuple(tokens[: (at + 1) * SIZE])
            if before or not self.copies[self.alias[name], tier]:
                self.copies[self.alias[name], tier] += 1

    def removed(self, names: Sequence[int], tier: str) -> None:
        for name in names:
            block = self.alias.get(name)
            if block is not None and self.copies[block, tier]:
                self.copies[block, tier] -= 1
            if block is not None and not any(self.copies[block, each] for each in ("GPU", "CPU")):
                del self.alias[name]

    def prefix(self, tokens: Sequence[int], tiers: Sequence[str] = ("GPU", "CPU")) -> int:
        count = 0
        while (count + 1) * SIZE <= len(tokens):
            block = tuple(tokens[: (count + 1) * SIZE])
            if not any(self.copies[block, tier] for tier in tiers):
                break
            count += 1
        return count


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_dicts_say_the_same(seed: int, more: bool) -> None:
    rng = random.Random(seed)
    index = Blocks()
    sources = [engine(index, name) for name in "AB"]
    models = [Model(), Model()]
    prompts = [prompt(rng.choice((1, 3, 20, 40)), number % 5) for number in range(8)]
    prompts += [each[: 2 * SIZE] + prompt(9, 50 + number) for number, each in enumerate(prompts[:4])]
    names: dict[tuple[int, ...], int] = {}
    waiting: list[list[Any]] = [[], []]
    for _ in range(150):
        which = rng.randrange(2)
        source, model, tokens = sources[which], models[which], rng.choice(prompts)
        blocks = [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        hashes = [names.setdefault(each, rng.getrandbits(64)) for each in blocks]
        tier = rng.choice(("GPU", "GPU", "CPU"))
        if rng.random() < 0.55:
            known = [at for at in range(len(hashes)) if at == 0 or hashes[at - 1] in model.alias]
            start = rng.choice(known)
            stop = rng.randrange(start, len(hashes)) + 1
            part = tokens[start * SIZE : stop * SIZE]
            parent = hashes[start - 1] if start else None
            waiting[which].append(stored(hashes[start:stop], part, parent, medium=tier))
            model.stored(hashes[start:stop], tuple(tokens[: start * SIZE]), part, tier)
        elif rng.random() < 0.9:
            gone = rng.sample(hashes, rng.randrange(len(hashes)) + 1)
            waiting[which].append(removed(gone, medium=tier))
            model.removed(gone, tier)
        elif rng.random() < 0.3:
            waiting[which].append({"type": "AllBlocksCleared"})
            models[which] = Model()
        if rng.random() < 0.5:
            continue  # several events in one message
        for source, events in zip(sources, waiting):
            assert apply(index, source, *events, more=more) == []
            events.clear()
        if more and rng.random() < 0.5:
            continue  # several messages before a question
        if rng.random() < 0.1:
            index.sweep()
        for tokens in rng.sample(prompts, 3):
            found = asked(index, tokens).matches
            for source, model in zip(sources, models):
                match = found.get(source.registration.instance)
                assert (match.blocks if match else 0) == model.prefix(tokens)
                assert (match.tiers["gpu"] if match else 0) == model.prefix(tokens, ["GPU"])
    for source, model, events in zip(sources, models, waiting):
        apply(index, source, *events)
        assert source.blocks == len({block for (block, _), count in model.copies.items() if count})
        assert source.blocks == sum(each.blocks for each in source.holders.values())


def test_what_waits_for_more_is_bounded_and_seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Blocks()
    source, prompts = engine(index), [prompt(1, seed) for seed in range(4)]
    for number, tokens in enumerate(prompts[:2]):
        apply(index, source, stored([number], tokens), more=True)
    assert source.blocks == 0 and asked(index, prompts[1]).matches["A"].blocks == 1 and source.blocks == 2
    apply(index, source, stored([2], prompts[2]), more=True)
    assert source.blocks == 2
    index.flush()
    assert source.blocks == 3
    apply(index, source, stored([3], prompts[3]), more=True)
    index.clear(source)
    index.flush()
    assert source.blocks == 0 and asked(index, prompts[3]).matches == {}, "what waited is forgotten too"
    monkeypatch.setattr(blocks_module, "_GATHERED", 2)
    apply(index, source, stored([0], prompts[0]), more=True)
    assert source.blocks == 0
    apply(index, source, stored([1], prompts[1]), more=True)
    assert source.blocks == 2


def test_what_waited_for_a_message_that_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Blocks()
    source, tokens = engine(index), prompt(2)
    apply(index, source, stored([11], tokens[:SIZE]), more=True)
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_stored", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            apply(index, source, stored([12], tokens[SIZE:], 11), more=True)
    index.flush()
    assert source.blocks == 0


def test_what_waited_of_another_publisher_is_not_dropped_with_a_message_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the one whose message fails is asked for everything again."""
    index = Blocks()
    source, other = engine(index), engine(index, "B")
    apply(index, source, stored([11], prompt(1)), more=True)
    monkeypatch.setattr(Blocks, "_stored", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        apply(index, other, stored([12], prompt(1)), more=True)
    index.flush()
    assert source.blocks == 1


@pytest.mark.parametrize("whose", ["A", "B"])
def test_a_publisher_is_forgotten_without_memory_for_what_waits(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was forgotten just then went on counting, also of one that was not registered any more."""
    index = Blocks()
    source, other = engine(index), engine(index, "B")
    apply(index, source, stored([1], prompt(1)))
    apply(index, source if whose == "A" else other, stored([2], prompt(1, 1)), more=True)
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_hold", lambda *_: 1 // 0)
        assert index.unregister(source.registration.name)
    index.flush()
    assert not asked(index, prompt(1)).matches and (source.blocks, other.blocks) == (0, whose == "B")
    assert list(asked(index, prompt(1, 1)).matches) == (["B"] if whose == "B" else [])


# -- what is counted -----------------------------------------------------------------------------------


def test_an_event_waits_for_its_parent() -> None:
    index = Blocks()
    source = engine(index)
    tokens = prompt(4)
    apply(index, source, stored([13], tokens[2 * SIZE : 3 * SIZE], 12), stored([14], tokens[3 * SIZE :], 13))
    assert asked(index, tokens).matches == {} and source.waiting == 2
    apply(index, source, removed([13]), stored([11, 12], tokens[: 2 * SIZE]))
    assert source.waiting == 0 or source.waiting == 1  # the block behind one that is gone waits on
    assert asked(index, tokens).matches["A"].blocks == 2
    apply(index, source, stored([13], tokens[2 * SIZE : 3 * SIZE], 12))
    assert asked(index, tokens).matches["A"].blocks == 4 and source.waiting == 0


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PARKED_MAX", 10)
    index = Blocks()
    source = engine(index)
    for number in range(100):
        apply(index, source, stored([1000 + number], prompt(1), 5000 + number))
    assert source.waiting == sum(len(each) for each in source.parked.values()) == 10


def test_a_part_of_a_block_is_left_out() -> None:
    """Of hybrid models vLLM tells of a prompt's last block while it fills: by the size of a hash, which is smaller."""
    index = Blocks()
    source = engine(index)
    source.known.add(0)
    tokens = prompt(2)
    apply(index, source, stored([1], tokens[:SIZE]))
    part = {**stored([2], tokens[SIZE : SIZE + 2], parent=1), "block_size": 2}
    apply(index, source, part, {**part, "parent_block_hash": 77}, {**part, "parent_block_hash": None})
    assert source.ignored == {"a part of a block": 3} and source.missed == 0 and source.known == {0}
    assert source.waiting == 0 and index.entries == 1
    apply(index, source, removed([2]), stored([3], tokens[SIZE:], parent=1))
    assert asked(index, tokens).matches["A"].blocks == 2
    # A publisher that is registered without a size, or that has another way of telling, has what it tells.
    others = [Registration("B", "other"), Registration("C", "other", "sglang", block_size=SIZE)]
    for other in map(index.register, others):
        apply(index, other, {**part, "parent_block_hash": None})
        assert other.blocks == 1 and not other.ignored


def test_whole_blocks_count_if_a_publisher_is_registered_with_too_large_a_size() -> None:
    """A part of a block has one hash. What was taken for parts before is missing, and the publisher not complete."""
    index = Blocks()
    source = engine(index)
    source.known.add(0)
    tokens = prompt(4)
    small = SIZE // 2
    sized = [
        {**stored([number], tokens[at : at + small], parent=parent), "block_size": small}
        for number, at, parent in ((1, 0, None), (8, 3 * SIZE, 7))
    ]
    whole = {**stored([2, 3, 4], tokens[: 3 * small]), "block_size": small}
    apply(index, source, sized[0])
    assert source.ignored == {"a part of a block": 1} and source.known == {0}
    apply(index, source, whole)
    assert source.blocks == 3 and source.missed == 1 and not source.known
    apply(index, source, {**sized[0], "block_hashes": [5], "parent_block_hash": 4})
    assert source.blocks == 4 and source.missed == 1, "one that was told alone counts from then on"
    apply(index, source, {**sized[1], "group_idx": 1}, {**stored([9], tokens[:1], parent=4), "block_size": 1})
    assert source.ignored["a part of a block"] == 3 and source.blocks == 4, "of another group, and a smaller one"
    other = engine(index, "B")
    other.known.add(0)
    apply(index, other, whole)
    assert other.blocks == 3 and other.known == {0} and not other.ignored


def test_issue_blocks_told_alone_are_whole_if_together_they_have_the_size_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may have been told by a step of its own."""
    monkeypatch.setattr(sources_module, "PARTS_MAX", 2)
    index = Blocks()
    source = engine(index)
    source.known.add(0)
    tokens = prompt(2)

    def one(name: int, parent: int | None) -> dict[str, Any]:
        return {**stored([name], tokens[name - 1 : name], parent=parent), "block_size": 1}

    apply(index, source, one(1, None), one(2, 1), one(3, 2), one(3, 2))
    assert source.ignored == {"a part of a block": 4} and source.known == {0}
    assert len(source.parts) == 2, "and no more are remembered"
    apply(index, source, one(4, 3))
    assert source.missed == 1 and not source.known
    apply(index, source, one(1, None), one(2, 1))
    assert source.blocks == 2


def test_a_copy_that_is_removed_leaves_the_other() -> None:
    index = Blocks()
    source = engine(index)
    tokens = prompt(2)
    second = stored([12], tokens[SIZE:], 11)
    apply(index, source, stored([11], tokens[:SIZE]), *[second] * 2, removed([12]))
    assert asked(index, tokens).matches["A"].blocks == 2
    apply(index, source, *[second] * 40, *[removed([12])] * 15)
    assert asked(index, tokens).matches["A"].blocks == 1, "more copies than are counted are forgotten early"


@pytest.mark.parametrize("length", [2, 40])
def test_blocks_that_are_reported_again_are_no_copies(length: int) -> None:
    """With ``kv_cache_report_mode``, vLLM tells of a prefix that was found as if it were stored."""
    index = Blocks()
    source = engine(index)
    tokens, names = prompt(length), list(range(100, 100 + length))
    whole = stored(names, tokens)
    apply(index, source, whole, whole)
    apply(index, source, whole, stored([7], prompt(1, 1), names[-1]))
    apply(index, source, removed(names[1:]))
    assert asked(index, tokens).matches["A"].blocks == 1
    apply(index, source, removed(names[:1]))
    assert asked(index, tokens).matches == {}


def test_salt_adapter_and_images_keep_blocks_apart() -> None:
    index = Blocks()
    source = engine(index)
    tokens = prompt(3)
    apply(index, source, stored([1, 2], tokens[: 2 * SIZE], extra_keys=[[["cache_salt", "s"]], None]))
    apply(index, source, stored([3], tokens[2 * SIZE :], 2))
    assert asked(index, tokens).matches == {}
    assert asked(index, tokens, SPACE._replace(salt="s")).matches["A"].blocks == 3
    apply(index, source, stored([11], tokens[:SIZE], lora_name="L", extra_keys=[["L"]]))
    assert asked(index, tokens, SPACE._replace(lora="L")).matches["A"].blocks == 1
    apply(index, source, stored([21, 22], tokens[: 2 * SIZE], extra_keys=[None, [["mm", "image", 0]]]))
    assert asked(index, tokens).matches["A"].blocks == 1, "a block with an image is not one of its tokens alone"


def test_keys_without_tags_are_told_apart_by_their_place() -> None:
    """vLLM publishes them so: the adapter's name, pairs for images, the salt in a prompt's first block, digests."""
    index = Blocks()
    source = engine(index)
    tokens = prompt(3)
    apply(index, source, stored([1, 2], tokens[: 2 * SIZE], extra_keys=[["s"], None]))
    apply(index, source, stored([3], tokens[2 * SIZE :], 2))
    assert asked(index, tokens).matches == {}
    assert asked(index, tokens, SPACE._replace(salt="s")).matches["A"].blocks == 3
    apply(index, source, stored([11, 12], tokens[: 2 * SIZE], lora_name="x", extra_keys=[["x", "x"], ["x"]]))
    assert asked(index, tokens, SPACE._replace(lora="x")).matches == {}, "a salt that is the adapter's name is one"
    assert asked(index, tokens, SPACE._replace(lora="x", salt="x")).matches["A"].blocks == 2
    for number, keys in enumerate((["lora", 0], ["cache_salt", 0], ["image", 3], b"digest of an embedding", ["x"])):
        first = stored([100 + number], tokens[:SIZE], extra_keys=[[keys]])
        later = stored([201 + number, 301 + number], prompt(2, 7), extra_keys=[None, [keys]])
        apply(index, source, first, later)
        assert asked(index, tokens).matches == {} and asked(index, prompt(2, 7)).matches["A"].blocks == 1
    apply(index, source, stored([401, 402], prompt(2, 9), extra_keys=[None, ["a text in a later block"]]))
    assert asked(index, prompt(2, 9)).matches["A"].blocks == 1


SPACES = {
    "salt": (SPACE._replace(salt="s"), {"extra_keys": [["s"]] + [None] * 29}),
    "adapter": (SPACE._replace(lora="L"), {"lora_name": "L", "extra_keys": [["L"]] * 30}),
    "both": (SPACE._replace(lora="L", salt="s"), {"lora_name": "L", "extra_keys": [["L", "s"]] + [["L"]] * 29}),
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("count", [1, 3, 30])
@pytest.mark.parametrize("which", SPACES)
def test_a_block_that_is_told_again_with_less_stays_where_it_is(which: str, count: int, kind: str) -> None:
    """vLLM's offloading leaves salts away. Blocks that it told so were all prompts', and for ever a salted one's."""
    index = Blocks()
    source = engine(index, type=kind)
    tokens, names = prompt(count), list(range(1, count + 1))
    space, more = SPACES[which]
    spaces = [SPACE, *(each for each, _ in SPACES.values())]
    more = {**more, "extra_keys": more["extra_keys"][:count]}

    def blocks() -> dict[Space, dict[str, int]]:
        found = {each: asked(index, tokens, each).matches.get("A") for each in spaces}
        return {each: {tier: n for tier, n in match.tiers.items() if n} for each, match in found.items() if match}

    apply(index, source, stored(names, tokens, medium="GPU", **more))
    assert blocks() == {space: {"gpu": count}}
    apply(index, source, stored(names, tokens, medium="CPU"))
    if kind == "vllm":
        assert blocks() == {space: {"gpu": count, "cpu": count}}
        apply(index, source, removed(names, medium="GPU"))
        assert blocks() == {space: {"cpu": count}}
    else:  # whose names need not say what blocks depend on
        assert blocks() == {SPACE: {"cpu": count}}
        apply(index, source, removed(names, medium="GPU"))
    apply(index, source, removed(names, medium="CPU"))
    assert blocks() == {} and index.entries == source.blocks == 0


def test_what_is_told_with_less_is_behind_blocks_that_are_known() -> None:
    """A chunk of an offloaded prompt, whose last block has gone from the GPU; another one has an image, and no salt."""
    index = Blocks()
    source = engine(index)
    tokens = prompt(3)
    apply(index, source, stored([1, 2], tokens[: 2 * SIZE], medium="GPU", extra_keys=[["s"], [["image", 0]]]))
    apply(index, source, stored([1, 2, 3], tokens, medium="CPU"), removed([1, 2], medium="GPU"))
    apply(index, source, stored([4], prompt(1, 4), 3, medium="CPU"))
    assert asked(index, tokens).matches == {} and index.entries == 4
    assert asked(index, tokens, SPACE._replace(salt="s")).matches["A"].blocks == 1, "the next one has an image"
    # One that follows another one, which says the same, is looked at by itself.
    apply(index, source, stored([5], prompt(1, 5), medium="GPU", extra_keys=[["s"]]))
    apply(index, source, stored([6], prompt(1, 6), medium="CPU"), stored([5], prompt(1, 5), medium="CPU"))
    assert asked(index, prompt(1, 6)).matches["A"].blocks == 1 and asked(index, prompt(1, 5)).matches == {}
    # One that differs in what it tells is another block, and one of another size is none that is known.
    apply(index, source, stored([1], tokens[:SIZE], medium="CPU", lora_name="L"))
    assert asked(index, tokens, SPACE._replace(lora="L")).matches["A"].blocks == 1
    assert asked(index, tokens, SPACE._replace(salt="s")).matches == {}


def test_hosts_of_a_store_have_a_block_each() -> None:
    """The control: a block that is told of another host is there too."""
    index = Blocks()
    source = index.register(Registration("master", MODEL, "mooncake", SIZE, pool="main"))
    tokens = prompt(1)
    (key,) = request_keys(tokens, SIZE)
    event = {"event_type": "stored", "seq_hashes": [key], "base_block_idx": 0, "token_ids": tokens, "block_size": SIZE}
    apply(index, source, *({**event, "backend_id": host} for host in "ab"))
    assert index.entries == 2 and {"node:a", "node:b"} <= set(asked(index, tokens).matches)


def test_blocks_that_offloading_names_without_tokens_are_known() -> None:
    """vLLM's OffloadingConnector tells blocks so, of size 0. They were refused: gone from the GPU, they were gone."""
    index = Blocks()
    source = engine(index)
    tokens = prompt(2)
    apply(index, source, stored([1, 2], tokens, medium="GPU", extra_keys=[["s"], None]))
    for name in (1, 2, 3):
        placeholder = {**stored([name], [], medium="CPU"), "block_size": 0}
        assert apply(index, source, placeholder) == []
    assert apply(index, source, ["BlockStored", [4], None, [], 0, None, "CPU"]) == []
    assert source.ignored["unknown blocks without tokens"] == 2
    apply(index, source, removed([1, 2], medium="GPU"))
    match = asked(index, tokens, SPACE._replace(salt="s")).matches["A"]
    assert match.blocks == match.tiers["cpu"] == 2 and asked(index, tokens).matches == {}
    apply(index, source, *(removed([name], medium="CPU") for name in (1, 2, 3)))
    assert index.entries == 0


def test_memory_of_a_store_whose_removals_nobody_tells_is_not_the_engines() -> None:
    """vLLM's MooncakeStoreConnector and LMCache in its process say ``cpu``, and never that a block is gone."""
    index = Blocks()
    tokens = prompt(2)
    first, second = tokens[:SIZE], tokens[SIZE:]
    told = {name: engine(index, name, **more) for name, more in (("A", {}), ("B", {"storage_removals": True}))}
    for source in told.values():
        apply(index, source, stored([1], first, medium="GPU"), stored([2], second, 1, medium="GPU"))
        apply(index, source, stored([1], first, medium="cpu"), stored([2], second, 1, medium="cpu"))
        apply(index, source, stored([3], prompt(1, 3), medium="cpu"), removed([2, 1], medium="GPU"))
    found = asked(index, tokens).matches
    assert set(found) == {"B"} and found["B"].tiers["cpu"] == 2
    source = told["A"]
    assert source.blocks == 0 and sum(source.ignored.values()) == 3 and not source.media
    for medium in ("CPU", "CPU_PINNED"):  # of which removals are told, by whatever name
        apply(index, source, stored([1], first, medium=medium))
        assert asked(index, first).matches["A"].tiers["cpu"] == 1
        apply(index, source, removed([1], medium="cpu"))
        assert source.blocks == 0


def test_storage_counts_where_removals_are_told() -> None:
    index = Blocks()
    tokens = prompt(3)
    for name, more in (("A", {}), ("B", {"storage_removals": True})):
        apply(index, engine(index, name, **more), stored([1, 2, 3], tokens, medium="STORAGE"))
    found = asked(index, tokens).matches
    assert set(found) == {"B"} and found["B"].score == 3 * WEIGHTS["storage"]


def test_a_store_has_scores_of_its_hosts_and_its_pool() -> None:
    index = Blocks()
    engine(index)
    store = index.register(Registration("master", MODEL, "simm", SIZE, pool="main"))
    tokens = prompt(4)
    keys = request_keys(tokens, SIZE)
    for node, mine in (("h1", keys[:2]), ("h2", keys[2:3])):
        apply(index, store, {"event_type": "stored", "seq_hashes": mine, "medium": "STORAGE", "backend_id": node,
                             "tenant_id": "default", "base_block_idx": 0})  # fmt: skip
    found = asked(index, tokens, loads={"A": 1.0})
    assert {name: match.blocks for name, match in found.matches.items()} == {"pool:main": 3, "node:h1": 2}
    assert found.with_pool == {"A": 3 * WEIGHTS["storage"]} and found.costs == {"A": 4 - 1.5 + 1.0}
    apply(index, store, {"event_type": "removed", "seq_hashes": keys[1:2], "medium": "STORAGE", "backend_id": "h1"})
    assert asked(index, tokens).matches["pool:main"].blocks == 1
    apply(index, store, {"event_type": "cleared", "tenant_id": "another"})
    assert asked(index, tokens).matches["pool:main"].blocks == 1
    apply(index, store, {"event_type": "cleared", "tenant_id": "default"})
    assert asked(index, tokens).matches == {}


def _scorer_case(third: str) -> Scores:
    """A and B of llm-d's test of its scorer: A has 1-3 and 6, B has 4 and 5."""
    index = Blocks()
    tokens = prompt(6)
    part = [tokens[at * SIZE : (at + 1) * SIZE] for at in range(6)]
    names = [1001 + at for at in range(6)]
    a, b = engine(index, "A"), engine(index, "B")
    for source, held in ((a, (0, 1, 2, 5)), (b, (3, 4))):
        for at in range(6):
            parent = names[at - 1] if at else None
            apply(index, source, stored([names[at]], part[at], parent, medium=third if at == 2 else "GPU"))
            if third == "GPU" and at == 2:
                apply(index, source, stored([names[at]], part[at], parent, medium="CPU"))
        for at in set(range(6)) - set(held):
            for medium in ("GPU", "CPU"):
                apply(index, source, removed([names[at]], medium=medium))
    return asked(index, tokens, weights={"gpu": 1.0, "cpu": 0.5})


def test_scores_are_those_of_llm_d() -> None:
    assert {name: match.score for name, match in _scorer_case("GPU").matches.items() if match.score} == {"A": 3.0}
    assert {name: match.score for name, match in _scorer_case("CPU").matches.items() if match.score} == {"A": 2.5}


def test_a_tier_that_nobody_knows_weighs_nothing_and_is_named() -> None:
    index = Blocks()
    apply(index, engine(index), stored([1, 2], prompt(2), medium="Tape"))
    found = asked(index, prompt(2))
    assert found.matches["A"].score == 0 and found.matches["A"].blocks == 2 and found.unknown_tiers == ["tape"]


def test_what_is_expected_counts_for_a_time() -> None:
    index = Blocks()
    source = engine(index)
    tokens = prompt(3)
    index.expect(source, SPACE, request_keys(tokens, SIZE), until=10.0)
    assert asked(index, tokens, now=9.0).matches["A"].expected == 3
    assert asked(index, tokens[: 2 * SIZE] + prompt(1, 9), now=9.0).matches["A"].score == 2
    assert asked(index, tokens, now=10.0).matches == {}


def test_what_is_expected_counts_for_the_rank_that_was_named() -> None:
    """It was added to what the rank had that came first, which so had blocks of both."""
    index = Blocks()
    source, tokens = engine(index, rank=None), prompt(4)
    apply(index, source, stored([1], tokens[:SIZE], dp_rank=0), stored([2, 3], tokens[: 2 * SIZE], dp_rank=1))
    for blocks, rank in ((3, 1), (2, 2), (1, None)):
        index.expect(source, SPACE, request_keys(tokens[: blocks * SIZE], SIZE), until=10.0, rank=rank)
    found = asked(index, tokens, now=9.0, weights={"gpu": 1.0, "expected": 0.5}).matches["A"]
    assert found.ranks == {0: 1, 1: 2, 2: 0} and found.expected == 3
    assert [weights.tolist() for weights in found.weights if not isinstance(weights, tuple)] == [
        [1.0], [1.0, 1.0, 0.5], [0.5, 0.5]
    ]  # fmt: skip


def test_a_stale_source_is_named_and_not_counted() -> None:
    index = Blocks()
    source = engine(index)
    apply(index, source, stored([1, 2], prompt(2)))
    source.stale = True
    found = asked(index, prompt(2))
    assert found.matches == {} and found.stale == ["A"]


def test_mutation_identifiers_that_are_used_again_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a sweep kept entries of holders that are gone, the next holder would have them."""
    for broken in (False, True):
        index = Blocks()
        apply(index, engine(index), stored([1, 2], prompt(2)))
        index.unregister(("A", "default", 0))
        if broken:
            index._held._alive = index._aliases._alive = lambda owners: owners > 0
        index.sweep()
        for number in range(len(index._ids._live)):
            apply(index, engine(index, f"B{number}"), stored([7], prompt(1, 9)))
        assert any(match.blocks == 2 for match in asked(index, prompt(2)).matches.values()) == broken


def test_a_block_has_at_most_64_bytes() -> None:
    index = Blocks()
    source = engine(index)
    worst = 0.0
    for number in range(60):
        tokens = prompt(200, number)
        apply(index, source, stored([number * 1000 + at for at in range(200)], tokens))
        if number > 20:
            worst = max(worst, index.nbytes / index.entries)
    assert index.entries == 60 * 200 and worst <= 64


def test_the_example_of_the_documentation_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, "index.md", "exec"), {})


def test_the_documentation_has_the_weights() -> None:
    told = re.findall(r"`([a-z=0-9.,]+expected=1)`", (DOCS / "index.md").read_text())
    assert [dict(part.split("=") for part in each.split(",")) for each in told] == [
        {name: f"{weight:g}" for name, weight in WEIGHTS.items()}
    ]
