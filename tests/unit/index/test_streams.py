"""Messages that are lost, replayed, repeated, and of processes that begin anew: what the index says is never wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module  # noqa: E402
from simm.index import sources as sources_module  # noqa: E402
from simm.index import streams as streams_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.keys import request_keys  # noqa: E402
from simm.index.scores import score  # noqa: E402
from simm.index.sources import Registration, Space  # noqa: E402
from simm.index.streams import Stream  # noqa: E402
from tests.support.dose import dose  # noqa: E402

SPACE = Space("m", "", "default", "", 1)
PROMPTS = [[1000 * number, 1000 * number + 1, 1000 * number + 2] for number in range(6)]
KEYS = [request_keys(tokens, 1) for tokens in PROMPTS]


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def stored(number: int, start: int = 0, stop: int = 3) -> dict[str, Any]:
    tokens = PROMPTS[number]
    return {"type": "BlockStored", "block_hashes": [1 + each for each in tokens[start:stop]], "block_size": 1,
            "parent_block_hash": 1 + tokens[start - 1] if start else None, "token_ids": tokens[start:stop]}  # fmt: skip


def removed(number: int, start: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1 + each for each in PROMPTS[number][start:]]}


class Engine:
    """A publisher: what it has cached, and the messages that it keeps for replays."""

    def __init__(self, rng: random.Random, kept: int) -> None:
        self.rng, self.kept = rng, kept
        self.begin()

    def begin(self) -> None:
        self.cached: dict[int, int] = {}
        self.number = 0
        self.log: deque[tuple[int, bytes]] = deque(maxlen=self.kept)

    def step(self) -> tuple[int, bytes]:
        prompt = self.rng.randrange(len(PROMPTS))
        have = self.cached.get(prompt, 0)
        if self.rng.random() < 0.03:
            event, self.cached = {"type": "AllBlocksCleared"}, {}
        elif have == 3 or (have and self.rng.random() < 0.4):
            start = self.rng.randrange(have)
            event = removed(prompt, start)
            event["block_hashes"] = event["block_hashes"][: have - start]
            self.cached[prompt] = start
        else:
            stop = self.rng.randrange(have, 3) + 1
            event = stored(prompt, have, stop)
            self.cached[prompt] = stop
        self.log.append((self.number, packed(event)))
        self.number += 1
        return self.log[-1]


def _claims(index: Blocks) -> list[int]:
    found = []
    for keys in KEYS:
        match = score(index, SPACE, keys).matches.get("A")
        found.append(match.blocks if match else 0)
    return found


def _drive(seed: int, replays: bool, steps: int = 160) -> tuple[int, int]:
    """Return how often the index was wrong, and how often it said that it knows all."""
    rng = random.Random(seed)
    index = Blocks()
    source = index.register(Registration("A", "m", block_size=1))
    stream = Stream(index, source, replays=replays)
    engine = Engine(rng, kept=8)
    false = complete = 0
    asked: int | None = None
    owed: list[tuple[int, bytes]] = []  # sent, not here yet
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.04:
            engine.begin()
            owed, asked = [], None
            stream.disconnected()
            asked = stream.connected()
        elif chance < 0.25 and asked is not None:
            if rng.random() < 0.15:
                stream.replay_failed()
            else:
                while owed and rng.random() < 0.8:
                    stream.message(*owed.pop(0))  # what was sent before, and may be replayed too
                answers = [each for each in engine.log if each[0] >= asked]
                whole = rng.random() < 0.8
                for number, payload in answers if whole else answers[: rng.randrange(len(answers) + 1)]:
                    stream.replayed(number, payload)
                    while owed and rng.random() < 0.2:
                        stream.message(*owed.pop(0))
                _ = stream.replay_ended() if whole else stream.replay_failed()
            asked = None
        elif chance < 0.35 and asked is None:
            asked = stream.retry()
        else:
            message = engine.step()
            owed.append(message)
            if rng.random() < 0.12:
                owed.pop()  # lost
            while owed and rng.random() < 0.9:
                begun = stream.message(*owed.pop(0))
                asked = asked if begun is None else begun
                if not stream.asking:
                    asked = None
        if owed or (engine.log and stream.next != engine.number):
            continue  # it cannot know yet
        truth = [engine.cached.get(number, 0) for number in range(len(PROMPTS))]
        claims = _claims(index)
        knows = stream.complete and not source.lost and not source.stale
        complete += knows
        false += claims != truth if knows else any(claim > true for claim, true in zip(claims, truth))
    return false, complete


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_nothing_is_claimed_that_is_not_so(seed: int, replays: bool) -> None:
    false, complete = _drive(seed, replays)
    assert false == 0 and complete > 5


def test_mutation_a_gap_that_is_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a hole left what was known, blocks would be claimed that are gone."""
    monkeypatch.setattr(Stream, "_lose", lambda stream: setattr(stream, "complete", False))
    assert any(_drive(seed, replays=False)[0] for seed in range(4))


