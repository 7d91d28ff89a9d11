"""Publishers with many salts or tenants: the last ones count as the first, and none costs a look at all others."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module
from simm.index import table as table_module
from simm.index.blocks import Blocks
from simm.index.events import Where
from simm.index.keys import request_keys
from simm.index.lmcache import placements as placements_module
from simm.index.lmcache.hashes import namers
from simm.index.lmcache.messages import Entry
from simm.index.lmcache.placements import Placements
from simm.index.lmcache.servers import Servers
from simm.index.scores import score
from simm.index.service import Service
from simm.index.sources import Holder, Holders, Registration, Space, Spaces
from simm.index.table import Table
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


def _salt_of_a_server(number: int) -> Entry:
    return Entry(b"chunk", "m", f"user-{number}", 1, 0, 0, SIZE)


def test_users_that_replace_others_cost_no_look_at_all_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below the bound one went for each that came, and all were looked at for it."""
    looks = []
    for module, kind, bound in (
        (blocks_module, Blocks, "HOLDERS_MAX"), (placements_module, Placements, "FAMILIES_MAX")
    ):  # fmt: skip
        monkeypatch.setattr(module, bound, 64)
        real = kind._make_room
        monkeypatch.setattr(kind, "_make_room", lambda *of, real=real: looks.append(of) or real(*of))
    index, held, place = Blocks(), Placements(), ("l1", "dram")
    source = engine(index)
    apply(index, source, *map(salted, range(63)))
    for number in range(63):
        held.store(_salt_of_a_server(number), SIZE, place)
    for number in range(100):
        apply(index, source, salted(63 + number), removed([number]))
        held.store(_salt_of_a_server(63 + number), SIZE, place)
        held.delete(_salt_of_a_server(number), place)
        held.settle()
    assert 2 <= len(looks) <= 2 * (100 // 4 + 1)
    assert source.blocks >= 58 and held.entries >= 58, "few are forgotten for that"
    assert found(index, 162) and not found(index, 99)


def test_what_is_stored_for_a_known_user_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed then was in no list of what its publisher has, and counted for good."""

    def refuse(*_: object) -> None:
        raise MemoryError

    class Families(OrderedDict[Any, Any]):
        pass

    index, held, place = Blocks(), Placements(), ("l1", "dram")
    source = engine(index)
    apply(index, source, salted(1), salted(2))
    for number in (1, 2):
        held.store(_salt_of_a_server(number), SIZE, place)
    held._families = Families(held._families)
    monkeypatch.setattr(Holders, "__setitem__", refuse)
    monkeypatch.setattr(Families, "__setitem__", refuse)
    apply(index, source, stored([3], prompt(1, 1), cache_salt="user-1"))
    held.store(_salt_of_a_server(1)._replace(digest=b"other"), SIZE, place)
    assert [each.blocks for each in source.holders.values()] == [1, 2]
    assert [each.salt for each in held._families] == ["user-2", "user-1"]
    index.unregister(source.registration.name)
    assert not found(index, 1) and not index.spaces


@pytest.mark.parametrize("kind", [Holders, Spaces])
def test_a_new_user_without_memory_leaves_nothing_that_counts(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    index = Blocks()
    source = engine(index)
    with monkeypatch.context() as patched:
        patched.setattr(kind, "add", refuse)
        with pytest.raises(MemoryError):
            apply(index, source, salted(1))
    apply(index, source, salted(2))
    index.clear(source)
    assert not found(index, 1) and not found(index, 2) and not index.entries
    apply(index, source, salted(2))
    assert found(index, 2) and source.blocks == 1


class Full(dict[Any, Any]):
    """A dictionary without memory for anything new."""

    def __setitem__(self, *_: object) -> None:
        raise MemoryError


def test_a_new_user_of_a_server_without_memory_leaves_nothing_in_the_way() -> None:
    """Each removal of such a salt failed, until that salt was stored again."""
    held, place, one = Placements(), ("l1", "dram"), _salt_of_a_server(1)
    families, held._families = held._families, Full()  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        held.store(one, SIZE, place)
    held._families = families
    held.delete(one, place)
    assert held.settle() == []
    for _ in range(2):
        held.store(one, SIZE, place)
    assert [each.added for each in held.settle()] == [[b"chunk"]]
    held.delete(one, place)
    assert [each.removed for each in held.settle()] == [[b"chunk"]]
    assert [len(each) for each in held._sizes.values()] == [1] and not held.entries


def test_a_part_of_a_server_without_memory_is_forgotten_with_all_others() -> None:
    """It was there again with the next part of its salt, whatever had happened in between."""
    held, place = Placements(), ("l1", "dram")
    held._used = Full()
    with pytest.raises(MemoryError):
        held.store(_salt_of_a_server(1), SIZE, place)
    held.clear()
    held._used = {}
    held.store(_salt_of_a_server(1)._replace(digest=b"other"), SIZE, place)
    assert [each.added for each in held.settle()] == [[b"other"]]


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
        assert set(holders.meant(where, 0)[0]) == mine
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


@pytest.mark.parametrize("pairs", [table_module._PAIRS, 7])
def test_a_removal_that_names_no_salt_is_one_search(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was one for each salt, 75 us each: seconds of a store that evicts."""
    monkeypatch.setattr(table_module, "_PAIRS", pairs)
    index = Blocks()
    source = index.register(Registration("s", MODEL, "mooncake", 1))
    event = {"seq_hashes": [7, 8, 9], "medium": "CPU", "block_size": 1, "event_type": "stored"}
    apply(index, source, *({**event, "additional_salt": f"user-{number}"} for number in range(60)))
    searches = []
    for name in ("find", "find_all"):
        real = getattr(Table, name)
        monkeypatch.setattr(Table, name, lambda *of, real=real: searches.append(of) or real(*of))
    apply(index, source, {"event_type": "removed", "seq_hashes": [9, 7, 9, 1], "medium": "CPU"})
    assert [each.blocks for each in source.holders.values()] == [1] * 60 and source.blocks == index._held.entries == 60
    assert len(searches) == -(-60 // (pairs // 3)), "of three names each"


@pytest.mark.parametrize(
    "name", ["tenant_id", "backend_id", "model_name", "additional_salt", "cache_salt", "lora_name"]
)  # fmt: skip
@pytest.mark.parametrize("last", ["removed", "cleared"])
def test_a_field_that_is_empty_is_as_registered(name: str, last: str) -> None:
    """What was removed so was nobody's, and counted for good; or everybody's, and what others had was forgotten."""
    index = Blocks()
    source = index.register(Registration("s", MODEL, "mooncake", 1, "l", "t", "w8", node="h"))
    event = {"seq_hashes": [7], "medium": "CPU"}
    for said in ("", "another"):
        apply(index, source, {**event, "event_type": "stored", "block_size": 1, name: said})
    mine, other = source.holders
    assert mine == (Space(MODEL, "l", "t", "w8", 1), 0, 0, "h") and source.blocks == 2
    apply(index, source, {**event, "event_type": last, name: ""})
    left = {each.name for each in source.holders.values() if each.blocks}
    assert left == ({other} if last == "removed" or name == "tenant_id" else set())
    apply(index, source, {**event, "event_type": "removed"})
    assert source.blocks == 0, "one that is missing may mean any"


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
