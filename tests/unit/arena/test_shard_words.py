"""Shard words against a reference model, and each rule of ``simm/arena/shard_words.py`` by itself."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

import simm.arena.shard_words
from simm.arena.shard_words import ShardWords
from simm.constants import SHARD_COUNT
from simm.errors import CorruptionError, UsageError
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import BITMAP_BYTES, EPOCH_MASK, EPOCHS_AHEAD, FROZEN, MOVING, bitmap_of, shards_in
from tests.support.consistency import finished

NONE, OWNER, INCOMING, OUTGOING = ShardRole.NONE, ShardRole.OWNER, ShardRole.INCOMING, ShardRole.OUTGOING
S, T = 5, 16_000
#: The model plays these; all others stay nobody's.
PLAYED = (0, 1, 7, 8, 5000, SHARD_COUNT - 1)


def digest_in(shard: int, number: int = 0) -> bytes:
    """A digest of that shard."""
    return (shard | number << 14).to_bytes(8, "little") + bytes(8)


def made() -> ShardWords:
    """Words of an empty arena."""
    return ShardWords(memoryview(bytearray(8 * SHARD_COUNT)).cast("Q"))


def map_of(parts: dict[int, tuple[int, int]]) -> tuple[bytes, bytes]:
    """(since, roles) of a map with these shards."""
    since, roles = np.zeros(SHARD_COUNT, np.uint64), np.zeros(SHARD_COUNT, np.uint8)
    for shard, (role, epoch) in parts.items():
        roles[shard], since[shard] = role, epoch
    return since.tobytes(), roles.tobytes()


def tell(words: ShardWords, epoch: int, **parts: tuple[int, int]) -> bool:
    """A map of shards S and T; whether entries had to be dropped."""
    shards = {"s": S, "t": T}
    lost = words.retire(epoch, *map_of({shards[name]: part for name, part in parts.items()}))
    words.take()
    words.check()
    return lost


# -- the model ----------------------------------------------------------------------------------------


class Naive:
    """The same rules, shard by shard, in words: a state ("", "mine", "moving", "frozen") and an epoch."""

    def __init__(self) -> None:
        self.state = dict.fromkeys(PLAYED, ("", 0))
        self.parts = dict.fromkeys(PLAYED, (NONE, 0))
        self.dropped: set[bytes] = set()
        self.fenced = False

    def tell(self, epoch: int, parts: dict[int, tuple[int, int]]) -> set[int]:
        """A map; which shards lose their entries."""
        lost = set()
        self.parts = {shard: parts.get(shard, (NONE, 0)) for shard in PLAYED}
        self.fenced = False
        for shard, (role, since) in self.parts.items():
            state, at = self.state[shard]
            if state == "frozen":
                keeps = at > epoch or (role == OUTGOING and at >= since)
            elif role in (OWNER, INCOMING):
                keeps = at == since
            else:
                keeps = role == OUTGOING and at < since
            if state and not keeps:
                lost.add(shard)
                state, at = "", 0
            if role == OWNER and state != "frozen":
                state, at = "mine", since
            if role == OUTGOING and state in ("mine", "moving"):
                state, at = "frozen", since
            self.set(shard, state, at)
        return lost

    def set(self, shard: int, state: str, at: int) -> None:
        """One shard's new state; what is remembered of it ends with its moving."""
        self.state[shard] = (state, at)
        if state != "moving":
            self.dropped = {
                digest for digest in self.dropped if int.from_bytes(digest[:8], "little") % SHARD_COUNT != shard
            }

    def freeze(self, epoch: int, shards: Iterable[int], known: int) -> list[int] | None:
        if epoch <= known and any(self.parts[shard][0] in (OWNER, INCOMING) for shard in shards):
            return None
        here = [shard for shard in shards if self.state[shard][0]]
        for shard in here:
            state, at = self.state[shard]
            if at > epoch or (at == epoch and state != "frozen"):
                return None
        for shard in shards:
            self.set(shard, "frozen", epoch)
        return here

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int]) -> int:
        count = 0
        for shard in shards:
            role, since = self.parts[shard]
            if role == INCOMING and not self.state[shard][0] and since <= epoch and not self.fenced:
                self.set(shard, "moving" if shard in fallback else "mine", since)
            count += self.state[shard][0] in ("mine", "moving") and not self.fenced
        return count

    def finish(self, epoch: int, shards: Iterable[int]) -> None:
        for shard in shards:
            state, at = self.state[shard]
            if state == "moving" and at <= epoch:
                self.set(shard, "mine", at)

    def recover(self) -> None:
        for shard in PLAYED:
            if self.state[shard][0] == "moving":
                self.set(shard, "mine", self.state[shard][1])
        self.fenced = True

    def word(self, shard: int) -> int:
        state, at = self.state[shard]
        return at | {"": 0, "mine": 0, "moving": MOVING, "frozen": FROZEN}[state]

    def meaning(self, digest: bytes, shard: int) -> int:
        state, _ = self.state[shard]
        if state == "moving":
            return Status.NOT_FOUND if digest in self.dropped else Status.PREVIOUS
        if state == "mine":
            return Status.NOT_FOUND
        return Status.PREVIOUS if not state and self.parts[shard][0] == INCOMING else Status.WRONG_OWNER


