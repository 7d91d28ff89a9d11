"""Unused grants: the pool of a session or of an RDMA connection, and every rule about keeping and returning them.

A *grant* is a chunk that one holder may write, once. The holder gets grants ahead of need, so that a PUT is one copy
and one commit. Everything that holds grants keeps those that nobody writes into in a :class:`GrantPool`: the puts on
the worker's host (``ipc/put.py``), streams, movers and endpoints by their sessions with the worker, and an RDMA client
(``sdk/rdma_put.py``) by its connection, from the endpoint.

The pool is memory only. Three functions below add the exchanges, for every holder alike: :func:`obtain` gets grants,
:func:`return_idle` returns them, :func:`maintain` does what has become due. A grant moves in one circle:

    worker --answer--> pool --take--> a copy --commit--> spent
                        ^  \\            |
                        |   return      | release: the copy ended early
                        |               v
                        +---------------+

What can go wrong
-----------------
* *A grant is used twice.* Two copies would share a chunk, or a copy would write into a published value. ``list.pop``
  and ``list.append`` are atomic, so a grant is in the pool or with one thread. ``release`` is allowed only before the
  commit is sent. After that the id may be spent, whatever becomes of the answer.
* *A grant leaks.* Its chunk is of no use until the session ends. So every stock is made by ``dict.setdefault`` and is
  never replaced while its pool lives. Answers that a caller no longer waits for are collected all the same. A copy that
  fails releases its grant. A put whose commit fails has it returned (``unsent``): the session may live on, where its
  thread has waited for it until the deadline, or was interrupted meanwhile, and the commit may have been sent.
* *A recall meets a PUT.* Only grants in the pool are returned, and no copy writes into those. What is taken stays with
  its thread, so a recall may bring less than was asked for.
* *A holder hoards.* A pool keeps :func:`target_count` grants of a size; above 4 MiB none, except one while values of
  that very size keep coming (:meth:`GrantPool.repeats_large`). The worker caps the sum of all sessions at 1/8 of its
  arena, of which each gets a share, and the endpoint caps each of its connections. Idle pools are returned on request.
* *One size starves another.* A slab with one granted chunk cannot change its size class. So a holder that gets nothing
  returns all that it keeps of any size, and then asks once more (:func:`obtain`).
* *Holders wait for each other.* So none waits for a grant while holding an uncommitted one: callers commit what is
  copied before they ask. The worker never waits either, it answers with fewer grants.
* *All grants are with others.* The worker recalls idle ones, and other threads spend theirs. So a caller that may wait
  does, for up to half of what its call has left (:func:`obtain`). All waits of one call, for whatever values and
  servers, share one :class:`RoomWait`. A value in parts that comes forward gets back what its parts have waited,
  but for waits in vain: with two copies of each part, one may be stored although there was no room for the other.
* *Those who wait starve*, as whoever has just put is the first to ask again: with 4 threads and room for 2 grants, half
  of the puts failed. So callers of one pool wait in a :class:`~.patience.Line`. The first one asks, with pauses; the
  others sleep until it is their turn. While somebody waits, no put asks for grants ahead, and who comes joins the line.
* *There is no room to come*, as in an arena full of pins. The first in the line gives up after ROOM_WAIT_S and
  ROOM_ASKS requests without a grant, and those behind it with it. Puts of this pool do not wait again for
  ROOM_AGAIN_S: a batch pays once. Time in the line before does not count, as grants came in it. Nor do requests of
  MAKING_S and more: that long takes a grantor that makes room, and one that has none to make says so sooner.
* *The grantor ends.* Its grants are void: ``clear`` empties the pool with the session.

Stocks are plain lists by chunk size, last in first out: the chunk used last is warm in the caches. A PUT looks up its
stock by value length, in ``by_length``, which may forget at any time. There is no lock, so counts are estimates while
other threads take; a pool may overshoot its target by as many grants as commits were in flight.

A signal's handler may raise once ``list.pop`` has returned, and before the grant is anybody's. So grants are taken by
steps of an iterator, as locks are (``net/allowance.py``): no handler runs between such a step and the assignment.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from ..errors import NotSentError, RemoteProtocolError
from ..net.allowance import ALLOWANCE, allowed, at_most, spend
from ..rpc import batches
from ..slab import chunk_bytes_for
from .patience import Line

#: (grant id, offset in the segment, chunk bytes)
GrantTuple = tuple[int, int, int]
#: The same, and the remote key of each link of an RDMA connection.
KeyedGrant = tuple[int, int, int, Sequence[int]]
G = TypeVar("G", GrantTuple, KeyedGrant)

#: A pool keeps this many bytes of grants of a chunk size, and at most this many grants.
TARGET_BYTES: Final = 4 << 20
TARGET_MAX: Final = 64
#: Of larger chunks a pool keeps one grant at most: see GrantPool.repeats_large.
LARGE_BYTES: Final = 4 << 20
#: A large grant is kept only if this many of them fit what all sessions together may hold.
LARGE_SHARE: Final = 8
#: Large grants are returned when no large value has been put for this long, seconds.
LARGE_IDLE_S: Final = 1.0
#: One request asks for at most this many bytes of grants, and this many grants.
REQUEST_BYTES: Final = 32 << 20
REQUEST_MAX: Final = 1024
#: While a pool is low, a commit asks for this many grants more than it spends. The worker makes them between two puts.
TOP_UP: Final = 4
#: The first in a line gives up after so many seconds, and so many requests. Holders that are asked for idle grants
#: answer within 0.1 s. On a busy machine the time may be over after one request.
ROOM_WAIT_S: Final = 0.5
ROOM_ASKS: Final = 10
#: Requests that take so long do not count as time: the grantor makes room, a quarter of a second's work for each.
MAKING_S: Final = 0.2
#: After a wait in vain none waits again for so long, seconds.
ROOM_AGAIN_S: Final = 1.0
#: Pause between two requests of a put that waits: the first, and the longest; seconds.
ROOM_PAUSE_S: Final = (0.001, 0.02)
#: Value lengths that a pool remembers the stocks of.
LENGTHS_MAX: Final = 1024


@functools.lru_cache(maxsize=1024)
def target_count(chunk: int) -> int:
    """Return how many grants of a chunk size a pool keeps; 0 for large ones."""
    if chunk > LARGE_BYTES:
        return 0
    return max(2, min(TARGET_MAX, TARGET_BYTES // chunk))


def request_count(chunk: int, needed: int) -> int:
    """Return how many of ``needed`` grants one request asks for; at least 1."""
    return max(1, min(needed, REQUEST_MAX, REQUEST_BYTES // chunk))


def refill_count(have: int, spent: int, left: int, target: int) -> int:
    """Return how many grants a commit asks for, if nobody waits in the pool's line.

    The commit spends ``spent`` grants, the pool has ``have`` of ``target``, and ``left`` puts follow in this call. What
    earlier commits asked for and no answer has brought yet is not counted. While the pool has half of what it should
    have, asking for what is spent keeps the sum of both.
    """
    most = target + min(left, target)
    if have >= most:
        return 0
    if have * 2 >= most:
        return spent
    return spent + min(max(TOP_UP, spent), most - have)


def single_count(have: int, target: int) -> int:
    """Return how many grants the commit of a single put asks for, which leaves ``have`` of ``target`` in the pool.

    A quarter of the target, each time that another quarter has been spent: the worker then makes room for as many
    values at once. What was asked for is on its way while the next quarter is spent. One for one in a small pool.
    """
    quarter = target >> 2
    if have < quarter or quarter < 2:
        return refill_count(have, 1, 0, target)
    return quarter if have < target and not have % quarter else 0


def pops_of(stock: list[G]) -> Iterator[G]:
    """Return an iterator each of whose steps takes a grant, or raises IndexError. See above. Any thread may step it."""
    return map(stock.pop, repeat(-1))


def _refuse(text: str) -> NoReturn:
    raise RemoteProtocolError(text)


class GrantPool(Generic[G]):
    """The unused grants of one holder. Any thread may call it; no method waits."""

    __slots__ = (
        "_handled", "_large", "by_length", "bytes_max", "fail", "line", "no_wait_until", "recalled", "running",
        "stocks", "unsent", "within",
    )  # fmt: skip

    def __init__(self) -> None:
        #: By chunk bytes. A stock is never replaced, see above.
        self.stocks: dict[int, list[G]] = {}
        #: By value length: the stock, its target, its :func:`pops_of`. Filled by for_length; a PUT looks here first.
        self.by_length: dict[int, tuple[list[G], int, Iterator[G]]] = {}
        #: What all sessions of the grantor may hold together, bytes; 0 keeps no large grants.
        self.bytes_max = 0
        #: Begin and end of the offsets that a grant may cover, and what raises for another one: it ends the session.
        self.within = (0, 1 << 63)
        self.fail: Callable[[str], NoReturn] = _refuse
        #: Ids of grants that were taken, and whose commit failed: they are to be returned. If that was sent after all,
        #: the grant is spent, and the grantor ignores its id, which no other grant ever has.
        self.unsent: list[int] = []
        #: Ids of grants that stay taken for good: a device may still write their chunks.
        self.running: list[int] = []
        #: Threads that wait for room.
        self.line = Line()
        #: No put waits for room before then, monotonic seconds.
        self.no_wait_until = 0.0
        #: Sum of all recalls, bytes; only grows.
        self.recalled = 0
        self._handled = 0
        #: Chunk bytes of the large value put last, and when.
        self._large = (0, 0.0)

    def __repr__(self) -> str:
        return f"<GrantPool {sum(map(len, self.stocks.values()))} grants>"

    # -- taking and adding ------------------------------------------------------------------------

    def take(self, length: int) -> G | None:
        """Take a grant for a value of ``length`` bytes; None if there is none."""
        stock, _, pops = self.by_length.get(length) or self.for_length(length)
        if stock:
            try:
                for grant in pops:
                    return grant
            except IndexError:  # another thread was faster
                return None
        return None

    def take_many(self, length: int, count: int) -> list[G]:
        """Take up to ``count`` grants for values of ``length`` bytes."""
        part = islice(self.for_length(length)[2], max(0, count))
        taken: list[G] = []
        try:
            taken += part  # what came before an error stays in the list
        except IndexError:
            pass
        return taken

    def release(self, grant: G) -> None:
        """Put a grant back that was taken and not committed. No copy into it may still run."""
        stock = self.stocks.get(grant[2])
        if stock is None:
            stock = self.stocks.setdefault(grant[2], [])
        stock.append(grant)

    def give_back(self, grant: G | None, crc: int) -> None:
        """Give back the grant of a failed put. ``crc``: -1 if its value was not copied, so nothing was sent."""
        if grant is not None and crc >= 0:
            self.unsent.append(grant[0])
        elif grant is not None and grant[0] not in self.running:
            self.release(grant)

    def add(self, grants: Sequence[G]) -> None:
        """Add grants, all of them or none, as :meth:`placed` says."""
        place, items = self.placed(grants)
        place += items

    def placed(self, grants: Sequence[G]) -> tuple[list[Any], Iterable[Any]]:
        """Return a list, and what to add to it by one ``+=``: that adds the grants of an answer.

        No handler runs within it. Raises PeerError, by ``fail``, for a grant that leads out of ``within``.
        """
        begin, end = self.within
        chunk = grants[0][2] if grants else 0
        alike = True
        for grant in grants:
            if not begin <= grant[1] <= end - grant[2]:
                self.fail(f"a grant of {grant[2]} bytes at {grant[1]}, which is outside of the data")
            if grant[2] != chunk:
                alike = False
        if not alike:
            return [], map(list.append, [self.stock(grant[2]) for grant in grants], grants)
        stock = self.stocks.get(chunk)
        if stock is None:
            stock = self.stock(chunk) if grants else []
        return stock, grants

    def drain(self, wanted: int | None = None, above: int = 0) -> list[G]:
        """Take grants of at least ``wanted`` bytes out, or all; only those of chunks of more than ``above`` bytes."""
        taken: list[G] = []
        freed = 0
        try:
            for chunk, stock in list(self.stocks.items()):
                if chunk > above and stock and (wanted is None or freed < wanted):
                    before = len(taken)
                    part = islice(pops_of(stock), len(stock) if wanted is None else -((freed - wanted) // chunk))
                    with contextlib.suppress(IndexError):  # other threads take some, too
                        taken += part
                    freed += (len(taken) - before) * chunk
        except BaseException:  # interrupted
            self.add(taken)
            raise
        return taken

    def clear(self) -> None:
        """Forget all grants: their grantor is gone, or takes them back with the connection."""
        self.stocks.clear()
        self.by_length.clear()
        self.unsent.clear()

    # -- counts -----------------------------------------------------------------------------------

    def stock(self, chunk: int) -> list[G]:
        """Return the grants of one chunk size, the very list."""
        stock = self.stocks.get(chunk)
        return stock if stock is not None else self.stocks.setdefault(chunk, [])

    def for_length(self, length: int) -> tuple[list[G], int, Iterator[G]]:
        """Return the stock for values of ``length`` bytes, its target and pops. ``by_length`` has it from now on."""
        known = self.by_length.get(length)
        if known is None:
            if len(self.by_length) >= LENGTHS_MAX:
                self.by_length.clear()
            chunk = chunk_bytes_for(length)
            stock = self.stock(chunk)
            known = self.by_length[length] = stock, target_count(chunk), pops_of(stock)
        return known

    def count(self, length: int) -> int:
        """Return the number of grants for values of ``length`` bytes."""
        return len(self.stocks.get(chunk_bytes_for(length), ()))

    def prefetch_count(self, chunk: int, count: int) -> int:
        """Return how many grants are missing to serve a request for ``count`` now, and the same once more."""
        return max(0, count - max(0, len(self.stock(chunk)) - count))

    def refill(self, have: int, spent: int, left: int, target: int) -> int:
        """Return how many grants a commit asks for: none while others wait for room, whose turn it is."""
        return 0 if self.line else refill_count(have, spent, left, target)

    # -- recalls and large values -----------------------------------------------------------------

    def recall(self, nbytes: int) -> None:
        """Note that the grantor asks for about ``nbytes`` bytes of idle grants."""
        self.recalled += nbytes

    def take_recalled(self) -> int:
        """Return the bytes recalled since the last call. For one thread, which may be another than recall()'s."""
        recalled = self.recalled
        wanted, self._handled = recalled - self._handled, recalled
        return wanted

    def repeats_large(self, chunk: int) -> bool:
        """Note that a large value is put. Return True if a grant for another one is worth keeping.

        That is so if the last large value had the same size, not long ago, and such grants are a small part of
        ``bytes_max``. A size that comes once leaves no grant behind: it would cost the store as many bytes of values.
        """
        now = time.monotonic()
        (last, at), self._large = self._large, (chunk, now)
        return last == chunk and now - at < LARGE_IDLE_S and chunk * LARGE_SHARE <= self.bytes_max

    def large_is_over(self) -> bool:
        """Return True, once, when no large value has been put for LARGE_IDLE_S."""
        chunk, at = self._large
        if not chunk or time.monotonic() - at <= LARGE_IDLE_S:
            return False
        self._large = (0, 0.0)
        return True

    def large_is_left(self) -> None:
        """Let :meth:`large_is_over` return True once more: large grants could not be returned."""
        self._large = (self._large[0] or 1, self._large[1])


