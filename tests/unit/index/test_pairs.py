"""Blocks of pairs of neighbouring tokens, as SGLang tells where it decodes with EAGLE."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import prompts as prompts_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.events import Stored, decode  # noqa: E402
from simm.index.keys import pair_chain, token_bytes  # noqa: E402
from simm.index.service import Service  # noqa: E402
from simm.index.sources import Registration  # noqa: E402
from simm.index.streams import Stream  # noqa: E402


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])  # type: ignore[no-any-return]


def stored(names: list[int], tokens: list[int], size: int, parent: int | None = None) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "block_size": size,
            "token_ids": list(pairwise(tokens)), "medium": "GPU"}  # fmt: skip


class Engine:
    """A radix tree of pages of pairs: what it tells, and how many whole pages of a prompt it would find."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 1000
        self.names: dict[tuple[tuple[int, int], ...], int] = {}

    def pages(self, tokens: list[int]) -> list[tuple[tuple[int, int], ...]]:
        pairs = tuple(pairwise(tokens))
        return [pairs[:end] for end in range(self.size, len(pairs) + 1, self.size)]

    def insert(self, tokens: list[int]) -> list[dict[str, Any]]:
        events = []
        parent = None
        for number, page in enumerate(self.pages(tokens)):
            if page not in self.names:
                self.names[page] = self.next = self.next + 1
                part = tokens[number * self.size : (number + 1) * self.size + 1]
                events.append(stored([self.names[page]], part, self.size, parent))
            parent = self.names[page]
        return events

    def evict(self, dice: random.Random) -> dict[str, Any]:
        leaves = [each for each in self.names if not any(o[: len(each)] == each and o != each for o in self.names)]
        return {"type": "BlockRemoved", "block_hashes": [self.names.pop(dice.choice(leaves))], "medium": "GPU"}

    def has(self, tokens: list[int]) -> int:
        pages = self.pages(tokens)
        return next((at for at, page in enumerate(pages) if page not in self.names), len(pages))


def asked(service: Service, tokens: list[int], size: int) -> int:
    body = {"model": "m", "token_ids": tokens, "block_size": size}
    answer = json.loads(service.posts["/query"](json.dumps(body).encode()).body)
    found = int(answer["default"].get("A", {"longest_matched": 0})["longest_matched"])
    scores = json.loads(service.posts["/score"](json.dumps(body).encode()).body)["scores"]
    assert [each["score"] * size for each in scores] == [found] * bool(found)
    return found // size


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_said_is_what_the_engine_would_find(size: int) -> None:
    """A page counts only where the token behind it is the same, too: of two prompts that differ there it is another."""
    dice = random.Random(size)
    index = Blocks()
    source = index.register(Registration("A", "m", "sglang", block_size=size))
    stream, service, engine = Stream(index, source, replays=False), Service(index), Engine(size)
    found = set()
    for number in range(150):
        if engine.names and dice.random() < 0.4:
            events = [engine.evict(dice)]
        else:
            events = engine.insert([dice.randrange(2) for _ in range(dice.randrange(5 * size))])
        stream.message(number, packed(*events))
        for _ in range(4):
            tokens = [dice.randrange(2) for _ in range(dice.randrange(5 * size))]
            assert asked(service, tokens, size) == engine.has(tokens)
            found.add(engine.has(tokens))
    assert stream.complete and source.pairs and not source.ignored and not stream.counts["refused"]
    assert len(found) > 2


def test_plain_blocks_of_the_same_tokens_are_others() -> None:
    index = Blocks()
    sources = [index.register(Registration(name, "m", "sglang", block_size=2)) for name in ("A", "B")]
    index.apply(sources[0], decode(packed(stored([1, 2], [5, 6, 7, 8, 9], 2))).events)
    plain = {**stored([1, 2], [5, 6, 7, 8, 9], 2), "token_ids": [5, 6, 7, 8]}
    index.apply(sources[1], decode(packed(plain)).events)
    body = {"model": "m", "token_ids": [5, 6, 7, 8], "block_size": 2}
    service = Service(index)
    answer = json.loads(service.posts["/query"](json.dumps(body).encode()).body)["default"]
    assert {name: each["longest_matched"] for name, each in answer.items()} == {"A": 2, "B": 4}


def found_in(service: Service, tokens: list[int]) -> dict[str, int]:
    body = {"model": "m", "token_ids": tokens, "block_size": 2}
    answer = json.loads(service.posts["/query"](json.dumps(body).encode()).body)["default"]
    return {name: each["longest_matched"] for name, each in answer.items()}