@pytest.mark.parametrize("seed", range(6))
def test_against_the_reference_model(seed: int) -> None:
    rng = random.Random(seed)
    words, model = made(), Naive()
    epoch = 1
    for _ in range(250):
        what = rng.random()
        some = rng.sample(PLAYED, rng.randint(1, 4))
        near = max(1, epoch + rng.randint(-3, 1))
        if what < 0.3:
            if rng.random() < 0.8:
                epoch += rng.randint(0, 2)
            parts = {
                shard: (rng.choice([NONE, OWNER, INCOMING, INCOMING, OUTGOING]), rng.randint(max(1, epoch - 3), epoch))
                for shard in PLAYED
            }
            parts |= {shard: model.parts[shard] for shard in PLAYED if rng.random() < 0.6 and model.parts[shard][1]}
            before = {shard: words.words[shard] for shard in PLAYED}
            lost = model.tell(epoch, parts)
            assert words.retire(epoch, *map_of(parts)) == bool(lost)
            assert {shard for shard in PLAYED if before[shard] and not words.words[shard]} == lost
            assert words.take() == sum(state in ("mine", "moving") for state, _ in model.state.values())
        elif what < 0.42:
            late = max(1, epoch + rng.randint(-2, 2))
            assert words.freeze(late, some, epoch) == model.freeze(late, some, epoch)
        elif what < 0.62:
            fallback = rng.sample(some, rng.randint(0, len(some)))
            assert words.adopt(near, some, fallback) == model.adopt(near, some, fallback)
        elif what < 0.7:
            words.finish(some, near)
            model.finish(near, some)
        elif what < 0.9:
            shard = rng.choice(PLAYED)
            digest = digest_in(shard, rng.randrange(4))
            words.note_dropped(digest)
            if model.state[shard][0] == "moving":
                model.dropped.add(digest)
        elif what < 0.95:
            words.fence()
            model.fenced = True
        else:
            words.recover()
            model.recover()
        words.check()
        assert words.dropped == model.dropped and words.fenced == model.fenced
        for shard in PLAYED:
            assert words.words[shard] == model.word(shard), shard
            state, at = model.state[shard]
            assert words.accepts(shard) == (state in ("mine", "moving") and not model.fenced)
            digest = digest_in(shard, 1)
            meaning = model.meaning(digest, shard)
            assert words.status_of_miss(digest) == meaning
            if meaning == Status.PREVIOUS:
                assert words.moved_since(digest) == (at or model.parts[shard][1])
            for by in (near, EPOCH_MASK):
                copies = state == "moving" and at <= by and digest not in model.dropped and not model.fenced
                assert words.may_copy(digest, by) == copies
        arrived = {shard: ("mine", since) for shard, (role, since) in model.parts.items() if role == INCOMING}
        assert finished(words) == [shard for shard in PLAYED if model.state[shard] == arrived.get(shard)]
        assert words.frozen == sum(state == "frozen" for state, _ in model.state.values())