class RoomWait:
    """How long one call may still wait for room, whatever the number of its values and servers: ``left_s`` seconds."""

    __slots__ = ("left_s", "vain_s")

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s
        #: How long it has waited without getting any, seconds.
        self.vain_s = 0.0

    def take(self, seconds: float, *, in_vain: bool) -> None:
        """Take a wait of so many seconds off. ``in_vain``: no room came."""
        self.left_s -= seconds
        if in_vain:
            self.vain_s += seconds


def room_of_call(left_s: float) -> RoomWait:
    """Return what the call that this thread is in shares among its parts, or else a wait of so many seconds."""
    mine = ALLOWANCE.mine
    mine.look()
    return RoomWait(left_s) if mine.room is None else mine.room


class GrantHolder(Protocol[G]):
    """A WorkerSession, or an RDMA connection."""

    @property
    def pool(self) -> GrantPool[G]:
        """Its unused grants."""

    def ask(self, wants: Sequence[tuple[int, int]]) -> Any:
        """Ask the grantor for (value bytes, count) and add what comes to the pool. Raises TransportError."""

    def return_grants(self, numbers: Sequence[int]) -> Any:
        """Return grants by id. Raises TransportError."""


def obtain(
    holder: GrantHolder[G], length: int, count: int = 1, *, retry: int = 1, room: RoomWait | None = None,
    wait_s: float = math.inf,
) -> G | None:  # fmt: skip
    """Ask for ``count`` grants and take one; None if the grantor has no room.

    If none comes, all pooled grants are returned, and ``retry`` grants are asked for. With ``room``, the caller then
    stands in the pool's line for ``wait_s`` seconds, half of what its call has left, and what ``room`` has left at
    most. If others wait already it does so at once. Three exchanges at most without a wait. The caller holds no
    uncommitted grant. Raises TransportError.
    """
    pool = holder.pool
    grant: G | None = None
    if room is None or not pool.line:
        holder.ask([(length, count)])
        grant = pool.take(length)
        if grant is None and return_idle(holder):
            holder.ask([(length, retry)])
            grant = pool.take(length)
    if grant is None and room is not None:
        began = time.monotonic()
        wait_s = min(wait_s, room.left_s, allowed(math.inf) / 2)
        if wait_s > 0.0 and began >= pool.no_wait_until:
            try:
                with at_most(ALLOWANCE.seconds):
                    grant = _wait_for_room(holder, length, began + wait_s)
            finally:
                waited = time.monotonic() - began
                room.take(waited, in_vain=grant is None)
                spend(waited)
    return grant


