"""The replay of ``simm bench --trace`` on a store in this process: what it counts, and what it reports."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from simm.constants import SLAB_BYTES
from simm.errors import UsageError
from simm.slab import Allocator
from simm.tools.bench import replay
from simm.tools.bench.replay import Found, Replay, asks_for_replay, blocks_in, lines_of, room_for, value_of
from simm.tools.bench.report import Progress
from simm.traces.cache import Cache
from simm.traces.formats import Request, Trace
from simm.traces.generate import generate
from simm.traces.queues import Fifo, Lru, Unbounded
from simm.traces.simulate import simulate


class FakeStore:
    """Client and reader in one: a simulated cache with the values beside it. ``after_put`` may do harm."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.numbers: dict[str, int] = {}
        self.values: dict[int, bytes] = {}
        self.refuse: set[int] = set()
        self.lost: set[int] = set()

    def _number(self, key: str) -> int:
        return int(key.split("/")[1], 16)

    def _has(self, key: str) -> bool:
        return self._number(key) in self.cache and self._number(key) not in self.lost

    def digest(self, key: str) -> bytes:
        return key.encode()

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        return [self._has(key) for key in keys]

    def slots_of_many(self, digests: Sequence[bytes]) -> list[int]:
        return [0 if self._has(digest.decode()) else -1 for digest in digests]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        for key in keys:
            self.cache.hit(self._number(key))
        return [self.values[self._number(key)] for key in keys]

    def put_many(self, keys: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        done = []
        for key, value in zip(keys, values):
            number = self._number(key)
            done.append(number not in self.refuse)
            if done[-1]:
                self.cache.put(number, 1)
                self.values[number] = value
        return done


def played(trace: Trace, store: Any, counted_from: int = 0, speed: float = 0.0) -> Found:
    return Replay(trace, store, store, 64).run(counted_from, speed, Progress(io.StringIO()))


@pytest.mark.parametrize("kind", ["system", "chat", "agents", "scans"])
@pytest.mark.parametrize(("name", "make"), [("lru", Lru), ("fifo", Fifo), ("unbounded", Unbounded)])
def test_a_replay_counts_what_the_simulation_counts(kind: str, name: str, make: Any) -> None:
    trace = generate(kind, 4, 300)
    found = played(trace, FakeStore(make(400)), counted_from=50)
    (outcome,) = simulate(trace, 400, [name], counted_from=50)
    assert (found.requests, found.blocks, found.tokens) == (outcome.requests, outcome.blocks, outcome.tokens)
    assert (found.hit_blocks, found.hit_tokens) == (outcome.hit_blocks, outcome.hit_tokens)
    assert found.hit_blocks > 0 and (found.gone, found.wrong, found.refused) == (0, 0, 0)
    # FIFO evicts the blocks that a request has just found for those that it puts.
    assert found.not_whole == 0 or name == "fifo"
    assert found.stored == (trace.distinct if name == "unbounded" else 400)


@pytest.fixture
def twice() -> Trace:
    return Trace("t", tuple(Request(at, 64, (1, 2, 3, 4)) for at in (0, 30)), 16)


def test_a_lost_prefix_is_counted(twice: Trace) -> None:
    store = FakeStore(Unbounded(9))
    store.lost = {2}
    found = played(twice, store)
    assert (found.put, found.not_whole, found.lost_blocks) == (2, 2, 6)
    assert (found.hit_blocks, found.hit_tokens) == (1, 16)


def test_what_is_refused_is_counted_and_no_lost_prefix(twice: Trace) -> None:
    store = FakeStore(Unbounded(9))
    store.refuse = {3}
    found = played(twice, store)
    assert (found.refused, found.put, found.not_whole, found.hit_blocks) == (2, 0, 0, 2)


def test_a_wrong_value_is_counted(twice: Trace) -> None:
    class Wrong(FakeStore):
        def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            _, *rest = super().get_many(keys)
            return [value_of(9, 64), *rest]

    assert played(twice, Wrong(Unbounded(9))).wrong == 1


def test_a_value_that_goes_before_it_is_read_is_a_miss(twice: Trace) -> None:
    class Gone(FakeStore):
        def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            return [None if key.endswith("/3") else value for key, value in zip(keys, super().get_many(keys))]

    found = played(twice, Gone(Unbounded(9)))
    assert (found.gone, found.hit_blocks, found.wrong) == (2, 2, 0)


def test_requests_wait_for_their_time(twice: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(replay.time, "monotonic", lambda: 100.0 + sum(waits))
    monkeypatch.setattr(replay.time, "sleep", waits.append)
    found = played(twice, FakeStore(Unbounded(9)), speed=3.0)
    assert waits == [pytest.approx(0.01)] and found.late == pytest.approx(0)


@pytest.mark.parametrize("value_bytes", [64, 1000, 4096, 100_000, 131_072, 200_000, 1 << 20])
def test_blocks_in_is_what_the_allocator_holds(value_bytes: int) -> None:
    allocator = Allocator(4 * SLAB_BYTES)
    count = 0
    while allocator.alloc(value_bytes) >= 0:
        count += 1
    assert blocks_in(4 * SLAB_BYTES, value_bytes) == count


@pytest.mark.parametrize("room", [1, 7, 48, 100, 333, 1000, 3000, 11_200, 30_000, 123_456])
def test_the_room_is_near(room: int) -> None:
    found = room_for(room)
    assert abs(found.blocks - room) <= 0.03 * room
    assert found.slots >= 2 * found.blocks and found.arena_bytes % SLAB_BYTES == 0
    assert found.arena_bytes < 8 * SLAB_BYTES + 1.2 * 8192 * room


def test_the_room_with_a_size_is_whole_slabs() -> None:
    assert room_for(11_200, 4096).blocks == 11_264
    assert room_for(1000, 1 << 20).blocks == 1000
    assert room_for(10, 4096).blocks == 3 * 512  # the smallest arena
    with pytest.raises(UsageError, match="--room 0"):
        room_for(0)


def test_values_of_blocks_differ() -> None:
    assert len({value_of(block, 64) for block in range(1000)}) == 1000
    assert all(len(value_of(5, size)) == size for size in (8, 9, 64, 100))


def test_the_report() -> None:
    trace = Trace("a.jsonl", (Request(0, 40, (1, 2)), Request(1, 40, (2, 3))), 16)
    found = Found(requests=1, blocks=4, hit_blocks=1, tokens=80, hit_tokens=16, put=2, not_whole=1, lost_blocks=2)
    text = "\n".join(lines_of(trace, room_for(1000, 4096), 1000, "fifo", found, simulate(trace, 9, ["lru"])))
    assert "a.jsonl: 2 requests, 4 blocks of 16 tokens, 3 distinct" in text
    assert "1 blocks follow another block than before" in text
    assert "room for 1,536 blocks (1,000 asked for) of 4,096 bytes" in text
    assert "counted: the last 1 requests" in text
    assert "SiMM, fifo              0.2500  0.2000\n  lru                   0.2500  0.2000" in text
    assert "not whole after a put that was ok: 1 of 2 (2 blocks)" in text


@pytest.mark.parametrize(
    ("argv", "replays"),
    [(["--trace", "x"], True), (["--trace=x"], True), (["--generate", "chat"], True), (["get", "--size", "4K"], False)],
)
def test_the_command_line_tells_a_replay(argv: list[str], replays: bool) -> None:
    assert asks_for_replay(argv) is replays


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "mru"], "--policy mru: lru, reuse, fifo"),
        (["--simulate", "lru,mru"], "'mru' is no simulated policy"),
        (["--room", "0"], "--room 0: 1 at least"),
        (["--speed", "-1"], "--speed is positive"),
        (["--count-from", "1"], "--count-from a share"),
        (["--value-size", "4"], "a value has 8 to"),
        (["--requests", "0"], "--requests 0: 1 at least"),
        (["--generate", "web"], "'web' is no kind of trace"),
    ],
)
def test_bad_words_are_told_before_a_cluster_starts(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LocalCluster", lambda **_: pytest.fail("a cluster was started"))
    with pytest.raises(UsageError) as caught:
        replay.main(["--generate", "chat", "--room", "100", *argv])
    assert message in str(caught.value)


def test_a_live_cluster_cannot_be_named() -> None:
    with pytest.raises(SystemExit) as caught:
        replay.main(["--generate", "chat", "--room", "100", "--manager", "127.0.0.1:1"])
    assert caught.value.code == 2