def _stream(replays: bool = True) -> tuple[Blocks, Stream]:
    index = Blocks()
    return index, Stream(index, index.register(Registration("A", "m", block_size=1)), replays=replays)


def _take(stream: Stream, *messages: tuple[int, bytes]) -> list[int | None]:
    return [stream.message(*each) for each in messages]


def test_a_hole_is_filled_by_a_replay_and_nothing_counts_until_then() -> None:
    index, stream = _stream()
    assert _take(stream, (0, packed(stored(0))), (2, packed(stored(1)))) == [None, 1]
    assert stream.source.stale and _claims(index) == [0] * 6
    stream.replayed(1, packed(removed(0, 1)))
    stream.replayed(2, packed(stored(1)))
    stream.replay_ended()
    assert _claims(index) == [1, 3, 0, 0, 0, 0] and stream.complete and not stream.source.stale


def _fail(stream: Stream) -> None:
    for _ in range(streams_module.HOLE_ASKS):
        stream.replay_failed()


def _replay_later(stream: Stream) -> None:
    stream.replayed(5, packed())
    stream.replay_ended()


@pytest.mark.parametrize("heal", [_fail, _replay_later])
def test_a_hole_that_stays_forgets_everything(heal: Callable[[Stream], Any]) -> None:
    index, stream = _stream()
    _take(stream, (0, packed(stored(0))), (7, packed(stored(1))))
    heal(stream)
    assert _claims(index) == [0, 3, 0, 0, 0, 0]
    assert stream.source.lost and not stream.complete and score(index, SPACE, KEYS[0]).stale == ["A"]
    _take(stream, (8, packed({"type": "AllBlocksCleared"}, stored(2))))
    assert stream.complete and not stream.source.lost and _claims(index) == [0, 0, 3, 0, 0, 0]


def test_a_hole_is_asked_for_again_and_what_was_known_counts_then() -> None:
    index, stream = _stream()
    _take(stream, (0, packed(stored(0))), (1, packed(stored(2))), (4, packed(stored(1))))
    stream.replay_failed()
    assert stream.source.stale and _claims(index) == [0] * 6 and stream.retry() == 2
    stream.replayed(2, packed(removed(0, 1)))
    stream.replay_failed()  # in the middle
    assert stream.source.stale and stream.retry() == 3
    _take(stream, (5, packed(stored(3))))
    for number in (3, 4):
        stream.replayed(number, packed(stored(1)))
    stream.replay_ended()
    assert _claims(index) == [1, 3, 3, 3, 0, 0] and stream.complete and not stream.source.stale
    assert not stream.source.lost and stream.failures == 0 and stream.retry() is None


def test_an_answer_in_parts_is_asked_for_until_it_ends() -> None:
    """After the fourth part all that had rightly come was forgotten."""
    index, stream = _stream()
    stream.connected()
    stream.replay_failed()
    _take(stream, (0, packed(stored(0))), (9, packed(stored(1))))
    for number in range(1, 9):
        stream.replayed(number, packed(stored(2 + number % 2)))
        stream.replay_failed()
        assert stream.source.stale and stream.retry() == number + 1 and stream.failures == 1
    for _ in range(streams_module.HOLE_ASKS - 2):
        stream.replay_failed()
        assert stream.source.stale and stream.retry() == 9, "silent, but not for long"
    stream.replayed(9, packed(stored(1)))
    stream.replay_ended()
    assert _claims(index) == [3, 3, 3, 3, 0, 0] and stream.complete and not stream.source.lost


