"""Whose parts stay: two puts of one key at once, copies that differ, and the keeping of what was replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.ipc.patience import Patience
from simm.net.allowance import ALLOWANCE
from simm.sdk.batch import LARGE, MISS, UNAVAILABLE
from simm.sdk.large.manifest import Manifest
from simm.sdk.large.values import Large
from simm.sdk.ops.replicas import Replicas, candidates
from simm.wire.status import Status

DEADLINE_S = 60.0
KEY = bytes(16)
SECOND = candidates(KEY)[0]
PART = 100
A, B = b"a" * 250, b"b" * 250


class Entries:
    """What all servers have. It reads and puts as ``Gets`` and ``Puts`` do."""

    router: Any = None

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        #: Until when they are kept.
        self.kept: dict[bytes, int] = {}
        #: Names under which no server answers.
        self.silent: set[bytes] = set()

    def patience(self) -> Patience:
        return Patience(DEADLINE_S)

    def target(self, _digest: bytes) -> None: ...

    def count(self, *_: Any) -> None: ...

    def read_many(self, digests: Sequence[bytes], sinks: Sequence[Any], _patience: Any = None) -> list[Any]:
        return [self._read(digest, sink) for digest, sink in zip(digests, sinks)]

    def _read(self, digest: bytes, sink: Any) -> Any:
        value = self.values.get(digest)
        if digest in self.silent:
            return UNAVAILABLE
        if value is None:
            return MISS
        if sink is None:
            return value
        if len(sink) != len(value):
            return LARGE  # an ordinary value for who reads a manifest
        sink[:] = value
        return len(value)

    def stored_many(self, digests: Sequence[bytes], _patience: Any = None) -> list[bool]:
        return [digest in self.values for digest in digests]

    def look_many(self, digests: Sequence[bytes], _patience: Any = None) -> list[int]:
        return [UNAVAILABLE if each in self.silent else 1 if each in self.values else MISS for each in digests]

    def store(self, digests: Sequence[bytes], sources: Sequence[Any], _patience: Any = None) -> list[int]:
        self.values.update(zip(digests, map(bytes, sources)))
        return [Status.OK] * len(digests)

    put = store

    def delete(self, digests: Sequence[bytes], _sizes: Any = None) -> list[int]:
        return [Status.OK if self.values.pop(digest, None) is not None else Status.NOT_FOUND for digest in digests]

    def keep(self, digests: Sequence[bytes], _how: int, seconds: int) -> list[int]:
        self.kept.update(dict.fromkeys(digests, seconds))
        return [Status.OK if digest in self.values else Status.NOT_FOUND for digest in digests]

    def parts_of(self, raw: bytes) -> list[bool]:
        """Return of each part of a manifest whether it is there."""
        manifest = Manifest.decode(KEY, raw)
        assert manifest is not None
        return [digest in self.values for digest in manifest.digests(KEY)]


def counters() -> dict[str, int]:
    return dict.fromkeys(("large", "present", "put_failures", "misses", "puts", "single_copies"), 0)


def single(entries: Any) -> Large:
    """Return values of which each has one copy."""
    return Large(entries, entries, None, entries, entries, None, counters(), put_once=False, deadline_s=DEADLINE_S)


def twice(entries: Any, primary_first: bool, manifest_store: Any = None) -> Large:
    """Return values of which each has two copies, and whose reads begin with this one."""

    def replicas(puts: Any) -> Replicas:
        rng: Any = SimpleNamespace(random=lambda: 0.0 if primary_first else 0.9)
        made: Any = Replicas(entries, entries, puts, counters(), rng)
        made.second = lambda digest: candidates(digest)[0]
        return made  # type: ignore[no-any-return]

    puts: Any = entries if manifest_store is None else SimpleNamespace(store=manifest_store, count=entries.count)
    return Large(
        entries, entries, replicas(entries), entries, puts, replicas(puts), counters(), put_once=True,
        deadline_s=DEADLINE_S,
    )  # fmt: skip


def put(values: Large, value: bytes) -> int:
    return values.put([KEY], [memoryview(value)], lambda *_: [], PART)[0]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.sdk.large.manifest.PART_BYTES", PART)


# -- two puts at once ------------------------------------------------------------------------------------------


def put_both(entries: Entries, primary: bytes, other: bytes, orders: tuple[bool, bool]) -> dict[bytes, bytes]:
    """Put A and B at once. Their manifests are stored between the looks of both, so that those of ``primary`` and
    ``other`` are in force. Return the manifest of each.
    """
    made: dict[bytes, bytes] = {}

    def settle() -> None:
        entries.values.update({KEY: made[primary], SECOND: made[other]})

    meeting = threading.Barrier(2, settle)
    statuses: dict[bytes, int] = {}

    def run(value: bytes, primary_first: bool) -> None:
        def store(copies: Sequence[bytes], sources: Sequence[Any], _patience: Any) -> list[int]:
            assert [*copies] == [KEY, SECOND]
            made[value] = bytes(sources[0])
            meeting.wait(DEADLINE_S)
            return [Status.OK] * 2

        statuses[value] = put(twice(entries, primary_first, store), value)

    threads = [threading.Thread(target=run, args=each) for each in zip((A, B), orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {A: Status.OK, B: Status.OK}
    return made


@pytest.mark.parametrize("orders", [(True, True), (True, False), (False, True), (False, False)])
def test_of_two_puts_at_once_no_copy_names_parts_that_are_gone(orders: tuple[bool, bool]) -> None:
    entries = Entries()
    made = put_both(entries, B, A, orders)
    assert all(entries.parts_of(made[A])) and all(entries.parts_of(made[B]))
    assert twice(entries, True).read(KEY, None) == B and twice(entries, False).read(KEY, None) == A


def test_who_has_neither_copy_drops_its_parts() -> None:
    entries = Entries()
    made = put_both(entries, B, B, (True, True))
    assert all(entries.parts_of(made[B])) and not any(entries.parts_of(made[A]))


def test_parts_stay_if_a_copy_cannot_be_read() -> None:
    entries = Entries()
    entries.silent.add(SECOND)
    made = put_both(entries, B, A, (True, True))
    assert all(entries.parts_of(made[A])) and all(entries.parts_of(made[B]))


@pytest.mark.parametrize("primary_first", [True, False])
@pytest.mark.parametrize("gone", [A, B])
def test_a_read_that_finds_a_part_missing_tries_the_other_copy(primary_first: bool, gone: bytes) -> None:
    entries = Entries()
    made = put_both(entries, B, A, (True, True))
    manifest = Manifest.decode(KEY, made[gone])
    assert manifest is not None
    twice(entries, True).drop(KEY, manifest)
    assert twice(entries, primary_first).read(KEY, None) == (A if gone == B else B)


@pytest.mark.parametrize("primary_first", [True, False])
def test_a_keep_of_copies_that_differ_holds(primary_first: bool) -> None:
    entries = Entries()
    put_both(entries, B, A, (True, True))
    values = twice(entries, primary_first)
    orders = iter([primary_first, not primary_first] * 4)
    replicas: Any = values._manifest_copies
    replicas._random = lambda: 0.0 if next(orders) else 0.9
    statuses: list[int] = [Status.TOO_LARGE]
    values.keep([KEY], statuses, 2, 60)
    assert statuses == [Status.OK] and 0 not in entries.kept.values()


def test_a_put_whose_end_is_not_known_drops_no_parts_that_a_copy_names() -> None:
    """The primary names another put's value, the second copy this one's."""
    entries = Entries()
    assert put(twice(entries, True), B) == Status.OK
    other = entries.values.pop(KEY)
    del entries.values[SECOND]

    def store(_copies: Sequence[bytes], sources: Sequence[Any], _patience: Any) -> list[int]:
        entries.values.update({KEY: other, SECOND: bytes(sources[0])})
        return [Status.UNAVAILABLE, Status.UNAVAILABLE]

    assert put(twice(entries, True, store), A) == Status.OK
    assert all(entries.parts_of(other)) and all(entries.parts_of(entries.values[SECOND]))


# -- keeping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_keep_whose_value_was_replaced_gives_up_all_that_it_kept(ordinary: bool) -> None:
    """Also the key's own entry, though who replaced the value may have kept it: nothing stays hard kept for nobody."""
    entries = Entries()
    assert put(single(entries), A) == Status.OK
    old = Manifest.decode(KEY, entries.values[KEY])
    assert old is not None
    values = single(entries)
    plain: Callable[..., list[int]] = entries.keep
    asked: list[tuple[bool, int]] = []

    def keep(digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        answers = plain(digests, how, seconds)
        asked.append((KEY in digests, seconds))
        if len(asked) == 1:
            if ordinary:
                entries.values[KEY] = b"ordinary"
            else:
                assert put(single(entries), B) == Status.OK
            plain([KEY], 2, 3600)
        return answers

    values._keep = keep
    statuses: list[int] = [Status.TOO_LARGE]
    values.keep([KEY], statuses, 2, 60)
    assert (True, 0) in asked and (False, 0) not in asked
    assert {entries.kept[part] for part in old.digests(KEY)} == {0}
    if ordinary:
        assert statuses == [Status.NOT_FOUND] and entries.kept[KEY] == 0
    else:
        assert statuses == [Status.OK] and entries.kept[KEY] == 60, "of the new one"


def test_all_is_given_up_if_nobody_knows_what_is_there() -> None:
    entries = Entries()
    assert put(single(entries), A) == Status.OK
    values = single(entries)

    def keep(digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        entries.silent.add(KEY)
        return entries.keep(digests, how, seconds)

    values._keep = keep
    statuses: list[int] = [Status.TOO_LARGE]
    values.keep([KEY], statuses, 2, 60)
    assert statuses == [Status.UNAVAILABLE] and {*entries.kept.values()} == {0} and KEY in entries.kept


# -- waits for room --------------------------------------------------------------------------------------------


def test_a_put_that_raises_leaves_the_call_around_it_its_own_wait() -> None:
    def broken(*_: Any) -> list[int]:
        raise ValueError("the control")

    with Patience(DEADLINE_S):
        mine = ALLOWANCE.mine
        before = mine.room, mine.least_s
        with pytest.raises(ValueError, match="control"):
            single(Entries()).put([KEY], [memoryview(b"v")], broken, PART)
        assert (mine.room, mine.least_s) == before
