"""Mutations: put and delete, and the retry after a server that is not the owner.

A worker accepts mutations only of shards that it owns. WRONG_OWNER means that nothing has changed. The client then
tries again at the owner of the newest map, or at the same worker some milliseconds later, which may be about to adopt
the shard. It goes on until the deadline, counted from the beginning of the call.

A mutation of a shard without an owner is also retried while any server is up. When two servers shut down together, the
second may briefly inherit the first one's shards; the manager reassigns them once the remaining servers have
acknowledged the new map. If a server dies, the mutation fails at once: whether it was carried out is not known. What
is known not to be sent goes to another owner, if the map names one by then: who leaves has given its shards away.

A stream without room for a value drops its bytes at once, as it cannot wait for one client. So the client sends that
value again, for as long as a put through shared memory waits for room (``ipc/grant_pool.py``). Attempts of MAKING_S and
more do not count as time, as the worker may be making room; the client ends after ROOM_ASKS of them.

Of a duplicate key in a batch of puts only the last value is retried. Otherwise the earlier one could be stored after
it. Of all other mutations each is retried: two deletes of a key may want values of two sizes, and two groups may begin
with the same key.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..arena.hashing import shard_of
from ..arena.layout import ENTRY_CRC
from ..config.client_options import ClientOptions
from ..errors import DeviceError, PeerError
from ..host.buffers import Copier, DeviceBuffer, Pieces, Span
from ..host.parts import HOST_TYPES, checksum, has_device, host_pieces, on_device
from ..ipc.answer_wait import AnswerWait, forsake, take
from ..ipc.counts import DELETE, PUT, PUT_MANY, Word, observe
from ..ipc.grant_pool import MAKING_S, ROOM_AGAIN_S, ROOM_ASKS, ROOM_WAIT_S, room_of_call
from ..ipc.patience import Patience
from ..ipc.put import NOT_SENT, ShmPut
from ..ipc.steps import Steps, finish
from ..ipc.tally import Tallies
from ..net.allowance import allowed, spend
from ..net.channel import Refused
from ..wire import messages as M
from ..wire.group_messages import joined, requests_of
from ..wire.keep_messages import Keep
from ..wire.messages import Status, status_name
from .batch import PutBatch
from .reads import CALL_KEYS
from .routing import RetryPolicy, Routes
from .worker_path import Target

if TYPE_CHECKING:
    from .tcp import TcpPath

log = logging.getLogger("simm.client")


#: Values on a device that go by TCP are copied to host memory in parts of about so many bytes.
HOST_PART_BYTES: Final = 64 << 20

#: Pause before a value is sent again to a stream that had no room for it: the first, and the longest; seconds.
SEND_AGAIN_S: Final = (0.01, 0.1)

#: Carries out the mutation of the keys at these positions at one target, in steps, and fills in their statuses. With
#: the flag the call does the same at other targets at the same time.
_Act = Callable[[Target, Sequence[int], bool], Steps[None]]


class Puts:
    """A client's mutations. Any thread may call it."""

    def __init__(
        self, routes: Routes, shm: ShmPut, copier: Copier, options: ClientOptions, counters: dict[str, int],
        tallies: Tallies | None = None,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._shm = shm
        self._copier = copier
        self._checksum = options.checksum
        self._deadline_s = options.deadline_s
        self.counters = counters
        self._tallies = tallies or Tallies()
        #: Why the last put that failed did; empty if none has.
        self.last_failure = ""

    def put(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values, and count the results; return a Status for each."""
        statuses = self.store(digests, sources)
        self.count(digests, statuses)
        return statuses

    def count(self, digests: Sequence[bytes], statuses: Sequence[int]) -> None:
        """Count the results of puts, and note why the first that failed did."""
        done = statuses.count(Status.OK)
        failed = len(statuses) - done
        self.counters["puts"] += done
        if failed:
            self.counters["put_failures"] += failed
            failures = [(digest, status) for digest, status in zip(digests, statuses) if status != Status.OK]
            for digest, status in failures:
                if status == Status.WRONG_OWNER:  # until the end, so no server has counted it
                    self._counts_at(digest)[Word.PUT_FAILURES] += 1
            self.last_failure = self._explain(*failures[0])

    def _owner(self, digest: bytes) -> Target | None:
        """Return the owner that the map names now; None for none, and once the client is closed."""
        route = self._routes.route
        return route[shard_of(digest)] if route else None

    def _counts_at(self, digest: bytes) -> memoryview:
        """Return the counts of the path to a digest's owner; TCP's where there is none."""
        target = self._owner(digest)
        session = None if target is None else target.session
        return self._tallies.tcp if session is None else session.counts

    def _explain(self, digest: bytes, status: int) -> str:
        """Return why a put failed, as far as the client knows now."""
        router = self._routes.router
        if router is None:
            return "no manager has answered"
        target = router.route[shard_of(digest)]
        name = "" if target is None else f"{target.info.node}/{target.info.worker}"
        if status == Status.NO_SPACE:
            small = "its arena is too small for this value, or has no place for its namespace"
            return f"no room at {name}: all that could be evicted is in use, or {small}"
        if status == Status.WRONG_OWNER:
            return "the key's shard is moving, and no server took the value within the deadline"
        if status == Status.OVER_QUOTA:
            return f"the values of this namespace hold all that its quota allows at {name}, or it has no place there"
        if status == Status.OLD_EPOCH:
            router.subscription.refresh()
            return "the namespace has advanced since the call began"
        if status != Status.UNAVAILABLE:
            return f"{name} refused it: {status_name(status)}"
        if target is not None and target.path == "down" and not target.fresh:
            return f"{name} did not answer: {target.reason or 'the connection broke'}"
        if target is not None:  # it may be another one by now
            return "the server of its key did not answer: the connection broke, or the value could not be read"
        if not router.epoch:
            return f"no manager has answered: {router.subscription.down_reason}"
        return "no data server owns the key's shard"

    def store(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], patience: Patience | None = None
    ) -> list[int]:
        """Store values; return a Status for each. Not counted."""
        room = room_of_call(self._deadline_s / 2)
        batch = PutBatch(digests, sources, [Status.UNAVAILABLE] * len(digests), room)
        groups = self._routes.group(digests)
        act = functools.partial(self._put_at, batch)
        with self._routes.patience() if patience is None else contextlib.nullcontext(patience) as patience:
            self._at_owners(groups, digests, batch.statuses, act, patience, values=True)
        return batch.statuses

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        """Drop entries, with ``sizes`` only those whose values have these sizes; return a Status for each.

        Every other outcome than OK and NOT_FOUND counts as an outage: the entry may still be there, or this call may
        have dropped it.
        """
        statuses = [Status.UNAVAILABLE] * len(digests)
        self._everywhere(digests, statuses, functools.partial(self._delete_at, digests, sizes, statuses, set()))
        unknown = len(statuses) - statuses.count(Status.OK) - statuses.count(Status.NOT_FOUND)
        self.counters["outages"] += unknown
        return statuses

    def keep(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        """Keep entries for so many seconds, 0 to end it; return a Status for each."""
        statuses = [Status.UNAVAILABLE] * len(digests)
        self._everywhere(digests, statuses, functools.partial(self._keep_at, digests, how, seconds, statuses))
        return statuses

    def note_not_kept(self, status: int) -> None:
        """Note why a value that was put is not kept."""
        if status == Status.OVER_QUOTA:
            why = "the hard kept values of its namespace, or of all, have all the room that they may have"
        else:
            why = f"the server of its key answered {status_name(status)}"
        self.last_failure = f"a value is stored, but not kept: {why}"

    def group(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        """Make groups of stored values, the digests of each of one shard; return a Status for each group.

        Every other outcome than OK and NOT_FOUND counts as an outage: some of them may be a group.
        """
        statuses = [Status.UNAVAILABLE] * len(groups)
        firsts = [digests[0] for digests in groups]
        self._everywhere(firsts, statuses, functools.partial(self._group_at, groups, statuses))
        unknown = len(statuses) - statuses.count(Status.OK) - statuses.count(Status.NOT_FOUND)
        self.counters["outages"] += unknown
        return statuses

    def retry(self, target: Target, digest: bytes, source: memoryview | Span, began: float) -> int:
        """Retry a put that ``target`` has refused with WRONG_OWNER; return its Status. Not counted.

        ``began``: when the call did, monotonic seconds.
        """
        batch = PutBatch([digest], [source], [Status.WRONG_OWNER], room_of_call(self._deadline_s / 2))
        act = functools.partial(self._put_at, batch)
        with self._routes.patience() as patience:
            self._redirect([digest], batch.statuses, act, began, {0: target}, patience, values=True)
        return batch.statuses[0]

    # -- owners ---------------------------------------------------------------------------------------

    def _everywhere(self, digests: Sequence[bytes], statuses: list[int], act: _Act) -> None:
        groups = self._routes.group(digests)
        with self._routes.patience() as patience:
            self._at_owners(groups, digests, statuses, act, patience)

    def _at_owners(
        self, groups: Collection[tuple[Target | None, Sequence[int]]], digests: Sequence[bytes], statuses: list[int],
        act: _Act, patience: Patience, *, values: bool = False,
    ) -> None:  # fmt: skip
        began = time.monotonic()
        owners = [(target, positions) for target, positions in groups if target is not None]
        _act_at(owners, act, patience)
        asked: dict[int, Target | None] = {}
        if Status.WRONG_OWNER in statuses:
            for owner, positions in owners:
                asked.update((position, owner) for position in positions if statuses[position] == Status.WRONG_OWNER)
        if len(owners) < len(groups) and self._routes.has_servers:
            for target, positions in groups:
                if target is None:
                    asked.update(dict.fromkeys(positions))
                    for position in positions:
                        statuses[position] = Status.WRONG_OWNER
        if asked:
            self._redirect(digests, statuses, act, began, asked, patience, values=values)

    def _redirect(
        self, digests: Sequence[bytes], statuses: list[int], act: _Act, began: float,
        asked: dict[int, Target | None], patience: Patience, *, values: bool = False,
    ) -> None:  # fmt: skip
        """Retry what its target refused. ``began``: when the call did, monotonic seconds.

        ``values``: the mutations are puts, so that of one key only the last counts.
        """
        patience.count_all(began)
        retry = RetryPolicy(self._routes, patience.last_turn)
        last = {digests[position]: position for position in range(len(digests))} if values else {}
        replaced = [position for position in asked if last.get(digests[position], position) != position]
        for position in replaced:
            del asked[position]
        while True:
            todo = [position for position in asked if statuses[position] == Status.WRONG_OWNER]
            if not todo:
                break
            patience.settle()  # that server's time does not go on while this call waits for the next owner
            waits_since = time.monotonic()
            again = retry.wait([(digests[position], asked[position]) for position in todo])
            patience.take_off(time.monotonic() - waits_since)
            if not again:
                break
            count = len(todo)
            self.counters["redirects"] += count
            asked = {}
            owners = []
            for target, positions in self._routes.group(digests, todo):
                waits = target is None and self._routes.has_servers
                for position in positions:
                    statuses[position] = Status.WRONG_OWNER if waits else Status.UNAVAILABLE
                    asked[position] = target
                if target is not None:
                    owners.append((target, positions))
            _act_at(owners, act, patience)
        for position, target in asked.items():
            if target is None:  # until the time was up
                statuses[position] = Status.UNAVAILABLE
        for position in replaced:  # by a later one of the same batch
            statuses[position] = statuses[last[digests[position]]]

    # -- one target -----------------------------------------------------------------------------------

    def _go_on(self, target: Target, digests: Sequence[bytes], positions: Sequence[int], statuses: list[int]) -> None:
        """Let what a target that failed was not sent go on to the owner that the map names by now, if it is another."""
        for position in positions:
            if statuses[position] == NOT_SENT:
                owner = self._owner(digests[position])
                statuses[position] = Status.UNAVAILABLE if owner is None or owner is target else Status.WRONG_OWNER

    def _is_ready(
        self, target: Target, digests: Sequence[bytes], positions: Sequence[int], statuses: list[int]
    ) -> bool:
        """Return whether a target can be sent something; if it cannot, see :meth:`_go_on`."""
        if target.ready():
            return True
        for position in positions:
            statuses[position] = NOT_SENT
        self._go_on(target, digests, positions, statuses)
        return False

    def _put_at(self, batch: PutBatch, target: Target, positions: Sequence[int], together: bool) -> Steps[None]:
        digests, sources, statuses, room = batch
        session = target.session
        if session is None or session.broken:
            if not self._is_ready(target, digests, positions, statuses):
                return
            session = target.session
        if session is not None:
            began = time.perf_counter_ns()
            try:
                if together:
                    with session.brief():
                        yield from self._shm.put_steps(
                            session, digests, sources, positions, statuses, room, together=True
                        )
                elif len(positions) == 1:
                    position = positions[0]
                    statuses[position] = self._shm.put_one(session, digests[position], sources[position])
                else:
                    self._shm.put_many(session, digests, sources, positions, statuses, room)
            except PeerError as exc:
                self._routes.session_failed(target, session, exc)
                self._go_on(target, digests, positions, statuses)
            count_puts(session.counts, positions, batch, time.perf_counter_ns() - began)
            return
        if type(sources[positions[0]]) is Pieces and _has_devices(positions, sources):
            yield from self._put_hosted(target, positions, batch)
            return
        rdma = target.rdma
        device = None if rdma is None or rdma.down_reason is not None else _device_buffer(positions, sources)
        if rdma is None or device is None:
            yield from self._put_remote(target, positions, batch, sources)
            return

        def put_host(part: Sequence[int], hosted: Any, spare: Any) -> bool:
            return finish(self._put_remote(target, part, PutBatch(digests, hosted, statuses, room), spare))

        try:
            # The CPU cannot make checksums of values in a device's memory.
            device.put_by_rdma(put_host, positions, sources, () if self._checksum else rdma.rails)
        except DeviceError as exc:
            log.warning("a put out of GPU memory: %s", str(exc))

    def _put_hosted(self, target: Target, positions: Sequence[int], batch: PutBatch) -> Steps[None]:
        """Put values with pieces on a device by way of host memory, in parts of about ``HOST_PART_BYTES``."""
        left = list(reversed(positions))
        while left:
            hosted: dict[int, memoryview | Span] = {}
            size = 0
            while left and size < HOST_PART_BYTES:
                position = left.pop()
                source = batch.sources[position]
                size += len(source)
                try:
                    hosted[position] = Pieces([*host_pieces(source)])
                except DeviceError as exc:  # this does not affect the path
                    log.warning("a put out of GPU memory: %s", str(exc))
            if hosted:
                sources = [hosted.get(position, source) for position, source in enumerate(batch.sources)]
                part = PutBatch(batch.digests, sources, batch.statuses, batch.room)
                yield from self._put_remote(target, list(hosted), part, sources)

    def _put_remote(
        self, target: Target, positions: Sequence[int], batch: PutBatch, spare: Sequence[memoryview | Span]
    ) -> Steps[bool]:
        """Put by RDMA, and the keys that RDMA leaves over by TCP, from ``spare``; return whether there were none."""
        rdma, tcp, until = target.rdma, target.tcp, 0.0
        began = time.perf_counter_ns()
        if rdma is not None and rdma.down_reason is None:
            from .rdma_put import put  # the path has loaded it

            asked = positions
            call = put(rdma, positions, batch, self._copier, self._checksum, self.counters)
            positions, until = yield from call
            now = time.perf_counter_ns()
            count_puts(self._tallies.rdma, [*{*asked}.difference(positions)], batch, now - began)
            if not positions:
                return True
            began = now
        if positions and tcp is not None and target.bulk:
            for part in _host_parts(positions, spare):
                yield from self._put_tcp(target, tcp, part, batch, spare, until)
                until = 0.0
            count_puts(self._tallies.tcp, positions, batch, time.perf_counter_ns() - began)
        return False

    def _put_tcp(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: PutBatch,
        sources: Sequence[memoryview | Span], until: float,
    ) -> Steps[None]:  # fmt: skip
        entries = []
        try:
            for position in positions:
                views = host_pieces(sources[position])
                crc, flags = (checksum(views), ENTRY_CRC) if self._checksum else (0, 0)
                entries.append((batch.digests[position], views, crc, flags))
        except DeviceError as exc:  # this does not affect the path
            log.warning("a put out of GPU memory: %s", str(exc))
            return
        yield from self._store_tcp(target, tcp, dict(zip(positions, entries)), batch, until)
        if any(batch.statuses[position] == Status.NO_SPACE for position in positions):
            yield from self._send_again(target, tcp, dict(zip(positions, entries)), batch)

    def _store_tcp(
        self, target: Target, tcp: TcpPath, entries: Mapping[int, Any], batch: PutBatch, until: float
    ) -> Steps[None]:
        """Send entries, by position, and fill in their statuses. What is not answered may be stored."""
        for position in entries:
            batch.statuses[position] = Status.UNAVAILABLE
        answers = yield from self._routes.call_tcp(target, tcp, tcp.store(list(entries.values()), until))
        for position, status in zip(entries, answers):
            batch.statuses[position] = status

    def _send_again(self, target: Target, tcp: TcpPath, entries: dict[int, Any], batch: PutBatch) -> Steps[None]:
        """Send the values again for which there was no room, until they are stored or the patience for that ends."""
        last = {batch.digests[position]: position for position in entries}
        began = time.monotonic()
        left_s = allowed(tcp.deadline_s)  # half of it stays for the last attempt
        over = began + min(batch.room.left_s, left_s / 2)
        pause, longest = SEND_AGAIN_S
        makes, making_s = 0, 0.0  # attempts after which room is being made, or whose bytes take long, and their time
        while True:
            entries = {
                position: entry for position, entry in entries.items()
                if batch.statuses[position] == Status.NO_SPACE and last[batch.digests[position]] == position
            }  # fmt: skip
            asked = time.monotonic()
            if not entries or asked < tcp.no_wait_until or not target.bulk:
                break
            # A call with less to wait has not found out that no room comes.
            in_vain = makes >= ROOM_ASKS or asked + pause - began - making_s > ROOM_WAIT_S
            if in_vain or asked + pause > over:
                if in_vain:
                    tcp.no_wait_until = asked + ROOM_AGAIN_S
                break
            time.sleep(pause)
            yield from self._store_tcp(target, tcp, entries, batch, began + left_s)
            if (took := time.monotonic() - asked) - pause >= MAKING_S:
                makes, making_s = makes + 1, making_s + took
            pause = min(2 * pause, longest)
        waited = time.monotonic() - began
        batch.room.take(waited, in_vain=bool(entries))
        spend(waited)

    def _delete_at(
        self, digests: Sequence[bytes], sizes: Sequence[int] | None, statuses: list[int], twice: set[int],
        target: Target, positions: Sequence[int], together: bool,
    ) -> Steps[None]:  # fmt: skip
        """``twice``: positions of keys that a server may have dropped for an earlier request of this call."""
        if not self._is_ready(target, digests, positions, statuses):
            return
        kind: Callable[[Any], Any] = M.Delete if sizes is None else M.DeleteSized
        wanted: list[Any] = [digests[each] if sizes is None else (digests[each], sizes[each]) for each in positions]
        began = time.perf_counter_ns()
        session = target.session  # once: another thread may lose it
        counts = self._tallies.tcp if session is None else session.counts
        again: set[int] = set()
        answers = yield from self._ask(
            _parts(kind, wanted), target, together, lambda tcp: tcp.statuses(kind, wanted, twice=again)
        )
        twice.update([positions[each] for each in again])
        if twice:  # that such a key is not there says nothing
            answers = [
                Status.UNAVAILABLE if status == Status.NOT_FOUND and position in twice else status
                for position, status in zip(positions, answers)
            ]
        for position, status in zip(positions, answers):
            statuses[position] = status
        deleted, absent = answers.count(Status.OK), answers.count(Status.NOT_FOUND)
        counts[Word.DELETES] += deleted
        counts[Word.DELETES_ABSENT] += absent
        observe(counts, DELETE, time.perf_counter_ns() - began)

    def _keep_at(
        self, digests: Sequence[bytes], how: int, seconds: int, statuses: list[int], target: Target,
        positions: Sequence[int], together: bool,
    ) -> Steps[None]:  # fmt: skip
        if not self._is_ready(target, digests, positions, statuses):
            return
        kind = functools.partial(Keep, how, seconds)
        wanted = [digests[each] for each in positions]
        answers = yield from self._ask(_parts(kind, wanted), target, together, lambda tcp: tcp.statuses(kind, wanted))
        for position, status in zip(positions, answers):
            # A value on its way from the previous owner is here in a moment, and is asked for again.
            statuses[position] = Status.WRONG_OWNER if status == Status.PREVIOUS else status

    def _ask(
        self, requests: Iterable[Any], target: Target, together: bool, by_tcp: Callable[[TcpPath], Steps[list[int]]]
    ) -> Steps[list[int]]:
        """Ask a target for mutations that send no value; return the statuses of all requests, one after the other.

        Fewer, or none, if the target fails. ``by_tcp`` asks for the same by TCP.
        """
        session, tcp = target.session, target.tcp
        answers: list[int] = []
        if session is not None:
            try:
                with session.brief() if together else contextlib.nullcontext():
                    for asked in requests:
                        sent: list[tuple[int, None]] = []
                        try:
                            ticket = session.submit(asked, sent)
                            if together:
                                session.kick()
                                yield AnswerWait(session, ticket)
                            answer = take(session, ticket)
                        except Refused:
                            raise
                        except BaseException:
                            forsake(session, [each for each, _ in sent])
                            raise
                        answers += session.checked_locked(asked, answer).statuses
            except PeerError as exc:
                self._routes.session_failed(target, session, exc)
        elif tcp is not None:
            answers = yield from self._routes.call_tcp(target, tcp, by_tcp(tcp))
        return answers

    def _group_at(
        self, groups: Sequence[Sequence[bytes]], statuses: list[int], target: Target, positions: Sequence[int],
        together: bool,
    ) -> Steps[None]:  # fmt: skip
        if not self._is_ready(target, [group[0] for group in groups], positions, statuses):
            return
        parts = list(requests_of([groups[each] for each in positions]))
        answers = yield from self._ask(map(joined, parts), target, together, lambda tcp: tcp.group(parts))
        for position, status in zip(positions, answers):
            statuses[position] = status


def _parts(kind: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield requests made by ``kind`` of CALL_KEYS items at most."""
    for start in range(0, len(items), CALL_KEYS):
        yield kind(items[start : start + CALL_KEYS])


def count_puts(counts: memoryview, positions: Sequence[int], batch: PutBatch, ns: int) -> None:
    """Count what a batch has put at one server by one path, or could not. What was another server's counts there."""
    if not positions:
        return
    statuses, sources = batch.statuses, batch.sources
    stored = [position for position in positions if statuses[position] == Status.OK]
    # No calls while counting: a thread that counts meanwhile would be undone.
    size = sum([len(sources[position]) for position in stored])
    done, failed = len(stored), 0
    if done < len(positions):
        failed = sum([statuses[position] not in (Status.OK, Status.WRONG_OWNER) for position in positions])
    counts[Word.BATCH_PUTS] += done
    counts[Word.PUT_BYTES] += size
    counts[Word.PUT_FAILURES] += failed
    observe(counts, PUT if len(positions) == 1 else PUT_MANY, ns)


def _act_at(owners: Collection[tuple[Target, Sequence[int]]], act: _Act, patience: Patience) -> None:
    """Carry out a mutation at all owners, at the same time if they are several."""
    if len(owners) > 1:
        patience.together((target, act(target, positions, True)) for target, positions in owners)
        return
    for target, positions in owners:
        if patience.has_time_for(target):
            finish(act(target, positions, False))


def _device_buffer(positions: Sequence[int], sources: Sequence[memoryview | Span]) -> DeviceBuffer | None:
    """Return the first source on a device; None if the CPU addresses all of them."""
    if HOST_TYPES.issuperset(map(type, map(sources.__getitem__, positions))):
        return None
    return next(source for position in positions if on_device(source := sources[position]))


def _has_devices(positions: Sequence[int], sources: Sequence[memoryview | Span]) -> bool:
    """Return whether a batch of pieces has some on a device. If one source is pieces, all are."""
    return any(has_device(source.parts) for source in map(sources.__getitem__, positions) if type(source) is Pieces)


def _host_parts(positions: Sequence[int], sources: Sequence[memoryview | Span]) -> Iterator[Sequence[int]]:
    """Yield the positions, in parts of about ``HOST_PART_BYTES`` if some sources must be copied to host memory."""
    if _device_buffer(positions, sources) is None:
        yield positions
        return
    part: list[int] = []
    total = 0
    for position in positions:
        if part and total + len(sources[position]) > HOST_PART_BYTES:
            yield part
            part, total = [], 0
        part.append(position)
        total += len(sources[position])
    yield part
