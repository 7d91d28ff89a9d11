"""The pure half of reading by RDMA: addresses against a map of single bytes, and the rule against all histories."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import Hasher, sets_of, shard_of
from simm.arena.layout import ENTRY_BOUND, HEADER_BYTES, SEQ_BITS, SLOT, Geometry
from simm.arena.reader import ArenaReader
from simm.constants import SET_BYTES, SLOT_BYTES, WAYS
from simm.errors import CorruptionError, RemoteProtocolError
from simm.rdma.remote_arena import OP_BYTES_MAX, CachedEntry, Locations, RegionMap, RemoteArena, confirmed
from simm.wire import rdma_messages as R
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.client_checks import check_locations, forget

GEOMETRY = Geometry.plan(16 << 20, 512)
META_END = GEOMETRY.slots_offset + GEOMETRY.sets * SET_BYTES
digest_of = Hasher("remote")


def regions_of(rng: random.Random, *, rail: int = 0, writable: bool = True, pieces: int = 4) -> list[R.RdmaRegion]:
    """An arena cut into pieces at pages and sets, each somewhere else."""
    parts = [(0, GEOMETRY.ledger_offset, 0)]
    parts.append((GEOMETRY.data_offset, GEOMETRY.data_end, R.REGION_WRITABLE if writable else 0))
    parts.append((GEOMETRY.visited_offset, GEOMETRY.size, R.REGION_WRITABLE))
    regions = []
    for start, stop, flags in parts:
        cuts = sorted({rng.randrange(start, stop) // 4096 * 4096 for _ in range(rng.randrange(pieces))} - {start})
        cuts = [cut for cut in cuts if start < cut < stop]
        for low, high in itertools.pairwise([start, *cuts, stop]):
            regions.append(
                R.RdmaRegion(rail, flags, low, high - low, rng.randrange(1, 1 << 40), rng.randrange(1, 1 << 32))
            )
    rng.shuffle(regions)
    return regions


def test_addresses_against_a_map_of_bytes() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        regions = regions_of(rng)
        region_map = RegionMap(GEOMETRY, 0, regions)

        def naive(byte: int, regions: list[R.RdmaRegion] = regions) -> tuple[int, int] | None:
            for region in regions:
                if region.start <= byte < region.start + region.length:
                    return region.address + byte - region.start, region.rkey
            return None

        for _ in range(50):
            start = rng.randrange(GEOMETRY.data_offset, GEOMETRY.data_end)
            length = rng.choice([1, 8, 4096, rng.randrange(1, 5 << 20)])
            length = min(length, GEOMETRY.data_end - start)
            at = start
            for address, rkey, part in region_map.split(start, length, writable=True):
                assert 0 < part <= OP_BYTES_MAX
                assert (address, rkey) == naive(at)
                last = naive(at + part - 1)
                assert last == (address + part - 1, rkey)
                at += part
            assert at == start + length
        for _ in range(50):
            slot = rng.randrange(GEOMETRY.sets) * SET_BYTES + GEOMETRY.slots_offset
            assert region_map.meta(slot, SET_BYTES) == naive(slot) == region_map.at(slot, SET_BYTES)
            word = HEADER_BYTES + 8 * rng.randrange(16_384)
            assert region_map.meta(word, 8) == naive(word)
            visited = GEOMETRY.visited_offset + rng.randrange(GEOMETRY.slots)
            assert region_map.at(visited, 1) == naive(visited)


def test_what_is_in_no_region_or_read_only_is_refused() -> None:
    region_map = RegionMap(GEOMETRY, 0, regions_of(random.Random(1), writable=False))
    with pytest.raises(RemoteProtocolError):
        region_map.split(GEOMETRY.ledger_offset, 8)
    with pytest.raises(RemoteProtocolError):
        region_map.at(GEOMETRY.ledger_offset - 4, 8)
    with pytest.raises(RemoteProtocolError):
        region_map.split(GEOMETRY.size - 4, 8)
    with pytest.raises(RemoteProtocolError):
        region_map.split(GEOMETRY.data_offset, 8, writable=True)
    with pytest.raises(RemoteProtocolError):
        region_map.keyed(-1, 8, 5)
    pieces = region_map.keyed(GEOMETRY.data_offset + 64, OP_BYTES_MAX + 1, 77)
    assert [(rkey, part) for _, rkey, part in pieces] == [(77, OP_BYTES_MAX), (77, 1)]
    assert pieces[0][0] == region_map.at(GEOMETRY.data_offset + 64, 1)[0]


def test_a_chunk_that_would_end_beyond_all_memory_is_refused() -> None:
    """Its first region ends there, so that no device has an address for what follows."""
    meta, data, visited = sorted(regions_of(random.Random(3), pieces=1), key=lambda region: region.start)
    cut = 8 << 20
    last = data._replace(length=cut, address=(1 << 64) - cut)
    rest = data._replace(start=data.start + cut, length=data.length - cut, address=4 << 30)
    region_map = RegionMap(GEOMETRY, 0, [meta, visited, last, rest])
    at = data.start + cut - 4096
    assert region_map.keyed(at, 4096, 7) == [((1 << 64) - 4096, 7, 4096)]
    with pytest.raises(RemoteProtocolError, match="beyond all memory"):
        region_map.keyed(at, 4097, 7)


@pytest.mark.parametrize("number", range(6))
def test_regions_that_are_no_arena(number: int) -> None:
    regions = sorted(regions_of(random.Random(3), pieces=1), key=lambda region: region.start)
    meta, data, visited = regions
    bad = [
        [meta, visited],
        [visited, data],
        [meta, visited, data._replace(start=data.start + 4096, length=data.length - 4096)],
        [meta, visited, data._replace(length=data.length + 1)],
        [meta._replace(length=data.start + 1), visited, data],
        [meta._replace(length=META_END - 4096 - 64), meta._replace(start=META_END - 4096 - 64, length=4096 + 64),
         visited, data],
    ][number]  # fmt: skip
    with pytest.raises(RemoteProtocolError):
        RegionMap(GEOMETRY, 0, bad)
    RegionMap(GEOMETRY, 0, regions)


def image_of(digest: bytes, seq: int, offset: int, length: int, *, flags: int = 0, chunk: int = 0) -> bytes:
    return SLOT.pack(seq, digest, offset, length, 7, chunk or length, 1, flags, 99, 0)


def test_finding_against_a_naive_search() -> None:
    arena = RemoteArena(GEOMETRY, 1, regions_of(random.Random(2)), 1)
    for seed in range(300):
        rng = random.Random(seed)
        digest = digest_of(f"k{seed}")
        slots = []
        for way in range(2 * WAYS):
            if rng.random() < 0.1:
                slots.append(image_of(digest, 4, GEOMETRY.data_offset + way * 64, 64))
            else:  # the digest's bytes, anywhere but at a digest's place
                raw = bytearray(rng.randbytes(SLOT_BYTES))
                at = rng.choice([0, 4, 16, 32, 48])
                raw[at : at + 16] = digest
                slots.append(bytes(raw))
        fetched = rng.randbytes(64) + b"".join(slots) + digest * 8
        ways = [way for way in range(2 * WAYS) if slots[way][8:24] == digest]
        found = arena.find(fetched, 64, digest)
        assert found == (ways[0] if ways else -1)
        if ways:
            entry = arena.entry(fetched, 64, digest, found)
            assert entry is not None
            which = sets_of(digest, GEOMETRY.sets)[found // WAYS]
            assert entry.slot == which * WAYS + found % WAYS
            assert (entry.offset, entry.length, entry.image) == (
                GEOMETRY.data_offset + found * 64, 64, slots[found],
            )  # fmt: skip
            assert entry.word_offset == HEADER_BYTES + 8 * shard_of(digest)


@pytest.mark.parametrize(
    "image",
    [
        {"seq": 5}, {"offset": GEOMETRY.data_offset - 1}, {"offset": GEOMETRY.size - 63}, {"length": 0},
        {"length": 65, "chunk": 64}, {"offset": 0}, {"offset": 1 << 63}, {"digest": bytes(16)}, {"flags": ENTRY_BOUND},
    ],
)  # fmt: skip
def test_impossible_entries_have_no_place(image: dict[str, Any]) -> None:
    arena = RemoteArena(GEOMETRY, 1, regions_of(random.Random(2)), 1)
    digest = digest_of("x")
    fields = {"digest": digest, "seq": 4, "offset": GEOMETRY.data_offset, "length": 64, **image}
    assert arena.entry(image_of(digest, 4, GEOMETRY.data_offset, 64), 0, digest, 0) is not None
    assert arena.entry(image_of(**fields), 0, digest, 0) is None


# -- the rule -----------------------------------------------------------------------------------------

SLOT_NUMBER = 3
WORDS = (0, 1, 77, MOVING - 1, MOVING, MOVING | 5, FROZEN - 1, FROZEN, FROZEN | 5, (1 << 64) - 1)


def history(seed: int, digest: bytes) -> list[bytes]:
    """All states of one slot as its writer makes them: seq odd, then the body word by word, then even."""
    rng = random.Random(seed)
    seq = (1 << SEQ_BITS) | 8
    state = list(np.frombuffer(image_of(digest, seq, GEOMETRY.data_offset, 64), np.uint64))
    states = [np.array(state, np.uint64).tobytes()]
    for _ in range(3):
        target = rng.choice(
            [
                image_of(digest, 0, GEOMETRY.data_offset + 64 * rng.randrange(3), 64 * rng.randrange(1, 3), chunk=128),
                image_of(bytes(16), 0, 0, 0),
                image_of(digest_of("other"), 0, GEOMETRY.data_offset, 64),
            ]
        )
        body = np.frombuffer(target, np.uint64)
        state[0] = np.uint64(seq | 1)
        states.append(np.array(state, np.uint64).tobytes())
        for word in range(1, 8):
            state[word] = body[word]
            states.append(np.array(state, np.uint64).tobytes())
        seq += 2
        state[0] = np.uint64(seq)
        states.append(np.array(state, np.uint64).tobytes())
    return states


def local_reader(digest: bytes, image: bytes, word: int) -> ArenaReader:
    """An ArenaReader over nothing but one slot and one shard word."""
    reader = object.__new__(ArenaReader)
    words = array("Q", bytes(8 * (16_384 + 8 * (SLOT_NUMBER + 1))))
    words[shard_of(digest)] = word
    words[16_384 + SLOT_NUMBER * 8 : 16_384 + SLOT_NUMBER * 8 + 8] = array("Q", image)
    reader.words = memoryview(words)
    reader._shard_word, reader._slot_word = 0, 16_384
    reader._clusters, reader._cluster = range(1 << 64), 0
    return reader


def test_the_rule_is_that_of_local_readers() -> None:
    """For all pairs of times: an image taken whole is confirmed exactly when ArenaReader.confirm says so."""
    digest = digest_of("rule")
    cases = 0
    for seed in range(12):
        states = history(seed, digest)
        for first, then in enumerate(states):
            if then[0] & 1:
                continue  # neither of them locates an odd slot
            seq = int(np.frombuffer(then, np.uint64)[0])
            for last, now in enumerate(states[first:], first):
                between = states[random.Random(last).randint(first, last)]
                for word in WORDS:
                    local = local_reader(digest, now, word).confirm(digest, SLOT_NUMBER, seq)
                    assert confirmed(place_of(then), between, now, word) == local, (seed, first, word)
                    # Once proved, a place stands for a whole entry, and needs no image beside the value.
                    assert confirmed(place_of(then, proved=True), b"", now, word) == local
                    cases += 1
    assert cases > 5000


def place_of(image: bytes, *, proved: bool = False) -> CachedEntry:
    entry = CachedEntry(image[8:24], SLOT_NUMBER, image, 0, 64, 0, 0)
    entry.proved = proved
    return entry


def mixes(rng: random.Random, states: list[bytes], count: int) -> list[tuple[bytes, int, int]]:
    """What one READ may bring: each word as it was at some time between two. (image, first time, last time)"""
    made = []
    for _ in range(count):
        low = rng.randrange(len(states))
        high = min(len(states) - 1, low + rng.choice([0, 1, 3, 9, 20]))
        times = [rng.randint(low, high) for _ in range(8)]
        image = b"".join(states[time][8 * word : 8 * word + 8] for word, time in enumerate(times))
        made.append((image, min(times), max(times)))
    return made


def tries(rule: Callable[[bytes, bytes, bytes], bool]) -> tuple[int, int]:
    """(confirmed, of these wrong): torn images of three READs, one after the other, over many histories."""
    digest = digest_of("torn")
    accepted = wrong = 0
    for seed in range(250):
        rng = random.Random(seed)
        states = history(seed, digest)
        thens = [mix for mix in mixes(rng, states, 30) if not mix[0][0] & 1 and mix[0][8:24] == digest]
        middles, nows = mixes(rng, states, 40), mixes(rng, states, 40)
        for then, _, ended in thens:
            for now, began, _ in nows:
                if began < ended or now[:8] != then[:8]:
                    continue  # no rule accepts another seq
                for between, first, last in middles:
                    if first < ended or last > began or not rule(then, between, now):
                        continue
                    accepted += 1
                    # Right when the slot was just that from the end of the first READ to the begin of the last.
                    wrong += any(states[time] != then for time in range(ended, began + 1))
    return accepted, wrong


def test_torn_images_are_never_confirmed_for_what_was_not_there() -> None:
    accepted, wrong = tries(lambda then, between, now: confirmed(place_of(then), between, now, 1))
    assert accepted > 100
    assert not wrong


def test_comparing_the_seq_alone_would_not_do() -> None:
    """The positive control of the one above. That two whole images are not enough is found by tests/models."""
    accepted, wrong = tries(lambda then, between, now: then[:8] == now[:8])
    assert accepted
    assert wrong


# -- the location cache ----------------------------------------------------------------------------------


def test_locations_against_a_dict() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        cache, truth = Locations(32), dict[bytes, CachedEntry]()
        for _ in range(2000):
            digest = digest_of(f"k{rng.randrange(60)}")
            act = rng.random()
            if act < 0.5:
                entry = CachedEntry(digest, 1, image_of(digest, 4, GEOMETRY.data_offset, 64), 0, 64, 0, 0)
                cache.put(digest, entry)
                truth[digest] = entry
            elif act < 0.6:
                cache.drop(digest)
                truth.pop(digest, None)
            else:
                got = cache.get(digest)
                assert got is None or got is truth[digest]
            check_locations(cache)
            assert len(cache) <= 34
        last = digest_of("last")
        entry = CachedEntry(last, 1, image_of(last, 4, GEOMETRY.data_offset, 64), 0, 64, 0, 0)
        cache.put(last, entry)
        assert cache.get(last) is entry
        cache._young[digest_of("bad")] = entry
        with pytest.raises(CorruptionError):
            check_locations(cache)
        forget(cache)
        assert not len(cache)