# -- the rules, one by one ---------------------------------------------------------------------------


def test_a_whole_move() -> None:
    old, new = made(), made()
    tell(old, 3, s=(OWNER, 3))
    tell(new, 3)
    tell(new, 7, s=(INCOMING, 7))
    assert not new.accepts(S) and new.status_of_miss(digest_in(S)) == Status.PREVIOUS
    assert old.freeze(7, [S, T]) == [S] and not old.accepts(S)
    assert new.adopt(7, [S, T], [S]) == 1 and new.accepts(S) and new.moving == 1
    assert new.may_copy(digest_in(S), 7) and finished(new) == []
    assert new.finish([S, T], 7) == 1 and new.words[S] == 7 and finished(new) == [S]
    assert not tell(new, 8, s=(OWNER, 7)) and new.words[S] == 7 and finished(new) == []
    assert tell(old, 8) and old.words[S] == 0


def test_what_comes_back_from_others_is_empty_first() -> None:
    words = made()
    tell(words, 3, s=(OWNER, 3))
    assert words.retire(9, *map_of({S: (OWNER, 8)})) and words.words[S] == 0  # its entries go now
    words.take()
    assert words.words[S] == 8


def test_what_nobody_else_had_is_kept() -> None:
    words = made()
    tell(words, 3, s=(OWNER, 3))
    assert not tell(words, 9, s=(OWNER, 3)) and words.words[S] == 3


def test_an_old_map_does_not_thaw() -> None:
    words = made()
    tell(words, 3, s=(OWNER, 3))
    words.freeze(7, [S])
    assert not tell(words, 6, s=(OWNER, 3)) and words.words[S] == FROZEN | 7  # the supervisor is behind
    assert not tell(words, 6) and words.words[S] == FROZEN | 7
    assert tell(words, 8, s=(OWNER, 3)) and words.words[S] == 3  # a newer one that says otherwise: but empty


def test_an_old_mover_is_refused() -> None:
    words = made()
    tell(words, 7, s=(OWNER, 7), t=(OWNER, 2))
    assert words.freeze(6, [S, T]) is None and words.freeze(7, [S]) is None
    assert words.accepts(S) and words.accepts(T)
    assert words.freeze(8, [T]) == [T] and words.freeze(6, [T]) is None
    assert words.freeze(8, [T]) == [T] == words.freeze(9, [T])  # said again, by its successor


def came_back(role: int, *, clearing: bool) -> ShardWords:
    """P, which gave the shard away by map 2, and has it again since map 4; its word is still 0."""
    words = made()
    tell(words, 1, s=(OWNER, 1), t=(OWNER, 1))
    assert words.freeze(2, [S], 1) == [S] and not tell(words, 2, s=(OUTGOING, 2), t=(OWNER, 1))
    assert words.retire(4, *map_of({S: (role, 4), T: (OWNER, 1)}))
    if clearing:
        words.begin_clearing()
        words.take()
    assert not words.words[S]
    return words


@pytest.mark.parametrize("role", [OWNER, INCOMING])
def test_issue_what_a_map_waits_for_is_looked_at_once(role: int) -> None:
    """All shards that were being cleared were, in each turn that dropped some of their entries."""
    words = came_back(role, clearing=True)
    assert words.awaited
    roles, words.roles = words.roles, None  # type: ignore[assignment]
    assert words.awaited, "without a look"
    words.roles = roles
    words.retire(5, *map_of({T: (OWNER, 1)}))
    assert not words.awaited
    words.retire(6, *map_of({T: (OWNER, 1), S: (role, 6)}))
    assert words.awaited
    words.cleared()
    assert not words.awaited
    assert words.retire(7, *map_of({T: (role, 7)})) and not words.awaited
    words.begin_clearing()
    assert words.awaited


