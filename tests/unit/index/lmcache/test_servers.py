"""LMCache's servers against a naive model of them: what the index says of prompts is so, whatever gets lost."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module
from simm.index.blocks import Blocks
from simm.index.keys import request_keys
from simm.index.lmcache import placements
from simm.index.lmcache import servers as servers_module
from simm.index.lmcache.hashes import name_of, namers
from simm.index.lmcache.servers import LEASE_S, SETTLED, Servers
from simm.index.scores import Scores, score
from simm.index.sources import Registration, Space
from simm.index.table import Table
from tests.support.clock import Clock
from tests.support.dose import dose
from tests.support.lmcache_server import HASHES, PROMPTS, SIZE, WORLDS, Model, Part, batch, body, entry, key

(NAMER,) = namers("sha256_cbor")
SALTS = ("", "s")



def _asked(index: Blocks, prompt: int, salt: str = "", model: str = "m", size: int = SIZE) -> Scores:
    tokens = PROMPTS[prompt]
    space = Space(model, "", "default", salt, size)
    return score(index, space, request_keys(tokens, size), names=[NAMER(tokens, size)])


def _blocks(index: Blocks, name: str, prompt: int = 0, **where: Any) -> int:
    match = _asked(index, prompt, **where).matches.get(name)
    return match.blocks if match else 0


def _in(index: Blocks, name: str, tier: str, prompt: int = 0, **where: Any) -> int:
    match = _asked(index, prompt, **where).matches.get(name)
    return match.tiers[tier] if match else 0


# -- the naive model -----------------------------------------------------------------------------------


class World:
    """Some servers, their backend, and the index they tell of it.

    ``trouble``: how often something goes wrong.
    """

    def __init__(self, seed: int, trouble: float) -> None:
        self.trouble = trouble
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.index = Blocks()
        self.servers = Servers(self.index, clock=self.clock)
        self.shared: set[Any] = set()
        self.models = [Model(name, self.rng, self.shared) for name in ("a", "b", "c")]
        self.sent: list[bytes] = []
        self.false = self.exact = self.pooled = 0
        for model in self.models:
            model.begin(heard=True)
            self.register(model)

    def register(self, model: Model) -> None:
        self.servers.register({"instance_id": model.name, "ip": "10.0.0.1", "http_port": 80})

    def step(self) -> None:
        rng = self.rng
        model = rng.choice(self.models)
        chance = rng.random() if rng.random() < self.trouble else rng.uniform(0.03, 1.0)
        if chance < 0.01:
            model.begin(heard=False)  # it was killed: what it had not told is lost
            if rng.random() < 0.5:
                self.register(model)
        elif chance < 0.02:
            self.servers.deregister(model.name)
            model.flush()
            if model.flight is not None:  # LMCache says that it ends, and then what it had not told
                self.servers.events(model.flight)
            model.begin(heard=True)
            self.register(model)
        elif chance < 0.03:
            self.clock.now += 2 * LEASE_S
            silent = rng.choice([*self.models, None])
            for each in self.models:
                if each is not silent:
                    self.servers.heartbeat(each.name)
            self.servers.expire()
        elif chance < 0.5:
            model.act()
        elif chance < 0.7:
            model.flush()
        elif chance < 0.74 and self.sent:
            self.servers.events(rng.choice(self.sent[-3:]))  # once more
        elif model.flight is not None:
            if rng.random() >= 0.04 * self.trouble:
                self.deliver(model)
            else:
                model.flight, model.missed = None, True
        if rng.random() < 0.04:
            self.quieten()
        if rng.random() < 0.3:
            self.check()

    def quieten(self) -> None:
        """Let everything arrive that has happened, and something that shows what was lost."""
        self.rng.shuffle(self.models)
        for model in self.models:
            model.act()
            for _ in range(2):
                if model.flight is not None:
                    self.deliver(model)
                model.flush()

    def deliver(self, model: Model) -> None:
        assert model.flight is not None
        self.servers.events(model.flight)
        self.sent.append(model.flight)
        model.flight, model.missed = None, False

    def check(self) -> None:
        heard = [model for model in self.models if model.heard]
        if not heard:
            return
        for prompt in range(len(PROMPTS)):
            for salt in SALTS:
                found = _asked(self.index, prompt, salt)
                for model in heard:
                    self._check(model, found, prompt, salt)
                for world in WORLDS if len(heard) == len(self.models) else ():
                    match = found.matches.get(f"pool:lmcache:s3:{world}")
                    if match is not None:
                        self.false += match.blocks > self.models[0].whole(prompt, world, salt, self.shared)
                        self.pooled += match.blocks > 0

    def _check(self, model: Model, found: Scores, prompt: int, salt: str) -> None:
        match = found.matches.get(model.name)
        server = self.servers._servers.get(model.name)
        knows = server is not None and server.complete
        for world in WORLDS:
            claimed = match.ranks.get(world, 0) if match is not None else 0
            self.false += claimed > model.whole(prompt, world, salt, model.memory, model.disk)
            if knows:  # of the memory, as the disk has more than this process has told
                self.exact += 1
                self.false += claimed < model.whole(prompt, world, salt, model.memory)


def _drive(seed: int, trouble: float = 1.0, steps: int = 400) -> World:
    world = World(seed, trouble)
    for _ in range(steps):
        world.step()
    return world


@pytest.mark.parametrize("trouble", [1.0, 0.1])
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_nothing_is_claimed_that_is_not_so(seed: int, trouble: float) -> None:
    world = _drive(seed, trouble)
    assert world.false == 0 and world.exact > 50


def test_what_is_shared_is_found_too() -> None:
    assert any(_drive(seed, 0.1).pooled for seed in range(3))


@pytest.mark.parametrize(
    ("owner", "name", "broken", "trouble"),
    [
        (Servers, "_lose", lambda servers, server: None, 1.0),
        (Servers, "_forget_pools", lambda servers: None, 1.0),
        (Servers, "_settled", lambda servers, server, place, each: True, 1.0),
        (placements.Placements, "delete", lambda mine, each, place: None, 0.1),
    ],
)
def test_mutation_what_the_model_finds(
    owner: Any, name: str, broken: Any, trouble: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    # The last ones find those that most do not.
    assert any(_drive(seed, trouble).false for seed in (8, 7, 6, 5, 4, 3, 2, 1, 0))


# -- one thing at a time -------------------------------------------------------------------------------


def _parts(prompt: int = 0, world: int = 1, ranks: Any = None, chunks: Any = range(3), **fields: Any) -> list[Part]:
    ranks = range(world) if ranks is None else ranks
    return [Part(prompt, chunk, "m", fields.get("salt", ""), world, rank) for rank in ranks for chunk in chunks]


def _store(seq: int, parts: list[Part] | None = None, name: str = "a", **fields: Any) -> dict[str, Any]:
    return batch(name, seq, "store", [entry(each) for each in parts or _parts()], **fields)


def _delete(seq: int, parts: list[Part] | None = None, name: str = "a", **fields: Any) -> dict[str, Any]:
    return batch(name, seq, "delete", [{"key": key(each)} for each in parts or _parts()], **fields)


def _servers(**options: Any) -> tuple[Blocks, Servers]:
    index = Blocks()
    return index, Servers(index, **options)


def _take(servers: Servers, *batches: dict[str, Any]) -> tuple[int, int, int]:
    found = servers.events(body(*batches))
    return found["applied"], found["duplicates"], found["stale"]


def test_tiers() -> None:
    index, servers = _servers()
    disk: dict[str, Any] = {"tier": "l2", "backend": "fs"}
    assert _take(servers, _store(1), _store(2, **disk)) == (2, 0, 0)
    assert (_in(index, "a", "cpu"), _in(index, "a", "storage")) == (3, 3)
    _take(servers, _delete(3, _parts(chunks=[1])))
    assert (_in(index, "a", "cpu"), _in(index, "a", "storage"), _blocks(index, "a")) == (1, 3, 3)
    _take(servers, _delete(4, _parts(chunks=[1]), **disk))
    assert _blocks(index, "a") == 1
    _take(servers, _store(5, _parts(chunks=[1]), backend="devdax"), _delete(6, _parts(chunks=[1])))
    assert _in(index, "a", "cpu") == 3, "it was never in dram again, and is in the other memory"


def test_all_ranks_and_groups_are_needed() -> None:
    index, servers = _servers()
    _take(servers, _store(1, _parts(world=2, ranks=[0])))
    assert _blocks(index, "a") == 0
    _take(servers, _store(2, _parts(world=2, ranks=[1]), tier="l2", backend="fs"))
    assert (_in(index, "a", "cpu"), _in(index, "a", "storage")) == (0, 3), "one half has to come from the disk"
    _take(servers, _store(3, _parts(world=2, ranks=[1])))
    assert _in(index, "a", "cpu") == 3
    other = [{**each, "key": {**each["key"], "object_group_id": 1}} for each in
             (entry(part) for part in _parts(world=2, chunks=[0]))]  # fmt: skip
    _take(servers, batch("a", 4, "store", other))
    assert _in(index, "a", "cpu") == 1, "the model has another group, of one chunk"
    _take(servers, batch("a", 5, "delete", [{"key": other[1]["key"]}]))
    assert _blocks(index, "a") == 0


def test_groups_are_those_of_a_model_with_any_salt() -> None:
    """Another user's prompts need the same layers, and it is known before that user's first parts are there."""
    index, servers = _servers()

    def groups(seq: int, salt: str, *numbers: int) -> dict[str, Any]:
        entries = [entry(each) for each in _parts(salt=salt) for _ in numbers]
        for at, each in enumerate(entries):
            each["key"]["object_group_id"] = numbers[at % len(numbers)]
        return batch("a", seq, "store", entries)

    _take(servers, groups(1, "", 0), groups(2, "s", 0))
    assert (_blocks(index, "a"), _blocks(index, "a", salt="s")) == (3, 3), "the model seems to have one"
    _take(servers, groups(3, "s", 1))
    assert (_blocks(index, "a"), _blocks(index, "a", salt="s")) == (0, 3)
    _take(servers, groups(4, "t", 0))
    assert _blocks(index, "a", salt="t") == 0
    _take(servers, groups(5, "t", 1), groups(6, "", 1))
    assert (_blocks(index, "a"), _blocks(index, "a", salt="t")) == (3, 3)


def test_ranks_in_a_form_that_no_engine_asks_for_are_not_counted() -> None:
    index, servers = _servers()
    made = [entry(each) for each in _parts()]
    for each, rank in zip(made, (0, 1 << 24 | 1 << 8 | 1, 1 << 24 | 2 << 16 | 1 << 8)):
        each["key"]["kv_rank"] = rank
    _take(servers, batch("a", 1, "store", made))
    (source,) = index.sources.values()
    assert source.blocks == 0 and source.ignored == {"a rank that no engine asks for": 3} and not source.lost


def test_prompts_that_begin_alike() -> None:
    index, servers = _servers()
    _take(servers, _store(1))
    assert (_blocks(index, "a", 0), _blocks(index, "a", 1), _blocks(index, "a", 2)) == (3, 1, 0)
    by_hash = score(index, Space("m", "", "default", "", SIZE), [name_of(each) for each in HASHES[0]])
    assert by_hash.matches["a"].blocks == 3
    for other in ({"salt": "s"}, {"model": "other"}):
        assert _blocks(index, "a", **other) == 0
    assert NAMER([1 << 40], 1) and namers("sha256")[0]([1 << 31] * 4, 4) == []


def test_a_gap_forgets_all_that_a_server_has() -> None:
    index, servers = _servers()
    _take(servers, _store(1), batch("b", 1, "store", [entry(each) for each in _parts()]))
    assert _take(servers, _store(3, _parts(chunks=[0]))) == (1, 0, 0)
    assert (_blocks(index, "a"), _blocks(index, "b")) == (1, 3), "what came since is true"
    found = _asked(index, 0)
    assert found.stale == ["a"]
    _take(servers, _store(4, _parts(chunks=[1, 2])))
    assert _blocks(index, "a") == 3 and _asked(index, 0).stale == ["a"], "never more than partly"
    _take(servers, _store(1, _parts(chunks=[0]), incarnation=2))
    assert _blocks(index, "a") == 1 and _asked(index, 0).stale == []


def test_another_process_has_nothing_of_the_one_before() -> None:
    index, servers = _servers()
    _take(servers, _store(1, incarnation=5), _store(2, tier="l2", backend="fs", incarnation=5))
    assert _take(servers, batch("a", 1, "config", [], incarnation=7)) == (1, 0, 0)
    assert _blocks(index, "a") == 0
    assert _take(servers, _store(3, incarnation=5), _store(9, incarnation=6)) == (0, 0, 2)
    assert _blocks(index, "a") == 0


def test_a_new_process_whose_clock_was_put_back() -> None:
    """Its number is less than that of the one before, whose memory is gone. Its heartbeats keep the lease."""
    index, servers = _servers()
    servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    _take(servers, _store(1, incarnation=9))
    servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    assert _take(servers, batch("a", 1, "config", [], incarnation=8)) == (0, 0, 1)
    assert _blocks(index, "a") == 0 and _asked(index, 0).stale == ["a"]
    assert _take(servers, _store(2, incarnation=9)) == (1, 0, 0) and _blocks(index, "a") == 3
    assert _take(servers, _store(1, incarnation=10)) == (1, 0, 0) and _asked(index, 0).stale == []


def test_the_first_batch_once_more_after_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "DIGESTS_MAX", 4)
    index, servers = _servers()
    first = _store(1)
    _take(servers, first, _delete(2), *(batch("a", seq, "access", []) for seq in range(3, 10)))
    assert _take(servers, first) == (0, 1, 0) and _blocks(index, "a") == 0, "it was deleted since"
    assert _take(servers, _store(1, ts=2.0)) == (1, 0, 0) and _blocks(index, "a") == 3, "another process"


def test_two_processes_of_one_second() -> None:
    index, servers = _servers()
    _take(servers, _store(1), _store(2))
    assert _take(servers, _store(1), _store(2)) == (0, 2, 0), "the same bytes"
    assert _blocks(index, "a") == 3
    assert _take(servers, _store(1, _parts(chunks=[0]), ts=9.0)) == (1, 0, 0)
    assert _blocks(index, "a") == 1 and _asked(index, 0).stale == []
    _take(servers, _store(2, ts=9.0), _store(3, ts=9.0))
    assert _take(servers, _store(2, ts=11.0)) == (0, 0, 1), "a new process, or an old batch: it is not believed"
    assert _blocks(index, "a") == 0 and _asked(index, 0).stale == ["a"]
    assert _take(servers, _store(3, ts=11.0)) == (1, 0, 0)
    assert _blocks(index, "a") == 3 and _asked(index, 0).stale == ["a"]


def test_a_server_that_is_silent() -> None:
    clock = Clock()
    index, servers = _servers(clock=clock)
    servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    _take(servers, _store(1), batch("b", 1, "store", [entry(each) for each in _parts()]))
    for _ in range(3):
        clock.now += 0.9 * LEASE_S
        assert servers.heartbeat("b")
        servers.expire()
    assert (_blocks(index, "a"), _blocks(index, "b")) == (0, 3) and not servers.heartbeat("a")
    servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    assert _take(servers, _store(1)) == (0, 0, 1), "once more"
    _take(servers, _store(2, _parts(chunks=[0])))
    assert _blocks(index, "a") == 1
    assert not servers._servers["a"].complete


def test_a_server_that_ends_tells_the_rest_afterwards() -> None:
    index, servers = _servers()
    assert servers.register({"instance_id": " a ", "ip": "h", "http_port": 1}) == {
        "instance_id": "a", "re_registered": False
    }  # fmt: skip
    assert servers.register({"instance_id": "a", "ip": "h", "http_port": 1})["re_registered"]
    _take(servers, _store(1))
    servers.deregister("a")
    servers.deregister("nobody")
    assert _take(servers, _store(1, name="nobody")) == (0, 0, 1)
    assert _take(servers, _store(2)) == (0, 0, 1) and _blocks(index, "a") == 0 and not servers._servers
    assert _take(servers, _store(1, incarnation=2)) == (0, 0, 1), "it has to register first"
    servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    assert _take(servers, _store(2), _store(1, incarnation=2)) == (1, 0, 1) and _blocks(index, "a") == 3
    assert servers.register({"ip": "h", "http_port": 1})["instance_id"].startswith("mp-")


@pytest.mark.parametrize("incarnation", [7, 6])
def test_a_process_that_seems_to_be_over_and_goes_on(incarnation: int) -> None:
    """Another one of its name has ended, or its clock was put back. It counts as one that is joined late."""
    index, servers = _servers()
    said = {"instance_id": "a", "ip": "h", "http_port": 1}
    _take(servers, _store(1, incarnation=7))
    servers.deregister("a")
    assert not servers.heartbeat("a")
    servers.register(said)
    for _ in range(2):
        assert _take(servers, *(_store(seq, incarnation=incarnation) for seq in (2, 3))) == (0, 0, 2)
    for seq in range(4, 2 + SETTLED + 1):
        assert _take(servers, _store(seq, incarnation=incarnation)) == (0, 0, 1), "its last request may be that late"
        assert _take(servers, _store(seq, incarnation=incarnation)) == (0, 0, 1), "once more"
    assert _blocks(index, "a") == 0
    last = 2 + SETTLED + 1
    assert _take(servers, _store(last, _parts(chunks=[0]), incarnation=incarnation)) == (1, 0, 0)
    assert _blocks(index, "a") == 1 and not servers._servers["a"].complete
    assert _take(servers, _store(last + 1, incarnation=incarnation)) == (1, 0, 0) and _blocks(index, "a") == 3


POOL: dict[str, Any] = {"tier": "l2", "backend": "s3", "shared": True}


@pytest.mark.parametrize("where", [{}, POOL], ids=["own", "shared"])
def test_a_batch_that_cannot_be_applied_is_lost(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks counted until the server's process ended, and the server was complete."""
    index, servers = _servers()
    name = "pool:lmcache:s3:1" if where else "a"
    seq = _settle(servers, "a", 1)
    _take(servers, _store(seq, **where))
    assert _blocks(index, name) == 3 and not _asked(index, 0).stale

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Blocks, "apply", refuse)
        patched.setattr(blocks_module, "DEAD_MAX", 0)
        patched.setattr(Table, "rebuild", refuse)  # nor is there any to sweep what is forgotten
        with pytest.raises(MemoryError):
            _take(servers, _delete(seq + 1, **where))
    server = servers._servers["a"]
    assert _blocks(index, name) == 0 and not server.complete and server.source.lost
    assert _take(servers, _store(seq + 2)) == (1, 0, 0)
    assert _blocks(index, "a") == 3 and _asked(index, 0).stale == ["a"], "what comes counts"


