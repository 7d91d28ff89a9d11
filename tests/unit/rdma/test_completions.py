"""What a queue pair makes of its completions: errors, those that never come, and a queue that fails itself.

Every failure is a FabricError, which ends the connection and no more: an error of pyverbs would go to the engine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.rdma import work_requests
from simm.rdma.api import READ, FabricError, Timeout
from simm.rdma.work_requests import _STATUSES
from simm.verbs import VerbsQueuePair
from tests.support.scripted_verbs import Closing, CompletionQueue, Error, Queues, ScriptedRail

OPS = [(READ, 4096, 1, 8, 8192, 2)]
DONE, FLUSHED, RNR = 0, 5, 13
ERRORS = [number for number in range(len(_STATUSES)) if number]


@pytest.fixture
def rail() -> Iterator[ScriptedRail]:
    made = ScriptedRail()
    yield made
    for qp in list(made.queue_pairs):
        qp.close()


@pytest.fixture
def qp(rail: ScriptedRail) -> Iterator[VerbsQueuePair]:
    made = rail.queue_pair()
    yield made
    made.close()
    assert rail.closed == ["into the error state", "Queues", "CompletionQueue", "CompletionChannel"], "once, in order"


def soon() -> float:
    """A moment from now."""
    return time.monotonic() + 0.01


def is_over(qp: VerbsQueuePair, rail: ScriptedRail, status: str, text: str) -> None:
    """It says why whatever it is asked, and posts nothing any more. Only what was done stays so."""
    posted = next(each for each in rail.made if hasattr(each, "posted")).posted
    waits = [lambda: qp.wait(qp._done + 1, soon())] if qp._done < qp._ticket else []
    for act in (lambda: qp.post(OPS), qp.poll, qp.address, *waits):
        with pytest.raises(FabricError, match=text) as caught:
            act()
        assert caught.value.status == status and not isinstance(caught.value, Timeout)
    assert text in qp.broken and next(each for each in rail.made if hasattr(each, "posted")).posted == posted


@pytest.mark.fault("F09", ci="each status", whole="the same")
@pytest.mark.parametrize("number", ERRORS)
def test_an_error_is_final_and_has_its_name(number: int, qp: VerbsQueuePair, rail: ScriptedRail) -> None:
    name, meaning = _STATUSES[number]
    ticket = qp.post(OPS)
    rail.queue.script.append([number])
    with pytest.raises(FabricError) as caught:
        qp.wait(ticket, soon())
    assert caught.value.status == name and meaning in str(caught.value) and name in str(caught.value)
    is_over(qp, rail, name, meaning.split(":")[0].split("(")[0])


def test_a_status_that_nobody_knows(qp: VerbsQueuePair, rail: ScriptedRail) -> None:
    rail.queue.script.append([4711])
    with pytest.raises(FabricError, match="the device failed"):
        qp.wait(qp.post(OPS), soon())
    is_over(qp, rail, "4711", "the device failed")


def test_the_first_error_has_the_reason(qp: VerbsQueuePair, rail: ScriptedRail) -> None:
    """What was done before stays done, and what is flushed behind it says nothing new."""
    first, second, third = (qp.post(OPS) for _ in range(3))
    rail.queue.script.append([DONE, RNR, FLUSHED])
    qp.wait(first, soon())
    for ticket in (second, third):
        with pytest.raises(FabricError) as caught:
            qp.wait(ticket, soon())
        assert caught.value.status == "RNR_RETRY_EXC_ERR"
    is_over(qp, rail, "RNR_RETRY_EXC_ERR", "the peer is not ready")


def by_poll(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    rail.queue.script.append(error)
    qp.poll()


def by_looking(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    rail.queue.script.append(error)
    qp.wait(1, soon())


def asleep(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    qp._looks = 0.0
    rail.queue.script.append(error)
    qp.wait(1, soon())


def asking_for_an_event(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    qp._looks = 0.0
    rail.queue.error = error
    qp.wait(1, soon())


def at_an_event(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    qp._looks = 0.0
    rail.queue.channel.error = error
    rail.queue.channel.ring()
    qp.wait(1, time.monotonic() + 120)


def making_room(qp: VerbsQueuePair, rail: ScriptedRail, error: Error) -> None:
    for _ in range(qp.depth - 1):
        qp.post(OPS)
    rail.queue.script.append(error)
    qp.post(OPS)


@pytest.mark.fault("F09", ci="each call of a queue", whole="the same")
@pytest.mark.parametrize("act", [by_poll, by_looking, asleep, asking_for_an_event, at_an_event, making_room])
def test_a_queue_that_fails_breaks_the_queue_pair(
    act: Callable[[VerbsQueuePair, ScriptedRail, Error], None], qp: VerbsQueuePair, rail: ScriptedRail
) -> None:
    """As when it overruns, or its device goes. Completions may be lost, so nothing is known of what is in flight."""
    qp.post(OPS)
    with pytest.raises(FabricError, match="the completion queue failed: Input/output error") as caught:
        act(qp, rail, Error("Failed to poll CQ"))
    assert caught.value.status == "EIO" and not isinstance(caught.value, Timeout)
    rail.queue.error = rail.queue.channel.error = None
    rail.queue.script.append([DONE])
    is_over(qp, rail, "EIO", "the completion queue failed")


def test_completions_that_never_come_end_by_the_deadline(qp: VerbsQueuePair, rail: ScriptedRail) -> None:
    """An overrun that the library does not report: the caller closes the queue pair, see rdma/api.py."""
    ticket = qp.post(OPS)
    with pytest.raises(Timeout):
        qp.wait(ticket, soon())
    assert not qp.broken and qp.poll() == 0
    rail.queue.script.append([DONE])
    assert qp.poll() == ticket


@pytest.mark.parametrize("extra", [1, 3])
def test_completions_of_nothing(extra: int, qp: VerbsQueuePair, rail: ScriptedRail) -> None:
    ticket = qp.post(OPS)
    rail.queue.script.append([DONE] * (1 + extra))
    qp.wait(ticket, soon())
    is_over(qp, rail, "", "completed what nobody had posted")


# -- the ends of what was made ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "error"), [(Queues, KeyboardInterrupt()), (CompletionQueue, Error("busy", 16))])
def test_issue_a_destroyed_queue_pair_takes_no_call(
    kind: type[Closing], error: BaseException, qp: VerbsQueuePair, rail: ScriptedRail
) -> None:
    """Its close is interrupted, or its queue cannot be closed, and the caller closes it again: verbs would crash."""
    queues: Any = next(each for each in rail.made if type(each) is Queues)
    failing: Any = next(each for each in rail.made if type(each) is kind)
    modify, close = queues.modify, failing.close
    tried: list[BaseException] = []

    def modifying(*attributes: Any) -> None:
        assert not tried, "ibv_modify_qp of what was destroyed"
        modify(*attributes)

    def posting(_first: Any) -> None:
        raise AssertionError("ibv_post_send to what was destroyed")

    def ending() -> None:
        """End as in pyverbs: the signal comes when the queue pair is destroyed, and a second call does nothing."""
        tried.append(error)
        if (len(tried) == 1) is isinstance(error, KeyboardInterrupt):
            close()
        if len(tried) == 1:
            raise error

    queues.modify, qp._post_send, failing.close = modifying, posting, ending
    with pytest.raises((KeyboardInterrupt, FabricError)):
        qp.close()
    for act in (lambda: qp.post(OPS), qp.address, qp.poll):
        with pytest.raises(FabricError, match="the queue pair is closed"):
            act()
    qp.close()
    assert len(tried) == 2 and not qp.open and qp not in rail.queue_pairs


class Nameless(Closing):
    """The completion channel of a pyverbs that does not say its descriptor."""


class Misnamed(Closing):
    """One whose descriptor is none."""

    fd = -1


@pytest.mark.parametrize("kind", [Nameless, Misnamed])
def test_issue_a_channel_that_cannot_be_used_is_closed(
    kind: type[Closing], rail: ScriptedRail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt would cost a descriptor, which may be what there are too few of."""
    looks: list[set[str] | OSError] = [set(), OSError(24, "Too many open files")]

    def files() -> set[str]:
        found = looks.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(work_requests, "_descriptors", files)
    rail.library.CompChannel = lambda _context: kind(rail)
    with pytest.raises(FabricError, match="cannot tell a completion channel's descriptor"):
        rail.queue_pair()
    assert rail.closed == [kind.__name__]