@pytest.mark.parametrize("fails", [False, True], ids=["", "messages fail too"])
def test_issue_an_answer_that_breaks_off_at_the_same_place_is_asked_for_a_while(fails: bool) -> None:
    """Its beginning counted as new each time. It was asked for without an end, and all was forgotten for it."""
    index, stream = _stream()
    start, questions = stream.connected(), 0
    while start is not None:
        questions += 1
        assert questions <= streams_module.ASKS_MAX
        for number in range(start, 3):
            stream.replayed(number, packed(stored(number)))
        assert stream.message(8 + questions, packed(stored(3))) is None
        stream.replay_failed()
        if fails:
            stream.failed()
        start = stream.retry()
    assert questions == streams_module.ASKS_MAX or fails
    _take(stream, (9 + questions, packed(stored(4))))
    assert not stream.asking and _claims(index)[4] == 3 and stream.source.lost
    stream.disconnected()
    assert stream.connected() == 0
    stream.replayed(0, packed(stored(0)))
    stream.replay_failed()
    assert stream.failures == 1 and stream.retry() == 1, "another process has other messages"


@pytest.mark.parametrize("part", [False, True], ids=["", "a part of it came"])
@pytest.mark.parametrize("end", [_fail, Stream.failed], ids=["silent", "a message fails"])
def test_after_a_hole_that_stayed_the_answer_for_all_may_come_in_parts(
    end: Callable[[Stream], Any], part: bool
) -> None:  # fmt: skip
    """Its messages are older than the hole, and new all the same: 16 parts of it, and it was asked no more."""
    _, stream = _stream()
    stream.connected()
    stream.replayed(9, packed(stored(0)))
    stream.replay_ended()
    assert _take(stream, (12, packed(stored(1)))) == [10]
    if part:
        stream.replayed(10, packed(stored(3)))
        stream.replay_failed()
    end(stream)
    assert stream.retry() == 0
    for number in range(3, 9):
        stream.replayed(number, packed(stored(2)))
        stream.replay_failed()
        assert stream.retry() == number + 1 and stream.failures == 1


def test_parts_of_a_stores_answer_are_no_progress() -> None:
    """Each may be the beginning of another snapshot: then nothing of the store would count for long."""
    index = Blocks()
    stream = Stream(index, index.register(Registration("A", "m", "simm", block_size=1)), replays=True)
    stream.connected()
    for number in range(streams_module.HOLE_ASKS):
        assert stream.replaying
        stream.replayed(number, packed(CLEARED))
        stream.replay_failed()
    assert not stream.replaying and stream.source.lost and stream.retry() == 0


def test_after_a_hole_that_stayed_all_is_asked_for_aside() -> None:
    index, stream = _stream()
    stream.connected()
    stream.replay_ended()
    _take(stream, (0, packed(stored(0))), (2, packed(stored(1, 0, 1), stored(1, 1))))
    _fail(stream)
    assert _claims(index) == [0, 3, 0, 0, 0, 0] and stream.source.lost
    assert stream.retry() == 0
    _take(stream, (3, packed(stored(2))))
    assert _claims(index) == [0, 3, 3, 0, 0, 0]  # what comes counts while the answer has not begun
    stream.replayed(0, packed(stored(0)))
    assert stream.source.stale and _claims(index) == [0] * 6
    stream.replayed(1, packed(removed(0, 2)))
    stream.replayed(2, packed(stored(1, 0, 1), stored(1, 1)))
    stream.replay_ended()  # the answer was made before message 3
    assert _claims(index) == [2, 3, 3, 0, 0, 0] and stream.complete and not stream.source.lost
    assert stream.retry() is None
    _take(stream, (4, packed(removed(1, 1))))  # no copy was counted twice
    assert _claims(index) == [2, 1, 3, 0, 0, 0]


@pytest.mark.parametrize("first", [1, 3])
def test_a_publisher_that_keeps_no_beginning_is_not_asked_again(first: int) -> None:
    index, stream = _stream()
    stream.connected()
    stream.replay_failed()
    _take(stream, (2, packed(stored(2))))
    stream.replay_failed()
    assert _claims(index)[2] == 3 and stream.retry() == 0
    for number in range(first, 4):
        stream.replayed(number, packed(stored(number)))
    stream.replay_ended()
    assert _claims(index) == [0, 3 if first == 1 else 0, 3, 3 if first == 1 else 0, 0, 0]
    assert not stream.complete and stream.retry() is None