def _settle(servers: Servers, name: str, seq: int) -> int:
    """Let a server send as many requests as it takes until it is believed. Return its next number."""
    for _ in range(SETTLED):
        _take(servers, batch(name, seq, "access", []))
        seq += 1
    return seq


def test_what_servers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    index, servers = _servers()
    seq = _settle(servers, "a", 1)
    _take(servers, _store(seq, **POOL))
    found = _asked(index, 0)
    assert found.matches["pool:lmcache:s3:1"].tiers["storage"] == 3 and "a" not in found.matches
    other = _settle(servers, "b", 1)
    _take(servers, _store(other, _parts(chunks=[0]), name="b"))
    assert _asked(index, 0).with_pool == {"a": 1.5, "b": pytest.approx(1.8)}, "all can load it"
    _take(servers, _delete(other + 1, _parts(chunks=[1]), name="b", **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 1, "what one removes is gone for all"
    seq += 1
    _take(servers, _store(seq, _parts(chunks=[1]), **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 1, "it may have been stored before"
    seq = _settle(servers, "a", seq + 1)
    _take(servers, _store(seq, _parts(chunks=[1]), **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 3
    _take(servers, _store(other + 5, name="b"))
    assert _blocks(index, "pool:lmcache:s3:1") == 0, "b may have removed some of it"
    seq = _settle(servers, "a", seq + 1)
    _take(servers, _store(seq, **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 3
    servers.deregister("b")
    assert _blocks(index, "pool:lmcache:s3:1") == 0
    seq = _settle(servers, "a", seq + 1)
    _take(servers, _store(seq, **POOL), _delete(7, name="b", **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 0, "b has removed before it ended"
    seq = _settle(servers, "a", seq + 1)
    monkeypatch.setattr(servers_module, "SERVERS_MAX", 1)
    _take(servers, _store(seq, **POOL), _store(1, name="d", **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 3
    assert _take(servers, _delete(2, name="d", **POOL)) == (0, 0, 1), "too many servers"
    assert _blocks(index, "pool:lmcache:s3:1") == 0


def test_chunks_of_a_size_that_is_not_told() -> None:
    silent = [entry(each, tokens=False) for each in _parts()]
    index, servers = _servers()
    _take(servers, batch("a", 1, "store", silent))
    (source,) = index.sources.values()
    assert _blocks(index, "a") == 0 and source.ignored["no block size"] == 3
    _take(servers, _store(2, _parts(chunks=[2])), batch("a", 3, "store", silent))
    assert _blocks(index, "a") == 3
    index, servers = _servers(size=SIZE)
    _take(servers, batch("a", 1, "store", silent))
    assert _blocks(index, "a") == 3
    wrong = entry(_parts(prompt=2)[0]) | {"token_ids": [1] * 8}
    _take(servers, batch("a", 2, "store", [wrong]))
    assert _blocks(index, "a") == 0 and _asked(index, 0).stale == ["a"]


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "SERVERS_MAX", 2)
    monkeypatch.setattr(servers_module, "ENTRIES_MAX", 5)
    monkeypatch.setattr(servers_module, "REMOVALS_MAX", 2)
    monkeypatch.setattr(servers_module, "DIGESTS_MAX", 4)
    index, servers = _servers()
    _take(servers, _store(1), _store(2, _parts(prompt=2)))
    assert (_blocks(index, "a"), _blocks(index, "a", 2)) == (3, 2)
    assert next(iter(index.sources.values())).ignored["too many blocks"] == 1
    assert _take(servers, _store(1, name="b"), _store(1, name="c")) == (1, 0, 1)
    for number in range(3, 20):
        _take(servers, _delete(number, **POOL))
    server = servers._servers["a"]
    assert len(server.digests) == 4 and len(servers._removals) == 2 and servers._floor > 0
    assert _take(servers, _delete(3, **POOL)) == (0, 0, 1), "too long ago to know that it is the same"


def test_families_and_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "FAMILIES_MAX", 2)
    monkeypatch.setattr(placements, "PLACES_MAX", 2)
    index, servers = _servers()
    for number, salt in enumerate(("1", "2", "3")):
        _take(servers, _store(number + 1, _parts(salt=salt)))
    server = servers._servers["a"]
    assert [_blocks(index, "a", salt=salt) for salt in ("1", "2", "3")] == [0, 3, 3], "the latest count"
    assert server.source.ignored == {"too many salts": 1} and not server.complete
    _take(servers, _store(4, _parts(chunks=[0], salt="2")), _delete(5, _parts(salt="3")), _store(6, _parts(salt="4")))
    assert [_blocks(index, "a", salt=salt) for salt in ("2", "3", "4")] == [3, 0, 3]
    _take(servers, _store(7, _parts(salt="5")), _delete(8, _parts(salt="4")), _store(9, _parts(salt="3")))
    assert [_blocks(index, "a", salt=salt) for salt in ("2", "3", "4", "5")] == [0, 3, 0, 3]
    assert server.source.ignored == {"too many salts": 2}, "those without chunks go first"
    assert list(server.placements._groups) == [("m", 1)] and index.entries == 6
    for number, backend in enumerate(("x", "y", "z")):
        _take(servers, _store(10 + number, _parts(salt="3"), backend=backend))
    held = server.placements
    assert held.entries == 3 * 3, "dram and one more"
    assert server.source.ignored["too many backends"] == 6
    _take(servers, _delete(13, _parts(salt="3")), _delete(14, _parts(salt="3"), backend="x"))
    _take(servers, _delete(15, _parts(salt="5")))
    assert held.entries == 0 and index.entries == 0


def test_names_of_others_are_refused() -> None:
    from simm.errors import UsageError

    index, servers = _servers()
    index.register(Registration("a", "m", block_size=4, rank=None))
    with pytest.raises(UsageError, match="another publisher"):
        servers.register({"instance_id": "a", "ip": "h", "http_port": 1})
    assert _take(servers, _store(1)) == (0, 0, 1)


class _Unread(OrderedDict[Any, Any]):
    """A dictionary that nobody may look through."""

    def _refuse(self) -> Any:
        raise AssertionError("all families were looked at")

    __iter__ = keys = values = items = _refuse


def test_a_batch_looks_only_at_families_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has hundreds of salts, and a body has thousands of batches."""
    index, servers = _servers()
    seq = _settle(servers, "a", 1)
    _take(servers, _store(seq), _store(seq + 1, **POOL), _store(seq + 2, **{**POOL, "backend": "other"}))
    held = [servers._servers["a"].placements, *(each.placements for each in servers._pools.values())]
    for each in held:
        each._families = _Unread(each._families)
    settled = []
    settle = placements.Placements.settle
    monkeypatch.setattr(placements.Placements, "settle", lambda mine: settled.append(mine) or settle(mine))
    part = _parts(chunks=[2])
    _take(servers, _delete(seq + 3, part), _delete(seq + 4, part, **POOL), _store(seq + 5, part),
          _delete(seq + 6, part))  # fmt: skip
    assert settled == [held[0], held[1], held[0], held[0]], "the other pool has not changed"
    assert [_blocks(index, name) for name in ("a", "pool:lmcache:s3:1", "pool:lmcache:other:1")] == [2, 2, 3]
    _take(servers, _store(seq + 9))
    assert (_blocks(index, "a"), _blocks(index, "pool:lmcache:other:1")) == (3, 0)


class _Counted(OrderedDict[Any, Any]):
    """A dictionary that counts how often somebody looks through it."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_that_there_is_no_room_is_found_out_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "FAMILIES_MAX", 2)
    index, servers = _servers()
    _take(servers, _store(1, _parts(salt="1")), _store(2, _parts(salt="2")))
    held = servers._servers["a"].placements
    held._families = counted = _Counted(held._families)
    _take(servers, _store(3, _parts(salt="3")))
    assert counted.looks == 1
    _take(servers, _delete(4, _parts(salt="1")), _store(5, _parts(salt="3")))
    assert [_blocks(index, "a", salt=salt) for salt in ("1", "2", "3")] == [0, 3, 3]


def test_pools_that_have_nothing_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "POOLS_MAX", 2)
    index, servers = _servers()
    seq = _settle(servers, "a", 1)
    for backend in ("x", "y"):
        _take(servers, _store(seq, **{**POOL, "backend": backend}))
        seq += 1
    _take(servers, _store(seq, **POOL))
    assert _blocks(index, "pool:lmcache:s3:1") == 0 and {each[0] for each in index.sources} == {
        "a", "lmcache:x", "lmcache:y"
    }  # fmt: skip
    _take(servers, _delete(seq + 1, **{**POOL, "backend": "x"}), _store(seq + 2, **POOL))
    assert {each[0] for each in index.sources} == {"a", "lmcache:s3", "lmcache:y"}
    assert (_blocks(index, "pool:lmcache:s3:1"), _blocks(index, "pool:lmcache:y:1")) == (3, 3)
    _take(servers, _delete(seq + 3, **POOL), _delete(seq + 4, **{**POOL, "backend": "y"}))
    seq = _settle(servers, "a", seq + 5)
    many = [entry(each) for world in (1, 2, 3) for each in (*_parts(world=world), *_parts(world=1))]
    _take(servers, batch("a", seq, "store", many, **{**POOL, "backend": "z"}))
    assert {each[::2] for each in index.sources} == {("a", None), ("lmcache:z", 1), ("lmcache:z", 2)}, "both are in use"
    assert {each.source.registration.name for there in index.spaces.values() for each in there.values()} <= set(
        index.sources
    )


def test_too_many_publishers_for_another_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the body is applied."""
    index, servers = _servers()
    seq = _settle(servers, "a", 1)
    monkeypatch.setattr("simm.index.blocks.SOURCES_MAX", 1)
    assert _take(servers, _store(seq, **POOL), _store(seq + 1)) == (2, 0, 0)
    (source,) = index.sources.values()
    assert _blocks(index, "a") == 3 and source.ignored == {"a shared backend: too many": 3}


def test_batches_that_are_not_taken_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers_module, "SERVERS_MAX", 0)
    _, servers = _servers()
    assert _take(servers, *(_store(1, name=str(number)) for number in range(50)))[2] == 50
    assert len(caplog.records) == 2 and "(10 so far)" in caplog.text
