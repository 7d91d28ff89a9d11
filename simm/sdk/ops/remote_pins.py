"""Values that a stream pins for one connection of this client: how :class:`~.pins.Pins` holds them elsewhere.

The connection is taken out of the path's pool and used for nothing else until the values are released: it is the lease.
When it breaks, so does the hold of all its values by TCP, and they are misses from then on.

By RDMA values are read as any others (``sdk/ops/rdma_ranges.py``), from the slots that have just these versions. That
needs no pin to be right. The lease keeps the versions in their places, and sends by TCP what its slot has no more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...constants import RANGES_MAX, VALUE_BYTES_MAX
from ...errors import DeadlineError, PeerError, TransportError
from ...host.buffers import Copier, DeviceCopy, Part, Ranges, address_of
from ...host.parts import has_device, in_host_memory, scatter
from ...ipc.patience import Patience
from ...ipc.steps import Polled, Steps
from ...net.allowance import allowed, tries_within
from ...net.channel import Channel, ChannelWait
from ...rpc import batches
from ...slab import SLOTS_MAX
from ...wire import messages as M
from ...wire.messages import Status
from ..batch import EXCHANGE_BYTES, EXCHANGE_KEYS, UNAVAILABLE, Batch, chunks
from ..routing import Routes
from ..tcp import PIECE_BYTES, TcpPath, judged, receive_large, receive_ranges
from ..worker_path import Target
from .checked import Check, Checked, bytes_of, packed

if TYPE_CHECKING:
    from ...rdma.remote_arena import RemoteArena
    from .parts import Rows
    from .rdma_ranges import Version

log = logging.getLogger("simm.client")

#: A lease whose values are read by RDMA alone tells the server so after so many seconds: a quarter of its ``LEASE_S``.
QUIET_S: Final = 15.0
#: What PINNED says of a value.
Entry = tuple[int, int, int, int, int, int, int]
_NOWHERE: Entry = (Status.UNAVAILABLE, 0, 0, 0, 0, 0, 0)


class RemotePins:
    """The values of one lease. One thread at a time calls it; those that read do so within :meth:`in_turn`."""

    def __init__(
        self, target: Target, path: TcpPath, channel: Channel, routes: Routes, copier: Copier,
        check: Check | None, counters: dict[str, int],
    ) -> None:  # fmt: skip
        self.target = target
        self._routes = routes
        self._path = path
        self._channel = channel
        self._copier = copier
        self._check = check
        self.counters = counters
        self._lock = threading.Lock()
        #: How many exchanges have begun.
        self._turns = 0
        #: When the last exchange with the stream began, monotonic seconds.
        self._told_at = 0.0
        #: By number: handle, flags, length and crc.
        self._values: dict[int, tuple[int, int, int, int]] = {}
        #: Handles of values that are gone. The server keeps them until it is told.
        self._gone: list[int] = []
        #: The numbers of the UNPINs that have been sent.
        self._unpinning: list[int] = []
        #: By number: those of the values that are checked.
        self._checked: dict[int, Checked] = {}
        #: By number: what RDMA reads.
        self._versions: dict[int, tuple[bytes, Version]] = {}
        #: Whether UNPINs have been sent for whose answers nobody waits.
        self._unasked = False
        #: Of the arena that the stream has pinned in last.
        self._generation = 0

    @classmethod
    def at(
        cls, target: Target, routes: Routes, copier: Copier, check: Check | None,
        counters: dict[str, int],
    ) -> Steps[RemotePins | None]:  # fmt: skip
        """Return a lease at a server, or None if it cannot be reached."""
        path = target.tcp
        if path is None:
            return None
        try:
            channel = yield from path.take_out(time.monotonic() + allowed(path.deadline_s))
        except PeerError as exc:
            target.tcp_lost(path, str(exc))
            routes.wake()
            return None
        return cls(target, path, channel, routes, copier, check, counters)

    def pin(self, keys: Sequence[tuple[int, bytes]], *, previous: bool) -> Steps[list[Entry]]:
        """Pin values, (number, digest) each; return PINNED's entry of each."""
        channel = self._channel
        entries: list[Entry] = []
        with self._failing(len(keys)):
            for start in range(0, len(keys), EXCHANGE_KEYS):
                part = keys[start : start + EXCHANGE_KEYS]
                self._bound()
                number = channel.submit(M.Pin(int(previous), [digest for _, digest in part]))
                yield ChannelWait(channel, number, last=start + EXCHANGE_KEYS >= len(keys))
                answer = channel.result(channel.wait(number))
                if not isinstance(answer, M.Pinned) or len(answer.entries) != len(part):
                    channel.fail("the server answered PIN with something else")
                if any(entry[0] == Status.OK and not 0 < entry[2] <= VALUE_BYTES_MAX for entry in answer.entries):
                    channel.fail("the server pinned a value of a length that none has")
                if any(entry[6] >= SLOTS_MAX for entry in answer.entries):
                    channel.fail("the server pinned a value in a slot that no arena has")
                entries += answer.entries
                self._generation = generation = answer.generation
                for (value, digest), (status, flags, length, crc, handle, seq, slot) in zip(part, answer.entries):
                    if status == Status.OK:
                        self._values[value] = handle, flags, length, crc
                        if self._check is not None and (checked := Checked.of(length, flags, crc)):
                            self._checked[value] = checked
                        self._versions[value] = digest, (generation, slot, seq, length, crc)
        return entries + [_NOWHERE] * (len(keys) - len(entries))

    def in_turn(self, work: Steps[None], count: int, patience: Patience) -> Steps[None]:
        """Do work by this lease, for so many values, once no other thread does any.

        A thread that does any is waited for as long as it comes forward. Once it has not for a deadline, the work is
        left out, which ``patience`` loses this wait for.
        """
        got = False
        turns, waits_s, since, until = -1, 0.0, 0.0, 0.0
        try:
            while True:
                (got,) = tries_within(self._lock, waits_s)
                if got:
                    break
                now = time.monotonic()
                if now >= until:
                    if turns == self._turns:
                        self.counters["outages"] += count
                        patience.take_off(now - since)
                        return
                    turns, since, until = self._turns, now, now + allowed(self._path.deadline_s)
                over = yield Polled(partial(self._may_look, until), math.inf)
                waits_s = 0.0 if over else until - time.monotonic()
            yield from work
        finally:
            if got:
                self._lock.release()

    def _may_look(self, until: float) -> bool:
        """Return whether the lease is free, or it is that time."""
        return not self._lock.locked() or time.monotonic() >= until

    def read(self, wants: Sequence[tuple[int, Ranges]], results: dict[int, Any]) -> Steps[None]:
        """Read ranges of values; fill in results by number: above 0 for a hit. Raises DeviceError."""
        wants = [want for want in wants if want[0] in self._values]
        parts = chunks(
            [(at, self._wanted_bytes(*want)) for at, want in enumerate(wants)], lambda at: len(wants[at][1].parts)
        )
        for part in parts:
            yield from self._read([wants[at] for at in part], results)

    def _wanted_bytes(self, number: int, ranges: Ranges) -> int:
        value = self._checked.get(number)
        return ranges.total if value is None else bytes_of(value.runs(ranges))

    def _read(self, wants: Sequence[tuple[int, Ranges]], results: dict[int, Any]) -> Steps[None]:
        """Do one exchange of :meth:`read`."""
        self._turns += 1
        hosted: list[Ranges] = []
        finals: list[Any] = []
        for number, ranges in wants:
            final: Any = None
            value = self._checked.get(number)
            if value is not None:
                runs = value.runs(ranges)
                room = np.empty(bytes_of(runs), np.uint8).data  # all of the exchange's live until its end
                final = value, room, runs, ranges
                parts: list[Part] = []
                used = 0
                for first, end in runs:
                    parts.append((first, end - first, 0, room[used : used + end - first]))
                    used += end - first
                ranges = Ranges(parts, runs[-1][1], used)
            elif has_device(part[3] for part in ranges.parts):
                ranges, final = in_host_memory(ranges)
            hosted.append(ranges)
            finals.append(final)
        left: Sequence[int] = range(len(wants))
        numbers = [number for number, _ in wants]
        rdma = self.target.rdma
        if (
            rdma is not None and rdma.down_reason is None and self._is_of(rdma.arena)
            and self._checked.keys().isdisjoint(numbers)
        ):  # fmt: skip
            from .rdma_ranges import read_versions  # the path has loaded it

            batch = Batch([self._versions[number][0] for number in numbers], hosted)
            versions = [self._versions[number][1] for number in numbers]
            left = yield from read_versions(rdma, batch, versions, self._copier, self.counters)
            if not left:
                self._stay()
        answers = (yield from self._fetch(numbers, hosted, left)) if left else {}
        devices: list[DeviceCopy] = []
        for at, number in enumerate(numbers):
            status = answers.get(at, Status.OK)
            if status == Status.OK and self._deliver(number, finals[at], devices):
                results[number] = 1
            elif status == Status.UNAVAILABLE:
                results[number] = UNAVAILABLE
            else:
                self._forget(number)  # it is wrong, or had no pin and has changed
        if devices:  # one chain for all, and one wait
            devices[0][0].copy_to_device(devices)

    def _stay(self) -> None:
        """Tell a stream that has heard nothing in a while that the values are still read, or it would unpin them.

        Nobody waits for its answer: RDMA goes on without it.
        """
        now = time.monotonic()
        if now - self._told_at >= QUIET_S:
            self._told_at = now
            self._unpin([])

    def _unpin(self, handles: Sequence[int]) -> None:
        """Tell the stream to unpin these values. Does not wait for its answer, nor raise for one that is gone."""
        channel = self._channel
        if channel.broken:
            return
        try:
            channel.poll_pushes()  # takes in what it has answered since
            channel.bound(time.monotonic() + self._path.deadline_s)  # there is room for the few bytes that are sent
            self._unasked = True
            for part in [*batches(handles)] or [[]]:
                channel.disown(channel.submit(M.Unpin(part)))
        except PeerError as exc:
            log.info("values pinned at %r: %s", self.target, exc)
            self._close(str(exc))
        except BaseException:
            self._close("interrupted")
            raise

    def drop(self, numbers: Sequence[int]) -> None:
        """Release some values before the others. Nothing reads them. Does not raise for a server that is gone."""
        for number in numbers:
            self._forget(number)
        handles, self._gone = self._gone, []
        if handles:
            self._unpin(handles)

    @property
    def reads_rows(self) -> bool:
        """Whether :meth:`read_rows` may be called: values come by TCP, and none of them is checked."""
        rdma = self.target.rdma
        return not self._checked and self.target.bulk and (
            rdma is None or rdma.down_reason is not None or not self._is_of(rdma.arena)
        )  # fmt: skip

    def _is_of(self, arena: RemoteArena | None) -> bool:
        """Return whether RDMA may find the values there; each read makes sure. None: not connected yet."""
        return arena is None or arena.generation == self._generation

    def read_rows(
        self, numbers: Sequence[int], rows: Sequence[Rows], lengths: Sequence[int | None], results: list[int | None]
    ) -> Steps[None]:
        """Read the same ranges of many values; fill in the results of hits by number.

        What a value costs by itself is what takes longest of small ranges, so the fewest steps are done for each.
        """
        size = sum(each.length for each in rows)
        most = max(1, min(EXCHANGE_KEYS, RANGES_MAX // len(rows), EXCHANGE_BYTES // size))
        numbers = [number for number in numbers if number in self._values]
        for start in range(0, len(numbers), most):
            part = numbers[start : start + most]
            with self._failing(len(part)):
                self._bound()
                statuses = yield from receive_rows(
                    self._channel, [self._values[number][0] for number in part], part, rows
                )
                for number, status in zip(part, statuses):
                    if status == Status.OK:
                        results[number] = lengths[number]
                    elif status != Status.UNAVAILABLE:
                        self._forget(number)

    def _forget(self, number: int) -> None:
        value = self._values.pop(number, None)
        self._checked.pop(number, None)
        if value is not None:
            self._gone.append(value[0])

    def _fetch(self, numbers: Sequence[int], hosted: Sequence[Ranges], left: Sequence[int]) -> Steps[dict[int, int]]:
        """Read by TCP; return a status for each of ``left``."""
        statuses: dict[int, int] = dict.fromkeys(left, Status.UNAVAILABLE)
        if not self.target.bulk:
            count = len(left)
            self.counters["outages"] += count
            return statuses
        with self._failing(len(left)):
            self._bound()
            asked = [(self._values[numbers[at]][0], hosted[at]) for at in left]
            answers = yield from receive_ranges(self._channel, M.FetchPinned, asked)
            statuses.update((at, answer[0]) for at, answer in zip(left, answers))
        return statuses

    def _deliver(self, number: int, final: Any, devices: list[DeviceCopy]) -> bool:
        """Take received bytes to where they belong, if they are not there; return whether the value is sound.

        ``devices`` gets the copies to devices, which the caller then carries out.
        """
        if final is None:
            return True
        if number not in self._checked:
            devices += final
            return True
        value, room, runs, ranges = final
        if not value.holds(room, runs, self._check):
            return False
        scatter(packed(ranges, runs), room, address_of(room), 0, self._copier, None, devices)
        return True

    def _bound(self) -> None:
        """Begin an exchange. Raises TransportError."""
        self._turns += 1
        if self._channel.broken:
            raise TransportError(self._channel.broken)
        if self._unasked:
            self._unasked = False
            self._channel.poll_pushes()  # takes in their answers, which would seem to be that to this exchange
        self._told_at = now = time.monotonic()
        self._channel.bound(now + allowed(self._path.deadline_s))

    @contextlib.contextmanager
    def _failing(self, keys: int) -> Any:
        """End the lease if an exchange fails, and count the keys. Does not raise for a server that is gone.

        A server that is silent loses its path, too: the call has no time for it any more. One that has ended the lease
        alone keeps it.
        """
        try:
            yield
        except PeerError as exc:
            log.info("values pinned at %r: %s", self.target, exc)
            self.counters["outages"] += keys
            self._close(str(exc))
            if isinstance(exc, DeadlineError):
                self.target.tcp_lost(self._path, str(exc))
                self._routes.wake()
        except BaseException:
            self._close("interrupted")  # the rest of the exchange may still arrive
            raise

    def _close(self, reason: str) -> None:
        self._channel.broken = self._channel.broken or reason
        self._channel.close()

    @property
    def holds(self) -> bool:
        """Whether it holds any value."""
        return bool(self._values)

    def begin_end(self, until: float) -> None:
        """Begin to release the values: tell the server, which answers by ``until`` (monotonic seconds) or not at all.

        Does not raise for a server that is gone.
        """
        handles = [*self._gone, *(handle for handle, _, _, _ in self._values.values())]
        self._values, self._gone = {}, []
        channel = self._channel
        if not handles or channel.broken:
            return
        try:
            channel.bound(until)
            self._unpinning = [channel.submit(M.Unpin(part)) for part in batches(handles)]
        except PeerError as exc:
            self._close(str(exc))
        except BaseException:
            self._close("interrupted")
            raise

    def end(self) -> None:
        """Release the values, and return the connection to the path. A server that is silent loses it, and them."""
        if not self._unpinning:
            self.begin_end(time.monotonic() + allowed(self._path.deadline_s))
        numbers, self._unpinning = self._unpinning, []
        channel = self._channel
        try:
            for number in numbers:
                if not channel.broken:
                    channel.result(channel.wait(number))
        except PeerError as exc:
            self._close(str(exc))
        except BaseException:
            self._close("interrupted")
            raise
        finally:
            self._path.put_back(channel)


def receive_rows(
    channel: Channel, handles: Sequence[int], numbers: Sequence[int], rows: Sequence[Rows]
) -> Steps[list[int]]:
    """Ask for the same ranges of pinned values, and receive them into host memory; return a Status for each.

    ``numbers``: which rows each of ``handles`` goes to. Raises TransportError.
    """
    pattern = [(each.offset, each.length) for each in rows]
    request = channel.submit(
        M.FetchPinned([(handle, len(pattern)) for handle in handles], pattern * len(handles))
    )
    yield ChannelWait(channel, request)
    fetched = channel.result(channel.wait(request))
    if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(handles):
        channel.fail("the server answered a request for ranges with something else")
    coming = [number for number, entry in zip(numbers, fetched.entries) if entry[0] == Status.OK]
    least = max(offset + length for offset, length in pattern)
    if any(entry[0] == Status.OK and not least <= entry[2] <= VALUE_BYTES_MAX for entry in fetched.entries):
        channel.fail(f"the server sends ranges up to byte {least} of a value that has none")
    size = sum(length for _, length in pattern)
    memory = rows[0].memory() if len(rows) == 1 else None
    if coming and memory is not None and memory.flags.c_contiguous and coming[-1] - coming[0] == len(coming) - 1:
        yield from receive_large(channel, request, memory[coming[0] : coming[-1] + 1].reshape(-1).data)
    else:
        some = max(1, PIECE_BYTES // size)
        for start in range(0, len(coming), some):
            part = coming[start : start + some]
            room = np.empty((len(part), size), np.uint8)
            yield from receive_large(channel, request, room.reshape(-1).data)
            at = 0
            for each in rows:
                each.store(part, room[:, at : at + each.length])
                at += each.length
    return [got[0] for got in (yield from judged(channel, request, fetched.entries))]
