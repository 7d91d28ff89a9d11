"""What a worker remembers of digests that clients have spoken of while their shard moves in, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from simm.arena.marks import told as told_module
from simm.arena.marks.told import Told
from simm.arena.shard_words import ShardWords
from simm.constants import SHARD_COUNT
from simm.wire.messages import ShardRole


def digest(number: int, shard: int = 0) -> bytes:
    return (number << 32 | shard).to_bytes(16, "little")


def move_in(words: ShardWords, epoch: int, *shards: int) -> None:
    """Let these shards arrive by the map of an epoch; the others are not this worker's, but for those moving."""
    since, roles = words.since.copy(), bytearray(words.roles)
    for shard in shards:
        since[shard], roles[shard] = epoch, ShardRole.INCOMING
    words.retire(epoch, since.astype("<u8").tobytes(), bytes(roles))
    words.take()
    assert words.adopt(epoch, shards, shards) == len(shards)


@pytest.fixture
def words() -> ShardWords:
    made = ShardWords(memoryview(bytearray(8 * SHARD_COUNT)).cast("Q"))
    made.retire(1, np.zeros(SHARD_COUNT, "<u8").tobytes(), bytes(SHARD_COUNT))
    made.take()
    return made


def test_a_move_takes_marks_though_an_earlier_one_had_too_much_to_remember(
    words: ShardWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no client said anything between the two, every later mark of a mover was refused."""
    monkeypatch.setattr(told_module, "TOLD_MAX", 2)
    told = Told(words)
    move_in(words, 2, 0)
    for number in range(3):
        assert told.takes_mark(digest(9), 2)
        told.note(digest(number))
    assert not told.takes_mark(digest(9), 2) and len(told) == 2
    move_in(words, 3, 1)
    words.finish([0], 2)
    assert words.moving == 1 and not told.takes_mark(digest(9, 1), 3), "the moves are not over"
    words.finish([1], 3)
    move_in(words, 4, 2)
    assert told.takes_mark(digest(9, 2), 4) and len(told) == 0
    told.note(digest(9, 2))
    assert not told.takes_mark(digest(9, 2), 4)
