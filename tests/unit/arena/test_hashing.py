"""Digests, shards and sets: fixed vectors, limits, spread, and the vector forms against the scalar ones."""

from __future__ import annotations

import mmap
import random
import re
import subprocess
import sys
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simm.arena.hashing import (
    TAG_KEYS,
    EpochHasher,
    Hasher,
    check_namespace,
    hash_tag,
    sets_of,
    sets_of_words,
    shard_of,
    split,
)
from simm.arena.layout import slots_for
from simm.arena.store import Store
from simm.constants import DIGEST_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, PAGE_BYTES, SHARD_COUNT
from simm.errors import UsageError
from simm.wire.messages import ShardRole
from tests.support.dose import dosed


def test_vectors_never_change() -> None:
    """Other releases and other machines must find the same slots: these bytes are part of the protocol."""
    assert Hasher("default")("a").hex() == "564be66da1272ae0805fef835b1216ee"
    assert Hasher("default")("prefix-1f3a/ключ").hex() == "ee28d679c60d528221f4db3560d6a869"
    assert Hasher("default")("page{1f3a}/k").hex() == "29297993857ed79fd4d9e90b4aff8934"
    assert Hasher("n" * NAMESPACE_BYTES_MAX)("k" * KEY_BYTES_MAX).hex() == "a344e4cfbeddf4275e0eab62506ac787"
    digest = bytes(range(16))
    assert shard_of(digest) == 0x0100 & (SHARD_COUNT - 1)
    assert split(digest) == (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    assert sets_of(digest, 1000) == ((0x0706050403020100 >> 14) % 1000, 0x0F0E0D0C0B0A0908 % 1000)


KEYS = st.text(min_size=1, max_size=80) | st.from_regex(r"[a{}]{1,9}", fullmatch=True)


@settings(max_examples=dosed(100, quick=12))
@given(KEYS, st.text(min_size=1, max_size=16))
def test_a_digest_is_blake2b_with_the_namespace_as_person(key: str, namespace: str) -> None:
    try:
        raw, person = key.encode(), blake2b(namespace.encode(), digest_size=16).digest()
    except UnicodeEncodeError:
        return
    if len(raw) <= KEY_BYTES_MAX and len(namespace.encode()) <= NAMESPACE_BYTES_MAX:
        expected = blake2b(raw, digest_size=DIGEST_BYTES, person=person).digest()
        if tag := re.match(rb"[^{]*\{([^}]+)\}", raw):
            own = blake2b(tag[1], digest_size=DIGEST_BYTES, person=person).digest()
            assert shard_of(Hasher(namespace)(key)) == shard_of(own)
            low = int.from_bytes(expected, "little") >> 14 << 14 | int.from_bytes(own, "little") & 0x3FFF
            expected = low.to_bytes(DIGEST_BYTES, "little")
        assert Hasher(namespace)(key) == expected


@pytest.mark.parametrize(
    ("key", "tag"),
    [("a{b}c", "b"), ("{b}", "b"), ("a{b}{c}", "b"), ("a{{b}}", "{b"), ("}a{b}", "b"), ("a{é😀}", "é😀"),
     ("a", ""), ("a{}b", ""), ("a{}{b}", ""), ("a{b", ""), ("a}b{", ""), ("a}b", "")],
)  # fmt: skip
def test_a_hash_tag_names_the_shard(key: str, tag: str) -> None:
    """As in Redis Cluster: from the first brace to the first closing one after it, if something is between them."""
    assert hash_tag(key) == tag
    for digest in (Hasher("x"), EpochHasher("x", 7)):
        plain = blake2b(key.encode(), digest_size=16, person=blake2b(b"x", digest_size=16).digest()).digest()
        assert shard_of(digest(key)) == shard_of(digest(tag) if tag else plain)
        assert split(digest(key))[0] >> 14 == split(plain)[0] >> 14  # and all else is the key's own
        assert digest(key)[8:12] == plain[8:12]
        assert digest.many(["k", key, "k{"]) == [digest("k"), digest(key), digest("k{")]


@settings(max_examples=dosed(100, quick=25))
@given(st.lists(st.from_regex(r"[ab{}é]{1,7}", fullmatch=True), min_size=1, max_size=3 * TAG_KEYS), st.booleans())
def test_many_keys_with_braces_have_the_digests_of_each(keys: list[str], epoch: bool) -> None:
    """Whatever braces are in which of them, and however many there are."""
    digest = EpochHasher("x", 7) if epoch else Hasher("x")
    for batch in (keys, keys * TAG_KEYS):
        assert digest.many(batch) == [digest(key) for key in batch]
        assert all(type(each) is bytes for each in digest.many(batch))


def test_keys_of_one_tag_lie_in_all_sets() -> None:
    digests = Hasher("x").many([f"{{tag}}{number}" for number in range(2000)])
    assert len({shard_of(digest) for digest in digests}) == 1
    assert {which for digest in digests for which in sets_of(digest, 64)} == set(range(64))


def test_digests_are_the_same_in_every_process() -> None:
    code = "from simm.arena.hashing import Hasher; print(Hasher('x')('y').hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "12345")
    }  # fmt: skip
    assert found == {Hasher("x")("y").hex() + "\n"}