@pytest.mark.parametrize(("role", "clearing"), [(OWNER, True), (INCOMING, True), (INCOMING, False)])
def test_issue_a_late_freeze_blocks_no_shard_that_has_come_back(role: int, clearing: bool) -> None:
    """Nobody could mutate it then: P was its only owner, and frozen by a map that had been superseded."""
    words = came_back(role, clearing=clearing)
    assert words.freeze(2, [T, S], 4) is None and words.freeze(3, [S], 4) is None
    if clearing:
        words.cleared()
    assert words.adopt(4, [S], [S]) == 1 and words.accepts(S) and words.accepts(T), "nothing was changed"
    words.check()


@pytest.mark.parametrize("role", [OWNER, INCOMING])
@pytest.mark.parametrize("epoch", [6, 10])
def test_issue_no_freeze_contradicts_a_map_that_is_as_new(role: int, epoch: int) -> None:
    """It froze what no map took away, until some later map. Nobody asks for one, as the epoch is known."""
    words = made()
    tell(words, 5, s=(role, 5), t=(OUTGOING, 5))
    words.adopt(5, [S], [])
    tell(words, 10, s=(role, 5), t=(OUTGOING, 5))
    assert words.freeze(epoch, [T, S], 10) is None and words.accepts(S) and words.words[S] == 5
    assert words.freeze(epoch, [T], 10) == [] and words.words[T] == FROZEN | epoch, "what is another worker's"
    assert words.freeze(11, [S], 10) == [S] and words.words[S] == FROZEN | 11


@pytest.mark.parametrize(("role", "clearing"), [(OWNER, True), (INCOMING, True), (INCOMING, False)])
def test_a_freeze_of_a_newer_map_freezes_what_has_come_back(role: int, clearing: bool) -> None:
    """P has not heard yet that it is released again."""
    words = came_back(role, clearing=clearing)
    assert words.freeze(5, [S, T], 4) == [T] and not words.accepts(T)
    assert words.adopt(4, [S], [S]) == 0
    if clearing:
        words.cleared()
    assert words.words[S] == words.words[T] == FROZEN | 5
    assert not tell(words, 5, s=(OUTGOING, 5), t=(OUTGOING, 5)) and words.words[S] == FROZEN | 5
    words.check()


def test_a_previous_owner_that_is_a_map_behind_or_ahead_is_frozen() -> None:
    """A mover's map is newer than the move itself when other shards have moved since."""
    behind, ahead = made(), made()
    tell(behind, 4, s=(INCOMING, 4))
    assert behind.freeze(6, [S], 4) == [] and behind.words[S] == FROZEN | 6
    tell(ahead, 4, s=(OWNER, 4))
    tell(ahead, 7, s=(OUTGOING, 5))
    assert ahead.freeze(6, [S], 7) == [S] and ahead.words[S] == FROZEN | 6


def test_no_epoch_freezes_that_no_map_will_exceed() -> None:
    words = made()
    tell(words, 7, s=(OWNER, 7))
    for epoch in (0, 7 + EPOCHS_AHEAD + 1, 1 << 43, EPOCH_MASK, EPOCH_MASK + 1, (1 << 64) - 1):
        with pytest.raises(UsageError, match="no map has epoch"):
            words.freeze(epoch, [S], 7)
        assert words.accepts(S)
    assert words.freeze(7 + EPOCHS_AHEAD, [S], 7) == [S]
    assert words.freeze((1 << 61) + 1, [S], 1 << 61) == [S], "the next map's, however high the epochs have been driven"