def test_a_publisher_that_never_answers_is_asked_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    index, stream = _stream()
    stream.connected()
    stream.replay_failed()
    _take(stream, (0, packed(stored(0))), (2, packed(stored(1))))
    stream.replay_failed()  # it has not answered before: no other question while nothing counts
    assert _claims(index) == [0, 3, 0, 0, 0, 0]
    questions = 2
    while stream.retry() == 0:
        questions += 1
        assert _claims(index) == [0, 3, 0, 0, 0, 0] and questions <= streams_module.ASKS_MAX
        stream.replay_failed()
    assert questions == streams_module.ASKS_MAX and len(caplog.records) == 1
    assert stream.source.lost and not stream.complete and score(index, SPACE, KEYS[0]).stale == ["A"]
    stream.disconnected()
    assert stream.connected() == 0  # another process may answer


def test_after_a_failure_a_publisher_is_asked_again_over_the_same_connection() -> None:
    """It counted as disconnected, which nobody took back, and stayed stale until the connection broke."""
    index = Blocks()
    source = index.register(Registration("A", "m", "simm", block_size=1))
    stream = Stream(index, source, replays=True)
    stream.connected()
    stream.replayed(100, packed(CLEARED))
    stream.replay_ended()
    assert stream.complete and stream.retry() is None
    stream.failed()
    assert source.lost and stream.retry() == 0
    stream.replayed(100, packed(CLEARED))
    stream.replay_ended()
    assert stream.complete and not source.lost
    stream.failed()
    stream.disconnected()
    assert source.lost and stream.retry() is None, "there is nobody to ask"


def test_after_a_failure_an_engine_that_is_silent_is_asked_again() -> None:
    _, stream = _stream()
    stream.connected()
    stream.replayed(0, packed(CLEARED))
    stream.replay_ended()
    pauses = []
    for _ in range(streams_module.ASKS_MAX - 1):
        stream.failed()
        assert stream.source.lost and stream.retry() == 0
        pauses.append(stream.failures)
    assert pauses == sorted(set(pauses)), "ever more rarely"
    stream.failed()
    assert stream.retry() is None
    stream.message(0, packed(CLEARED))
    assert stream.complete and not stream.source.lost


@pytest.mark.parametrize("type", ["vllm", "simm"])
def test_after_a_failure_what_comes_asks_for_nothing(type: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each message that failed asked for a whole replay at once, in the one thread of all publishers.

    Those that fail before the next question are one failure: an engine would else be asked no more after a second.
    """
    index = Blocks()
    stream = Stream(index, index.register(Registration("A", "m", type, block_size=1)), replays=True)
    stream.connected()
    stream.replayed(9, packed(CLEARED))
    stream.replay_ended()
    for number in range(10, 30):
        assert stream.message(number, packed(stored(0))) is None and not stream.asking
        stream.failed()
        assert stream.held and stream.failures == 1
    for failures in range(2, streams_module.ASKS_MAX + 1):
        assert stream.retry() == 0
        stream.failed()
        assert stream.failures == failures
    assert len(caplog.records) == (type == "vllm"), "it says so once it asks no more"
    stream.message(30, packed(stored(0)))
    assert index.entries == 3 and stream.source.lost, "what comes counts"
    assert stream.message(32, packed(stored(1))) == 31 and stream.asking, "a hole"
    stream.replayed(31, packed(CLEARED))
    stream.replay_ended()
    assert not stream.held and not stream.failures


def test_nothing_counts_before_what_came_during_a_replay_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be removals: between two slices of them others asked, and what was gone counted."""
    index, stream = _stream()
    stream.connected()
    _take(stream, (1, packed(removed(0))))
    stream.replayed(0, packed(stored(0), stored(1)))
    real, claimed = index.apply, []

    def apply(*arguments: Any, **more: Any) -> None:
        claimed.append(_claims(index))
        real(*arguments, **more)

    monkeypatch.setattr(index, "apply", apply)
    stream.replay_ended()
    assert claimed == [[0] * 6] and _claims(index)[:2] == [0, 3]


def test_what_is_kept_aside_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "PENDING_MAX", 3)
    index, stream = _stream()
    stream.connected()
    stream.replay_failed()
    _take(stream, (1, packed(stored(1))))
    stream.replay_failed()
    assert stream.retry() == 0
    _take(stream, *((number, packed(stored(number))) for number in range(2, 6)))
    assert not stream.asking and stream.failures == 3
    assert _claims(index) == [0, 3, 3, 3, 3, 3]
    assert stream.retry() == 0