class Events(Closing):
    """A completion channel that does not say its descriptor."""

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._file = os.memfd_create("[infinibandevent]")

    def close(self) -> None:
        super().close()
        os.close(self._file)


@contextlib.contextmanager
def channel_by(rail: ScriptedRail, making: Callable[[Any], Events]) -> Iterator[tuple[Any, int]]:
    """Make a channel of a library that makes its own so, and close it again."""
    library: Any = rail.library
    library.CompChannel = making
    stack = work_requests.Stack(library)
    try:
        yield work_requests.make_channel(library, None, stack)
    finally:
        stack.close()


def test_issue_only_descriptors_that_have_appeared_are_looked_at(
    rail: ScriptedRail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine has thousands of them, and the endpoint one for each client: each would cost a system call."""
    opened = [os.eventfd(0) for _ in range(300)] + [os.memfd_create("[infinibandevent]")]
    looked: list[str] = []
    real = os.readlink

    def look(path: str) -> str:
        looked.append(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", look)
    os.close(opened.pop(7))  # there is a number below the last one that is free
    made: list[Events] = []

    def making(_context: Any) -> Events:
        if not made:  # another library makes one at the same time
            opened.append(os.memfd_create("[infinibandevent]"))
        made.append(Events(rail))
        return made[-1]

    try:
        with channel_by(rail, making) as (channel, fd):
            assert channel is made[1] and fd == made[1]._file and not os.get_blocking(fd)
            assert len(made) == 2 and rail.closed == ["Events"], "two had appeared: it was made again"
            assert len(looked) < 20, "others may open and close some meanwhile"
    finally:
        for each in opened:
            os.close(each)


def test_issue_a_channel_with_a_number_that_was_taken_is_no_other_librarys(
    rail: ScriptedRail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only event file that is new is the other one's: ours would be waited for there, and theirs not block."""
    opened = [os.eventfd(0) for _ in range(3)]
    theirs: list[int] = []
    made: list[Events] = []
    real = work_requests._descriptors

    def names() -> set[str]:
        found = real()
        if not theirs:
            theirs.append(os.memfd_create("[infinibandevent]"))
            os.close(opened.pop(0))  # another thread's, of whose number ours will be
        return found

    def making(_context: Any) -> Events:
        made.append(Events(rail))
        return made[-1]

    monkeypatch.setattr(work_requests, "_descriptors", names)
    try:
        with channel_by(rail, making) as (channel, fd):
            assert channel is made[1] and fd == made[1]._file and not os.get_blocking(fd)
            assert os.get_blocking(theirs[0]) and rail.closed == ["Events"]
    finally:
        for each in opened + theirs:
            os.close(each)