def test_what_is_not_here_is_frozen_too() -> None:
    """Or a map that we get later, and that is older than the mover's, would make it ours."""
    words = made()
    tell(words, 3)
    assert words.freeze(7, [S]) == [] and words.words[S] == FROZEN | 7
    assert not tell(words, 5, s=(OWNER, 5)) and not words.accepts(S)
    tell(words, 8)
    assert words.words[S] == 0


def test_freeze_ends_a_move_in() -> None:
    words = made()
    tell(words, 4, s=(INCOMING, 4))
    words.adopt(4, [S], [S])
    words.note_dropped(digest_in(S))
    assert words.freeze(5, [S]) == [S] and words.words[S] == FROZEN | 5
    assert words.moving == 0 and not words.dropped
    words.check()


def test_a_previous_owner_that_missed_its_own_time_has_nothing() -> None:
    words = made()
    tell(words, 3, s=(OWNER, 3))
    words.freeze(5, [S])
    assert tell(words, 9, s=(OUTGOING, 9)) and words.words[S] == 0  # frozen by another move than this
    tell(words, 10, s=(OWNER, 10))
    assert tell(words, 11, s=(OUTGOING, 10)) and words.words[S] == 0  # a map that contradicts itself


def test_a_mover_of_an_older_map_moves_nothing() -> None:
    words = made()
    tell(words, 9, s=(INCOMING, 9))
    assert words.adopt(8, [S], [S]) == 0 and words.words[S] == 0
    assert words.adopt(9, [S], [S]) == 1
    assert not words.may_copy(digest_in(S), 8) and words.may_copy(digest_in(S), 9)
    assert words.finish([S], 8) == 0 and words.moving == 1


def test_nothing_is_adopted_that_the_map_does_not_give() -> None:
    words = made()
    tell(words, 9, s=(OUTGOING, 9), t=(NONE, 0))
    assert words.adopt(9, [S, T], [S, T]) == 0 and not any(words.words)


def test_without_fall_back_it_is_plain_at_once() -> None:
    words = made()
    tell(words, 9, s=(INCOMING, 9))
    assert words.adopt(9, [S], []) == 1 and words.words[S] == 9
    assert words.status_of_miss(digest_in(S)) == Status.NOT_FOUND and not words.may_copy(digest_in(S))


def test_the_map_ends_the_fall_back() -> None:
    words = made()
    tell(words, 9, s=(INCOMING, 9))
    words.adopt(9, [S], [S])
    words.note_dropped(digest_in(S))
    assert not tell(words, 10, s=(OWNER, 9)) and words.words[S] == 9 and not words.dropped


def test_a_death_ends_the_fall_back_and_fences() -> None:
    words = made()
    tell(words, 9, s=(INCOMING, 9), t=(OWNER, 2))
    words.adopt(9, [S], [S])
    again = ShardWords(words.words)
    again.recover()
    assert again.words[S] == 9 and again.fenced and not again.accepts(S) and not again.accepts(T)
    assert again.status_of_miss(digest_in(S)) == Status.NOT_FOUND
    tell(again, 9, s=(INCOMING, 9), t=(OWNER, 2))
    assert again.accepts(S) and again.accepts(T) and finished(again) == [S]


def test_what_was_dropped_is_neither_copied_nor_looked_for() -> None:
    words = made()
    tell(words, 9, s=(INCOMING, 9), t=(OWNER, 9))
    words.adopt(9, [S], [S])
    one, two = digest_in(S, 1), digest_in(S, 2)
    words.note_dropped(one)
    words.note_dropped(digest_in(T))  # not moving
    assert words.dropped == {one}
    assert not words.may_copy(one) and words.may_copy(two)
    assert (words.status_of_miss(one), words.status_of_miss(two)) == (Status.NOT_FOUND, Status.PREVIOUS)