def test_a_late_consumer_asks_from_the_beginning() -> None:
    index, stream = _stream()
    assert stream.connected() == 0
    _take(stream, (1, packed(stored(1))))
    for number in range(2):
        stream.replayed(number, packed(stored(number)))
    stream.replay_ended()
    assert _claims(index)[:3] == [3, 3, 0] and stream.complete
    _, partial = _stream(replays=False)
    _take(partial, (4, packed(stored(1))))
    assert not partial.complete and not partial.source.lost


def test_a_publisher_that_begins_anew_is_cleared() -> None:
    for events in ([(0, packed(stored(1)))], [(3, packed(stored(1)))]):
        index, stream = _stream(replays=False)
        _take(stream, *((number, packed(stored(0))) for number in range(5)), *events)
        assert _claims(index) == [0, 3, 0, 0, 0, 0] and stream.counts["restarts"] == 1


@pytest.mark.parametrize("payload", [b"\xff\xff", packed({"type": "BlockRemoved", "block_hashes": ["?"]})])
def test_what_cannot_be_read_may_have_been_a_removal(payload: bytes) -> None:
    index, stream = _stream(replays=False)
    _take(stream, (0, packed(stored(0))), (1, payload))
    assert _claims(index) == [0] * 6 and stream.counts["refused"] == 1 and stream.source.lost
    index, stream = _stream(replays=False)
    _take(stream, (0, packed(stored(0))), (1, packed({"type": "BlockMoved"})))
    assert _claims(index)[0] == 3 and stream.counts["refused"] == 1


CLEARED = {"type": "AllBlocksCleared"}
UNREAD = {"type": "BlockRemoved", "block_hashes": ["?"]}
WRONG = {**stored(0), "block_hashes": []}


@pytest.mark.parametrize(
    ("events", "claims", "complete", "lost"),
    [
        ([stored(1)], [3, 3], True, False),
        ([stored(1), WRONG], [3, 3], False, False),
        ([{"type": "BlockMoved"}], [3, 0], False, False),
        ([CLEARED, WRONG, stored(1)], [0, 3], False, False),
        ([WRONG, CLEARED, stored(1)], [0, 3], True, False),
        ([stored(1), UNREAD], [0, 0], False, True),
        ([CLEARED, stored(1), UNREAD], [0, 0], False, True),
        ([stored(0), UNREAD, stored(1)], [0, 3], False, True),
        ([UNREAD, CLEARED, stored(1)], [0, 3], True, False),
    ],
    ids=range(9),
)
def test_what_is_known_after_events_that_cannot_be_read(
    events: list[Any], claims: list[int], complete: bool, lost: bool
) -> None:
    """A removal that cannot be read may be of anything before it, also in its own message; a store is missed."""
    index, stream = _stream(replays=False)
    _take(stream, (0, packed(stored(0))), (1, packed(*events)))
    assert _claims(index)[:2] == claims and (stream.complete, stream.source.lost) == (complete, lost)


def test_blocks_without_room_end_that_all_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "HOLDERS_MAX", 2)
    index, stream = _stream(replays=False)
    for number in range(3):
        _take(stream, (number, packed({**stored(number), "cache_salt": f"user-{number}"})))
        assert stream.complete is (number < 2)
    assert stream.source.ignored["too many spaces"] == 1 and index.entries == 6
    _take(stream, (3, packed(CLEARED)))
    assert stream.complete
    monkeypatch.setattr(blocks_module, "BLOCKS_MAX", 5)
    _take(stream, (4, packed(stored(0))))
    assert stream.complete
    _take(stream, (5, packed(stored(1))))
    assert not stream.complete and stream.source.ignored["too many blocks"] == 1


def test_what_is_dropped_while_it_waits_ends_that_all_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PARKED_MAX", 2)
    _, stream = _stream(replays=False)
    _take(stream, (0, packed(stored(0, 1))))
    assert stream.complete and stream.source.waiting == 2
    _take(stream, (1, packed(stored(1, 2))))
    assert not stream.complete and stream.source.waiting == 1


