"""Publishers with many salts or tenants: the last ones count as the first, and none costs a look at all others."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module
from simm.index.blocks import Blocks
from simm.index.events import Where
from simm.index.keys import request_keys
from simm.index.lmcache.hashes import namers
from simm.index.lmcache.servers import Servers
from simm.index.scores import score
from simm.index.service import Service
from simm.index.sources import Holder, Holders, Registration, Space, Spaces
from tests.support.index_events import MODEL, SIZE, SPACE, apply, asked, engine, prompt, removed, stored
from tests.support.lmcache_server import PROMPTS, Part, batch, body, entry
from tests.support.lmcache_server import SIZE as CHUNK

TOKENS = prompt(1)


def salted(number: int, **more: Any) -> dict[str, Any]:
    return stored([number], TOKENS, cache_salt=f"user-{number}", **more)


def found(index: Blocks, number: int) -> bool:
    return bool(asked(index, TOKENS, SPACE._replace(salt=f"user-{number}")).matches)


def test_users_that_come_late_count() -> None:
    """Of more than 1,024 salts of an engine none of the others was ever counted."""
    index = Blocks()
    source = engine(index)
    apply(index, source, *map(salted, range(1100)))
    assert source.blocks == 1100 and not source.ignored and not source.missed
    assert all(found(index, number) for number in (0, 1023, 1024, 1099))


def test_users_of_a_server_of_lmcache_that_come_late_count() -> None:
    """Of more than 256 salts none of the others was ever counted."""
    index = Blocks()
    servers = Servers(index)
    parts = [entry(Part(0, 0, "m", f"user-{number}", 1, 0)) for number in range(300)]
    servers.events(body(batch("a", 1, "store", parts)))
    tokens = PROMPTS[0][:CHUNK]
    (namer,) = namers("sha256_cbor")
    for number in (0, 255, 256, 299):
        space = Space("m", "", "default", f"user-{number}", CHUNK)
        matches = score(index, space, request_keys(tokens, CHUNK), names=[namer(tokens, CHUNK)]).matches
        assert matches["a"].blocks == 1, number
    assert servers._servers["a"].complete


def test_the_salt_that_was_stored_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "HOLDERS_MAX", 4)
    index = Blocks()
    source = engine(index)
    apply(index, source, *map(salted, range(4)), stored([9], prompt(1, 1), cache_salt="user-0"), salted(4))
    assert [found(index, number) for number in range(5)] == [True, False, True, True, True]
    assert source.ignored == {"too many spaces": 1} and source.missed and source.blocks == 5
    apply(index, source, removed([1]), removed([2]), salted(5))
    assert [found(index, number) for number in range(6)] == [True, False, False, True, True, True]
    assert source.ignored == {"too many spaces": 1}, "one without blocks went first"
    index.clear(source)
    assert not source.holders and not source.holders._tree and not index.spaces and not index.spaces._sizes


@pytest.mark.parametrize("seed", range(3))
def test_the_holders_that_a_removal_means(seed: int) -> None:
    rng = random.Random(seed)
    source = Blocks().register(Registration("s", MODEL, "simm"))
    holders, spaces = Holders(), Spaces()
    texts = ["", "a", "b"]
    for number in range(300):
        space = Space(*(rng.choice(texts) for _ in range(4)), rng.choice([1, 2]))
        holder = Holder(number, source, space, rng.randrange(2), rng.randrange(2), rng.choice(texts))
        if holder.name not in holders:
            holders.add(holder)
            spaces.add(holder)
        elif rng.random() < 0.5:
            spaces.remove(holders[holder.name])
            holders.remove(holders[holder.name])
        model, lora, tenant, salt, owner = (rng.choice([None, *texts]) for _ in range(5))
        where = Where(model=model, lora=lora, tenant=tenant, salt=salt, owner=owner, group=rng.randrange(2))
        mine = {
            each for each in holders.values()
            if each.space.agrees(where) and owner in (None, each.node) and (each.rank, each.group) == (0, where.group)
        }  # fmt: skip
        assert set(holders.meant(where, 0)) == mine
        sizes = {each.space.block_size for each in holders.values() if each.space[::2][:2] == ("a", "b")}
        assert spaces.sizes("a", "b") == sizes
    for holder in list(holders.values()):
        holders.remove(holder)
    assert not holders and not holders._tree


def test_a_removal_looks_at_no_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each went through all that its store had: the tenants of a host cost milliseconds for each removal."""
    index = Blocks()
    source = index.register(Registration("s", MODEL, "simm"))
    tenants = [f"t-{number}" for number in range(256)]
    event = {"seq_hashes": [7], "medium": "STORAGE", "block_size": 1, "backend_id": "h"}
    apply(index, source, *({**event, "event_type": "stored", "tenant_id": tenant} for tenant in tenants))
    assert source.blocks == len(tenants)
    looks = []
    agrees = Space.agrees
    monkeypatch.setattr(Space, "agrees", lambda space, where: looks.append(space) or agrees(space, where))
    apply(index, source, *({**event, "event_type": "removed", "tenant_id": tenant} for tenant in tenants))
    assert source.blocks == 0 and len(looks) == len(tenants)


@pytest.mark.parametrize("name", ["tenant_id", "backend_id", "model_name", "additional_salt"])
def test_a_field_that_is_empty_says_nothing(name: str) -> None:
    """What was stored so was that of the registration, and what was removed so was nobody's: it counted for good."""
    index = Blocks()
    source = index.register(Registration("s", MODEL, "mooncake", 1, tenant="t", salt="w8", node="h"))
    event = {"seq_hashes": [7], "medium": "CPU", name: ""}
    apply(index, source, {**event, "event_type": "stored", "block_size": 1})
    assert source.blocks == 1 and next(iter(source.holders))[3] == "h"
    apply(index, source, {**event, "event_type": "removed"})
    assert source.blocks == 0


class Name(str):
    """A text that counts comparisons with it."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_candidates_are_not_gone_through_for_each_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Blocks()
    names = [f"pod-{number}" for number in range(100)]
    for name in names:
        apply(index, engine(index, name), stored([1], TOKENS))
    monkeypatch.setattr(Name, "compared", 0)
    matches = asked(index, TOKENS, endpoints=[Name(each) for each in reversed(names)]).matches
    assert set(matches) == set(names) and Name.compared <= 4 * len(names)


def test_a_question_looks_at_no_other_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Blocks()
    source, other = engine(index), index.register(Registration("B", "other", block_size=SIZE))
    apply(index, source, *map(salted, range(3)))
    apply(index, other, *map(salted, range(3)), salted(3, model_name=MODEL))

    def refuse(_: object) -> Any:
        raise AssertionError("all of them were looked at")

    for kind in (Spaces, Holders):
        for name in ("__iter__", "items", "values", "keys"):
            monkeypatch.setattr(kind, name, refuse, raising=False)
    asks = {"model": MODEL, "token_ids": TOKENS, "cache_salt": "user-3"}
    assert set(Service(index).query(asks)["default"]) == {"B"}
    assert set(Service(index).score({**asks, "block_size": SIZE})["with_pool"]) == {"A", "B"}