def test_too_much_to_remember_ends_the_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simm.arena.shard_words, "DROPPED_MAX", 3)
    words = made()
    tell(words, 9, s=(INCOMING, 9), t=(INCOMING, 9))
    words.adopt(9, [S, T], [S, T])
    for number in (0, 1, 2, 2):
        words.note_dropped(digest_in(S, number))
    assert len(words.dropped) == 3 and words.moving == 2
    words.note_dropped(digest_in(T))
    assert words.moving == 0 and not words.dropped and words.overflows == 1
    assert words.status_of_miss(digest_in(T)) == Status.NOT_FOUND and not words.may_copy(digest_in(T))
    words.check()


@pytest.mark.parametrize("most", [3, 40, 100])
def test_many_are_remembered_as_one_by_one(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(simm.arena.shard_words, "DROPPED_MAX", most)
    found = []
    for many in (False, True):
        words = made()
        tell(words, 9, s=(INCOMING, 9), t=(OWNER, 9))
        words.adopt(9, [S], [S])
        for start in (0, 25):
            digests = [digest_in(shard, number) for shard in (S, T) for number in range(start, start + 30)]
            if many:
                words.note_dropped_many(b"".join(digests))
                continue
            for digest in digests:
                if words.moving:
                    words.note_dropped(digest)
        words.check()
        found.append((words.dropped, words.moving, words.overflows))
    assert found[0] == found[1] and len(found[0][0]) == (55 if most == 100 else 0)


def test_a_fence() -> None:
    words = made()
    tell(words, 9, s=(OWNER, 9), t=(INCOMING, 9))
    words.fence()
    assert not words.accepts(S) and words.words[S] == 9 and words.adopt(9, [T], [T]) == 0 and words.words[T] == 0
    assert words.freeze(10, [S]) == [S]
    assert words.status_of_miss(digest_in(T)) == Status.PREVIOUS
    tell(words, 11, t=(INCOMING, 9))
    assert not words.fenced and words.adopt(11, [T], []) == 1


def test_what_is_no_map_changes_nothing() -> None:
    words = made()
    tell(words, 3, s=(OWNER, 3))
    before = bytes(words.words)
    good = map_of({S: (NONE, 0)})
    for epoch, since, roles in [
        (0, *good), (EPOCH_MASK + 1, *good), (4, good[0][:-8], good[1]), (4, good[0], good[1][:-1]), (4, b"", b""),
        (4, *map_of({S: (OWNER, 0)})), (4, *map_of({S: (INCOMING, 0)})), (4, *map_of({S: (OUTGOING, 0)})),
        (4, *map_of({S: (OWNER, EPOCH_MASK + 1)})), (4, good[0], b"\x04" + good[1][1:]),
    ]:  # fmt: skip
        with pytest.raises(UsageError):
            words.retire(epoch, since, roles)
        assert bytes(words.words) == before and words.roles[S] == OWNER
    for epoch in (0, EPOCH_MASK + 1):
        with pytest.raises(UsageError):
            words.freeze(epoch, [S])


def test_bitmaps() -> None:
    for shards in ([], [0], [S, T], list(range(SHARD_COUNT)), [SHARD_COUNT - 1]):
        assert shards_in(bitmap_of(shards)) == shards
    for bitmap in (b"", bytes(BITMAP_BYTES - 1), bytes(BITMAP_BYTES + 1)):
        with pytest.raises(UsageError):
            shards_in(bitmap)
    with pytest.raises(UsageError):
        ShardWords(memoryview(bytes(80)).cast("Q"))


def test_check_finds_what_is_wrong() -> None:
    for word, match in ((FROZEN | MOVING | 3, "at once"), (MOVING, "without an epoch"), (MOVING | 3, "counted")):
        words = made()
        words.words[S] = word
        with pytest.raises(CorruptionError, match=match):
            words.check()
    words = made()
    words.dropped.add(digest_in(S))
    with pytest.raises(CorruptionError, match="not moving"):
        words.check()