def test_children_of_one_parent_fail_alone() -> None:
    """The first of them that could not count took the others with it, which nobody counted or missed."""
    index, stream = _stream(replays=False)
    wrong = [{**stored(0, 1, 2), "block_size": 2, "token_ids": [1, 2], "block_hashes": [each]} for each in (77, 78)]
    _take(stream, (0, packed(wrong[0], stored(0, 1), wrong[1])), (1, packed(stored(0, 0, 1))))
    assert _claims(index)[0] == 3 and stream.source.waiting == 0


def test_one_rank_does_not_speak_for_all() -> None:
    index = Blocks()
    stream = Stream(index, index.register(Registration("A", "m", block_size=1, rank=None)), replays=False)

    def told(rank: int, *events: Any) -> bytes:
        return msgspec.msgpack.encode([0.0, list(events), rank])  # type: ignore[no-any-return]

    _take(stream, (0, told(0, stored(0))), (1, told(0, CLEARED, stored(0))))
    assert stream.complete, "no other rank has said anything"
    _take(stream, (2, told(1, stored(1))), (3, told(0, CLEARED)))
    assert not stream.complete and _claims(index)[:2] == [0, 0]
    stream.disconnected()
    _take(stream, (5, told(0, CLEARED, stored(0))))
    assert stream.complete and _claims(index)[0] == 3, "another process, which may have this rank alone"
    _take(stream, (6, told(1, stored(1))))
    assert not stream.complete and stream.source.lost and _claims(index)[:2] == [3, 3], "or the same one after all"


def _told(rank: int, *events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), rank])  # type: ignore[no-any-return]


def _of_all_ranks() -> Stream:
    index = Blocks()
    return Stream(index, index.register(Registration("A", "m", block_size=1, rank=None)), replays=False)


def test_a_publisher_of_all_ranks_is_healed_once_each_has_cleared() -> None:
    """It stayed stale for ever: no clear of a publisher whose messages name their rank was enough."""
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, stored(0))), (2, _told(0, stored(1))))
    assert stream.source.lost and not stream.complete
    _take(stream, (3, _told(0, CLEARED, stored(1))))
    assert not stream.source.lost and stream.complete, "there is one rank"
    _take(stream, (4, _told(1, stored(2))), (6, _told(1, stored(3))), (7, _told(1, CLEARED)))
    assert stream.source.lost and not stream.complete, "rank 0 has not cleared"
    _take(stream, (8, _told(1, stored(3))), (9, _told(0, CLEARED)))
    assert stream.source.lost and not stream.complete, "what rank 1 has stored since was forgotten"
    _take(stream, (10, _told(1, CLEARED, stored(3))))
    assert not stream.source.lost and stream.complete


@pytest.mark.parametrize("again", [False, True], ids=["once", "missed between two clears"])
@pytest.mark.parametrize("later", [stored(1), removed(1)], ids=["stored", "removed"])
def test_a_rank_that_speaks_after_the_others_have_cleared_was_not_known(later: dict[str, Any], again: bool) -> None:
    """The clear of the only rank that was heard since a late join spoke for ranks that had been silent, too."""
    stream = _of_all_ranks()
    _take(stream, (5, _told(0, stored(0))), (7, _told(0, CLEARED)))
    assert stream.complete and not stream.source.lost
    if again:
        _take(stream, (8, _told(0, {**stored(1), "token_ids": [1]})), (9, _told(0, CLEARED)))
        assert stream.complete and not stream.source.lost
    _take(stream, (8 + 2 * again, _told(1, later)))
    assert not stream.complete and stream.source.lost
    _take(stream, (9 + 2 * again, _told(1, CLEARED)), (10 + 2 * again, _told(0, CLEARED)))
    assert stream.complete and not stream.source.lost, "each has cleared now"


@pytest.mark.parametrize("restart", ["disconnected", "number"])
def test_a_process_of_fewer_ranks_than_the_one_before_is_healed_by_those_that_it_has(restart: str) -> None:
    """It stayed stale for ever: rank 1 of the process before had never cleared its cache."""
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, stored(0))), (1, _told(1, stored(1))))
    if restart == "disconnected":
        stream.disconnected()
    _take(stream, (1, _told(0, stored(0))))  # its message 0 is missed
    assert stream.source.lost and not stream.complete
    _take(stream, (2, _told(0, CLEARED, stored(0))))
    assert not stream.source.lost and stream.complete
    _take(stream, (3, _told(1, stored(1))))
    assert stream.source.lost and not stream.complete, "if it was the same process after all"