@pytest.mark.parametrize(
    ("key", "text"),
    [("", "empty"), ("k" * 257, "257"), ("é" * 129, "258"), ("\ud800", "surrogate"), (b"bytes", "not bytes"),
     (None, "not NoneType"), (7, "not int")],
)  # fmt: skip
def test_bad_keys_are_refused_in_words(key: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Hasher("default")(key)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["k", "k" * 256, "é" * 128, "\0", "😀" * 64])
def test_the_longest_keys_are_taken(key: str) -> None:
    assert len(Hasher("default")(key)) == DIGEST_BYTES


@pytest.mark.parametrize("name", ["", "n" * 65, "é" * 33, b"bytes", None, "\ud800", "(others)"])
def test_bad_namespaces_are_refused(name: object) -> None:
    with pytest.raises(UsageError):
        check_namespace(name)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Hasher(name)  # type: ignore[arg-type]


def test_namespaces_that_a_bare_person_would_confuse_differ() -> None:
    """BLAKE2 pads its person with zeros and takes 16 bytes: the name itself would not do."""
    names = ["a", "a\0", "a\0\0", "a" * 16, "a" * 17, "a" * 18]
    assert len({Hasher(name)("key") for name in names}) == len(names)


@pytest.mark.parametrize("sets", [2, 3, 7, 64, 1000, 65_537])
def test_vector_forms_agree_and_sets_differ(sets: int) -> None:
    rng = random.Random(sets)
    digests = [rng.randbytes(16) for _ in range(500)] + [bytes(16), b"\xff" * 16]
    expected = [sets_of(digest, sets) for digest in digests]
    assert all(first != second and 0 <= first < sets and 0 <= second < sets for first, second in expected)
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    assert list(zip(*(column.tolist() for column in sets_of_words(words[:, 0], words[:, 1], sets)))) == expected


def test_many_keys_have_the_digests_of_each() -> None:
    digest = Hasher("many")
    keys = ["a", "\u00e9" * 128, *(f"key-{number}" for number in range(200))]
    assert digest.many(keys) == [digest(key) for key in keys]
    assert digest.many([]) == []
    for bad in ("", "a" * (KEY_BYTES_MAX + 1), "\ud800", b"bytes"):
        with pytest.raises(UsageError):
            digest.many(["good", bad])  # type: ignore[list-item]


def test_shards_and_sets_are_independent_and_even() -> None:
    digest = Hasher("spread")
    digests = [digest(str(number)) for number in range(60_000)]
    shards = Counter(shard_of(each) >> 8 for each in digests)  # 64 groups
    first = Counter(sets_of(each, 64)[0] for each in digests)
    second = Counter(sets_of(each, 64)[1] for each in digests)
    within = Counter(sets_of(each, 64)[0] for each in digests if shard_of(each) >> 8 == 5)
    for counts, total in ((shards, 60_000), (first, 60_000), (second, 60_000)):
        assert len(counts) == 64
        chi = sum((count - total / 64) ** 2 / (total / 64) for count in counts.values())
        assert chi < 130  # 63 degrees of freedom: 1 in 10^6
    assert len(within) == 64  # one shard's keys lie in all sets


# -- how full the sets get ------------------------------------------------------------------------------


@pytest.mark.parametrize("value_bytes", [0, 64 << 10])
def test_few_keys_find_both_sets_full_as_entries_come_and_go(value_bytes: int) -> None:
    """A full arena of values of the size that its table is made for. 0: the default, which is a page."""
    size = 64 << 20 if not value_bytes else 512 << 20
    store = Store.create(mmap.mmap(-1, size), slots=slots_for(size, value_bytes) if value_bytes else 0)
    store.begin_shards(1, np.full(SHARD_COUNT, 1, np.uint64).tobytes(), bytes([ShardRole.OWNER]) * SHARD_COUNT)
    session = store.sessions.open(1, 1, "a")
    rng = random.Random(3)
    value = value_bytes or PAGE_BYTES
    most = store.geometry.data_bytes // value
    puts = 0
    while puts < 6 * most:
        grants = store.sessions.grant(session, value, 64)
        statuses = store.commit(session, [(rng.randbytes(16), grant[0], value, 0, 0, 0) for grant in grants])
        store.apply_pending()
        assert not any(statuses)
        puts += len(grants)
    assert store.table.entries > 0.9 * most
    assert store.set_evictions < puts / 300
    store.release()


@pytest.mark.parametrize("count", [1, TAG_KEYS, 100])
def test_issue_keys_of_an_iterator_have_their_tags(count: int) -> None:
    """Its keys were gone when their tags were looked for. So such a call asked for other keys than any other."""
    keys = [f"page{{{number}}}/k" for number in range(count)]
    for hasher in (Hasher("n"), EpochHasher("n", 3)):
        assert hasher.many(iter(keys)) == hasher.many(keys) == [*map(hasher, keys)]  # type: ignore[arg-type]