def test_a_replay_that_ends_between_two_looks_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question failed: the publisher was in the second look alone, for its pairs."""
    index = Blocks()
    sources = [index.register(Registration(name, "m", "sglang", block_size=2)) for name in ("A", "B")]
    for source in sources:
        index.apply(source, decode(packed(stored([1, 2], [5, 6, 7, 8, 9], 2))).events)
    sources[0].stale = True
    real = index.match

    def match(*arguments: Any) -> Any:
        found = real(*arguments)
        sources[0].stale = False
        return found

    monkeypatch.setattr(index, "match", match)
    service = Service(index)
    assert found_in(service, [5, 6, 7, 8, 9]) == {"B": 4}
    assert found_in(service, [5, 6, 7, 8, 9]) == {"A": 4, "B": 4}


@pytest.mark.parametrize("plain", [1, 2, 4])
def test_a_pool_of_which_one_publisher_tells_pairs(plain: int) -> None:
    """Questions failed where the prefix of pairs is longer than the other one."""
    index = Blocks()
    sources = [index.register(Registration(f"on {n}", "m", "mooncake", 2, pool="main", node=n)) for n in ("a", "b")]
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    index.apply(sources[0], decode(packed(stored([1, 2, 3], tokens[:7], 2))).events)
    there = {**stored([1, 2, 3, 4][:plain], tokens, 2), "token_ids": tokens[: 2 * plain]}
    index.apply(sources[1], decode(packed(there)).events)
    found = found_in(Service(index), tokens)
    assert found["pool:main"] == 2 * max(3, plain) and found["node:b"] == 2 * plain
    assert found.get("node:a", 6) == 6


def test_both_forms_of_events_may_have_pairs() -> None:
    event = stored([1, 2], [5, 6, 7, 8, 9], 2)
    array = ["BlockStored", event["block_hashes"], None, event["token_ids"], 2]
    first, second = (decode(packed(each)).events[0] for each in (event, array))
    assert isinstance(first, Stored) and isinstance(second, Stored) and first.pairs and second.pairs
    assert bytes(first.tokens or b"") == bytes(second.tokens or b"") and first.extras == second.extras


def test_short_events_of_pairs_are_collected_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them was looked at by itself. They do what they do alone."""
    looked: list[Any] = []
    alone = Blocks._stored
    monkeypatch.setattr(Blocks, "_stored", lambda *given: looked.append(given) or alone(*given))
    dice = random.Random(7)
    size = 2
    engine, found = Engine(size), []
    told = [engine.insert([dice.randrange(3) for _ in range(dice.randrange(9 * size))]) for _ in range(40)]
    events = decode(packed(*(each for some in told for each in some))).events
    for together in (True, False):
        index = Blocks()
        source = index.register(Registration("A", "m", "sglang", block_size=size))
        looked.clear()
        for some in [events] if together else [[each] for each in events]:
            index.apply(source, some)
        ((_, keys, counts),) = index.held(1 << 20)
        found.append((sorted(zip(keys.tolist(), counts.tolist())), source.pairs))
        assert len(looked) == (1 if together else len(events))
    assert found[0] == found[1] and len(found[0][0]) == len(engine.names) > 50


def test_keys_of_pairs_are_remembered_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = prompts_module.pair_chain

    def counted(tokens: memoryview, size: int, **more: Any) -> list[int]:
        hashed.append(len(tokens) // 4)
        return real(tokens, size, **more)

    monkeypatch.setattr(prompts_module, "pair_chain", counted)
    prompts = prompts_module.Prompts()
    dice = random.Random(3)
    tokens = [dice.randrange(100_000) for _ in range(4000)]
    for length in (4000, 3000, 2999, 4000, 17, 16, 0):
        part = tokens[:length]
        for size in (16, 9, 64, 4):
            keys = prompts.read(json.dumps({"token_ids": part}).encode())["token_ids"].keys(size, pairs=True)
            assert keys.tolist() == real(token_bytes(part), size)
            assert len(keys) == max(0, length - 1) // size
    hashed.clear()
    prompts.read(json.dumps({"token_ids": tokens}).encode())["token_ids"].keys(16, pairs=True)
    assert len(hashed) == 1 and hashed[0] < 1000, "what is behind the last piece"


def test_the_last_block_of_a_text_depends_on_the_token_behind_it() -> None:
    """Of two prompts that are alike up to the end of a block and of a piece, that block is not the same one."""
    known = 0
    for pad in range(8):
        prompts = prompts_module.Prompts()

        def read(tokens: list[int], prompts: Any = prompts, pad: int = pad) -> Any:
            return prompts.read(json.dumps({"model": "m" * pad, "token_ids": tokens}).encode())["token_ids"]

        tokens = [10_000] * 2000
        piece = len(read(tokens)._pieces[0].ids)
        read(tokens).keys(piece, pairs=True)
        other = tokens[:piece] + [10_001] * (2000 - piece)
        again = read(other)
        known += again._pieces[0].keys.keys() == {-piece}
        assert again.keys(piece, pairs=True).tolist() == pair_chain(token_bytes(other), piece)
    assert known > 2, "what is tested is that pieces are known"


def test_what_is_expected_needs_no_keys_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Blocks()
    source = index.register(Registration("A", "m", "sglang", block_size=2))
    index.apply(source, decode(packed(stored([1, 2], [5, 6, 7, 8, 9], 2))).events)
    service = Service(index)
    body = {"model": "m", "token_ids": [5, 6, 7, 8, 9], "block_size": 2, "instance_id": "A"}
    with monkeypatch.context() as without:
        without.setattr(prompts_module, "pair_chain", None)
        assert service.posts["/expect"](json.dumps(body).encode()).status == 200
    assert asked(service, [5, 6, 7, 8, 9], 2) == 2


@pytest.mark.parametrize(
    "token_ids",
    [[[1, 2], [5, 3]], [[1, 2], [2, 3], [3, 4]], [[1, 2, 3]], [[1, -2], [-2, 3]], [[1, 2], 2], [[]]],
    ids=str,
)
def test_what_are_no_pairs_of_whole_blocks_is_refused(token_ids: Any) -> None:
    index = Blocks()
    source = index.register(Registration("A", "m", "sglang", block_size=1))
    stream = Stream(index, source, replays=False)
    stream.message(0, packed({**stored([1, 2], [], 1), "token_ids": token_ids}))
    assert stream.counts["refused"] == 1 and not source.blocks and not stream.complete and not source.lost