def test_a_rank_that_begins_with_a_clear_hides_nothing() -> None:
    stream = _of_all_ranks()
    _take(stream, (5, _told(0, CLEARED)), (6, _told(1, CLEARED, stored(1))))
    assert stream.complete and not stream.source.lost


def test_a_rank_that_speaks_late_is_known_since_the_first_message() -> None:
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, stored(0))), (1, _told(0, CLEARED)), (2, _told(1, stored(1))))
    assert stream.complete and not stream.source.lost
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, WRONG)), (1, _told(0, CLEARED)))
    assert stream.complete
    _take(stream, (2, _told(1, stored(1))))
    assert not stream.complete and not stream.source.lost, "the wrong event may have been of this rank"


@pytest.mark.parametrize("wrong", [{"type": "BlockMoved"}, {**stored(1), "token_ids": [1]}], ids=["odd", "tokens"])
def test_what_was_missed_between_the_clears_of_two_ranks_is_not_known(wrong: Any) -> None:
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, stored(0))), (1, _told(1, stored(1))), (3, _told(0, CLEARED)))
    _take(stream, (4, _told(0, wrong)), (5, _told(1, CLEARED)))
    assert stream.source.lost and not stream.complete
    _take(stream, (6, _told(0, CLEARED)))
    assert not stream.source.lost and stream.complete


def test_a_rank_whose_blocks_only_wait_is_forgotten_with_the_others() -> None:
    stream = _of_all_ranks()
    _take(stream, (0, _told(0, stored(0))), (1, _told(1, stored(1, 1))), (2, _told(0, CLEARED)))
    assert not stream.complete and not stream.source.waiting


NO_TOKENS = {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": None, "token_ids": [], "block_size": 0}


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({**stored(0), "block_size": 2}, "not the tokens of all blocks"),
        ({**stored(1, 0, 1), "block_size": 2, "token_ids": [1, 2], "parent_block_hash": 1}, "another size"),
        ({**NO_TOKENS, "medium": "CPU"}, "unknown blocks without tokens"),
    ],
    ids=["tokens", "size", "unknown"],
)
def test_blocks_that_cannot_count_end_that_all_is_known(event: dict[str, Any], why: str) -> None:
    _, stream = _stream(replays=False)
    _take(stream, (0, packed(stored(0))))
    assert stream.complete
    _take(stream, (1, packed(event)))
    assert not stream.complete and not stream.source.lost
    assert [reason for reason in stream.source.ignored if why in reason]
    _take(stream, (2, packed(CLEARED)))
    assert stream.complete
    _take(stream, (3, packed(CLEARED, stored(0), event)))
    assert not stream.complete
    _take(stream, (4, packed(event, CLEARED, stored(0))))
    assert stream.complete


def test_what_cannot_be_read_is_not_asked_for_again() -> None:
    """A replay has it as it was. So a publisher that did not answer at first was asked 15 times more, for nothing."""
    _, stream = _stream()
    stream.connected()
    stream.replay_failed()
    _take(stream, (0, packed(stored(0))))
    assert stream.complete and stream.retry() is None
    _take(stream, (1, packed(WRONG)))
    assert not stream.complete and stream.retry() is None
    _take(stream, (2, b"?"))  # of this one nobody can say what it removed
    assert stream.source.lost and stream.retry() == 0


def test_a_long_message_is_applied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others ask in between, and what they are told is what was so at that moment."""
    monkeypatch.setattr(streams_module, "_SLICE", 6)
    index, stream = _stream(replays=False)
    seen = []
    monkeypatch.setattr(streams_module.time, "sleep", lambda _: seen.append(_claims(index)[:3]))
    _take(stream, (0, packed(stored(0), stored(1), removed(0, 1), stored(2), removed(1))))
    assert seen == [[3, 3, 0], [1, 3, 3]] and _claims(index)[:3] == [1, 0, 3] and stream.complete


def test_what_waits_for_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "PENDING_MAX", 10)
    index, stream = _stream()
    numbers: Sequence[int] = range(5, 40)
    _take(stream, (0, packed(stored(0))), *((number, packed(stored(1))) for number in numbers))
    assert stream.counts["failed replays"] == 1 and not stream.replaying and _claims(index)[:2] == [0, 3]
