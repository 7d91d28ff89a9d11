"""``benchmarks/peers.py`` on stores in this process: full ones, mixed calls, and stores that lie."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simm

ROOT = Path(simm.__file__).parents[1]
NAMES = ("peers", "peers_desks", "peers_report", "peers_stores", "peers_wire")
SIZE = 4096
ROWS = 64
SHAPE = {"size": SIZE, "rows": ROWS, "singles": 48, "batch": 4, "batches": 12}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("peers")
    for name in NAMES:
        sys.modules.pop(name, None)


class Store:
    """A store of values in this process, least recently used first. ``fault`` says how it lies."""

    name = "store"

    def __init__(self, state: str, fault: str = "") -> None:
        self.state, self.fault = state, fault
        self.memory = 4 * ROWS * SIZE
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.evicted = self.most = 0

    def array(self, nbytes: int) -> None:
        return None

    def adopt(self, array: Any) -> None:
        pass

    def handle(self, row: Any) -> Any:
        return row

    def put(self, key: str, value: Any) -> bool:
        if self.fault == "forgets" and not key.startswith("try"):
            return True
        if self.fault == "refuses" and len(self.values) >= ROWS:
            return False
        self.values[key] = value.tobytes()
        while len(self.values) > self.memory // SIZE and self.fault != "grows":
            self.values.popitem(last=False)
            self.evicted += 1
        self.most = max(self.most, len(self.values))
        return True

    def get_into(self, key: str, into: Any) -> int | None:
        value = self.values.get(key)
        if value is None or (self.fault == "loses" and key.startswith("p")):
            return None
        self.values.move_to_end(key)
        into[:] = np.frombuffer(value, np.uint8)
        if self.fault == "tears" and key.startswith("p"):
            into[-1] ^= 1
        return len(value)

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        return [self.put(key, value) for key, value in zip(keys, values)]

    def mget_into(self, keys: list[str], into: list[Any]) -> list[int | None]:
        return [self.get_into(key, place) for key, place in zip(keys, into)]

    def exists(self, key: str) -> bool:
        return key in self.values or (self.fault == "agrees" and key.startswith("n"))

    def mexists(self, keys: list[str]) -> list[bool]:
        return [self.exists(key) for key in keys]

    def delete_many(self, keys: list[str]) -> None:
        for key in keys:
            self.values.pop(key, None)


ALL = ("get", "put", "mput", "mexists", "mixed", "mmixed")


def measured(peers: Any, store: Store, ops: Sequence[str] = ALL) -> Any:
    arrays = [np.random.default_rng(seed).integers(0, 256, ROWS * SIZE, np.uint8) for seed in range(2)]
    desks = [peers.FloorDesk(0, *arrays), peers.StoreDesk(store, 1, *arrays)]
    run = peers.Bench(desks, store.state, ROWS * SIZE, 2, burst=ROWS * SIZE // 4)
    run.run([SIZE], ops)
    return run


def test_a_full_store_evicts_at_every_put_and_one_with_room_at_none(peers: Any) -> None:
    for state in ("room", "full"):
        store = Store(state)
        run = measured(peers, store)
        assert run.wrong == []
        cells = {(cell.op, cell.peer): cell for cell in run.cells}
        mixed = {f"mixed {part}" for parts in peers.MIXES.values() for part in parts}
        assert {op for op, _ in cells} == {"get", "put", "mput", "mexists"} | mixed
        assert all(cell.served == 1.0 and cell.state == state and cell.failed is None for cell in run.cells)
        assert all(cell.samples > 0 for (_, peer), cell in cells.items() if peer == "store")
        assert cells["mixed get", "memcpy"].samples == cells["mixed get", "store"].samples
        assert cells["mixed exists", "memcpy"].samples == 0
        if state == "room":
            assert store.evicted == 0 and store.values == {}  # what was stored is deleted
        else:
            assert store.most == len(store.values) == store.memory // SIZE and store.evicted > ROWS


@pytest.mark.parametrize(
    ("state", "fault", "text"),
    [
        ("full", "grows", "evicts none"), ("room", "forgets", "missed"), ("room", "tears", "differ"),
        ("room", "agrees", "of a key that was never stored gives True"), ("full", "agrees", "gives True"),
        ("full", "tears", "differ"), ("full", "loses", "missed 16 of 16"), ("room", "refuses", "was refused"),
        ("full", "refuses", "evicts none"),
    ],
)  # fmt: skip
def test_a_store_that_lies_has_no_figures(
    peers: Any, monkeypatch: pytest.MonkeyPatch, state: str, fault: str, text: str
) -> None:
    desks = sys.modules["peers_desks"]
    monkeypatch.setattr(desks, "FILL_SECONDS", 0.2)
    monkeypatch.setattr(desks, "REFUSED_SECONDS", 0.0)
    run = measured(peers, Store(state, fault), ("get", "put", "mixed", "mexists"))
    assert any(text in why for why in run.wrong), run.wrong
    assert any(cell.failed for cell in run.cells if cell.peer == "store")
    assert all(cell.failed is None for cell in run.cells if cell.peer == "memcpy")
    assert "failed" in peers.markdown(run.cells, ["memcpy", "store"])


def test_what_a_full_store_has_evicted_is_told(peers: Any) -> None:
    store = Store("full")
    arrays = [np.random.default_rng(seed).integers(0, 256, ROWS * SIZE, np.uint8) for seed in range(2)]
    desk = peers.StoreDesk(store, 1, *arrays)
    shape = peers.Shape(**SHAPE)
    desk.fill(shape)
    for key in desk._names[: ROWS // 4]:
        del store.values[key]
    found = desk.burst("get", shape, list(range(48)), list(range(48)))["get"]
    assert (found.asked, found.served) == (48, 32)
    cell = peers.summary(peers.Cell("get", SIZE, 1, "store", "full"), [found])
    assert cell.served == 0.6667
    assert "67% served" in peers.markdown([cell], ["store"]) and "## Stores full" in peers.markdown([cell], ["store"])
    # After puts the whole working set is stored again, under new keys.
    names = list(desk._names)
    desk.burst("put", shape, list(range(48)), list(range(48)))
    desk.refresh(shape)
    assert not set(names) & set(desk._names) and all(store.mexists(desk._names))


def test_a_mix_is_the_same_for_all_stores_and_has_each_operation(peers: Any) -> None:
    assert peers.draws("get", 48, 1, 0) == []
    for op, parts in peers.MIXES.items():
        first = peers.draws(op, 300, 4, 1)
        assert first == peers.draws(op, 300, 4, 1) != peers.draws(op, 300, 4, 2)
        assert {part for part, _ in first} == {part for part, _ in peers.draws(op, 3, 4, 0)} == set(parts)
        reads = [there for part, stored in first for there in stored if not part.endswith("put")]
        assert 0.7 < sum(reads) / len(reads) < 0.8 and len(first) == 300


def test_a_full_store_never_held_values_of_another_size(peers: Any) -> None:
    options = peers.parse(["--sizes", "4096,65536", "--ops", "exists,put", "--working-set", "1"])
    assert list(peers.courses(options)) == [
        ("room", [4096, 65536], ["exists", "put"]), ("full", [4096], ["exists", "put"]), ("full", [65536], ["put"]),
    ]  # fmt: skip
    options.ops = ["exists"]
    assert [course[1] for course in peers.courses(options)] == [[4096, 65536], [4096]]


def test_a_store_that_is_not_installed_is_skipped(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with peers.ending_all() as servers:
        for name in ("redis", "memcached"):
            note, desk = peers.open_desk(name, "full", 1, tmp_path, (np.empty(0), np.empty(0)), servers)
            assert desk is None and note.startswith("skipped: not installed: program")


def test_stores_are_told_how_much_they_may_hold(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stores: Any = sys.modules["peers_stores"]
    lines: dict[str, list[str]] = {}

    class Started(Exception):
        pass

    def serve(self: Any, command: list[str], environment: Any = None) -> str:
        lines[f"{self.name} {self.state}"] = command
        raise Started

    monkeypatch.setattr(stores._OnSocket, "_serve", serve)
    for state in ("room", "full"):
        for kind in (stores.Redis, stores.Memcached):
            with pytest.raises(Started):
                kind(tmp_path / f"{kind.name}{state}", 64 << 20, 0, state).start()
    assert "--maxmemory" not in lines["redis room"]
    full = lines["redis full"]
    assert full[full.index("--maxmemory") + 1] == str(64 << 20)
    assert full[full.index("--maxmemory-policy") + 1] == "allkeys-lru" and full[-1] == "--unixsocket"
    assert [lines[f"memcached {state}"][2] for state in ("room", "full")] == ["128", "64"]


@pytest.mark.parametrize("words", [["--states", "half"], ["--ops", "mix"], ["--peers", "nobody"]])
def test_what_is_not_known_is_refused(peers: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peers.parse(words)
    assert ended.value.code == 2 and f"unknown: {words[1]}" in capsys.readouterr().err