def _wait_for_room(holder: GrantHolder[G], length: int, until: float) -> G | None:
    """Stand in the line, and ask for one grant until it comes, or until the time is up."""
    pool = holder.pool
    place = threading.Lock()
    try:
        if not pool.line.wait(place, until - time.monotonic()):
            return None
        return _ask_again(holder, length, until)
    finally:
        pool.line.leave(place)


def _ask_again(holder: GrantHolder[G], length: int, until: float) -> G | None:
    """Do :func:`_wait_for_room` as the first in the line."""
    pool = holder.pool
    pause, longest = ROOM_PAUSE_S
    asks = 0
    began = time.monotonic()
    making_s = 0.0
    while (now := time.monotonic()) >= pool.no_wait_until:
        enough = asks >= ROOM_ASKS, now - began - making_s >= ROOM_WAIT_S
        if all(enough) or now >= until:
            if any(enough):
                pool.no_wait_until = now + ROOM_AGAIN_S
            break
        time.sleep(min(pause, until - now))
        pause = min(2 * pause, longest)
        grant = pool.take(length)  # other threads release some, and their answers bring some
        if grant is None:
            asked = time.monotonic()
            holder.ask([(length, 1)])
            asks += 1
            if (took := time.monotonic() - asked) >= MAKING_S:
                making_s += took
            grant = pool.take(length)
        if grant is not None:
            return grant
        return_idle(holder)
    return None


def obtain_many(holder: GrantHolder[G], length: int, count: int) -> list[G]:
    """Take up to ``count`` grants for values of one length, and ask for those that the pool lacks.

    One exchange at most. Raises TransportError; what was taken is back in the pool then.
    """
    pool = holder.pool
    taken = pool.take_many(length, count)
    if len(taken) < count:
        try:
            holder.ask([(length, count - len(taken))])
        except BaseException:
            pool.add(taken)
            raise
        taken += pool.take_many(length, count - len(taken))
    return taken


def obtain_each(holder: GrantHolder[G], lengths: Sequence[int]) -> list[G | None]:
    """Return a grant for each value, or None for those without room. One exchange at most.

    Raises TransportError; what was taken is back in the pool then.
    """
    pool = holder.pool
    found = [pool.take(length) for length in lengths]
    wants: dict[int, int] = {}
    for length, grant in zip(lengths, found):
        if grant is None:
            wants[length] = wants.get(length, 0) + 1
    if not wants:
        return found
    try:
        holder.ask(list(wants.items()))
    except BaseException:
        pool.add([grant for grant in found if grant is not None])
        raise
    return [grant or pool.take(length) for length, grant in zip(lengths, found)]


def return_idle(holder: GrantHolder[G], wanted: int | None = None, *, above: int = 0) -> int:
    """Return pooled grants to the grantor: about ``wanted`` bytes, or all. Return their bytes.

    Only grants of chunks of more than ``above`` bytes are returned. Raises TransportError.
    """
    grants = holder.pool.drain(wanted, above)
    done = sent = 0
    try:
        for part in batches(grants):
            numbers = [grant[0] for grant in part]
            done, sent = sent, sent + len(part)  # these may be the grantor's from now on, whether it answers or not
            holder.return_grants(numbers)
    except BaseException as exc:
        holder.pool.add(grants[done if isinstance(exc, NotSentError) else sent :])
        raise
    return sum(grant[2] for grant in grants)


def return_all(holder: GrantHolder[G], *, above: int = 0) -> None:
    """:func:`return_idle` of all, those included that the grantor has prepared and not yet sent."""
    holder.ask([])  # any answer brings what is prepared
    return_idle(holder, above=above)


def maintain(holder: GrantHolder[G]) -> int:
    """Return what was recalled, what could not be committed, and large grants that are no longer used.

    Call it periodically. Return the bytes recalled since the last call. Raises TransportError.
    """
    pool = holder.pool
    wanted = pool.take_recalled()
    if wanted:
        try:
            return_idle(holder, wanted)
        except NotSentError:
            pool.recall(wanted)
            raise
    if pool.unsent:
        return_unsent(holder)
    if pool.large_is_over():
        try:
            return_all(holder, above=LARGE_BYTES)
        except NotSentError:
            pool.large_is_left()
            raise
    return wanted


def return_unsent(holder: GrantHolder[G]) -> None:
    """Return the grants whose commit failed. Raises TransportError."""
    unsent = holder.pool.unsent
    for part in batches(unsent.copy()):
        holder.return_grants(part)
        del unsent[: len(part)]  # other threads append
