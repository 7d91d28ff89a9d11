"""Find the values that a caller pins, and hold them: at their owners, and at previous owners while shards move.

``cluster/lookup.py`` decides where to look, ``sdk/ops/pins.py`` says what holds a value.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from ...arena.hashing import shard_of
from ...arena.layout import ENTRY_LARGE, PINNED_FLAGS
from ...arena.reader import ArenaReader, Unsettled
from ...cluster.lookup import HOPS, PLAIN_BELOW, Unresolved
from ...errors import PeerError, TransportError
from ...host.buffers import Copier
from ...ipc.patience import Patience
from ...ipc.steps import Steps, finish
from ...wire import messages as M
from ...wire.messages import Status
from ..batch import UNLOADABLE, Batch
from ..routing import Routes
from ..worker_path import Target
from .arena_pins import ArenaPins
from .checked import Checked
from .owners import Owners
from .pins import Pins, end_together

if TYPE_CHECKING:
    from ..reads import Gets
    from .remote_pins import RemotePins
    from .replicas import Replicas


class _PinBatch(Batch):
    """Keys to pin, for :class:`Owners`: ``numbers`` are their positions in ``pins``."""

    __slots__ = ("numbers", "pins", "remote")

    def __init__(self, digests: Sequence[bytes], numbers: Sequence[int], pins: Pins, patience: Patience) -> None:
        super().__init__(digests, None, patience)
        self.numbers = numbers
        self.pins = pins
        #: A server has one lease for all of its values.
        self.remote: dict[Target, RemotePins] = {}


class Pinner:
    """Pins values for one client. Any thread may call it."""

    def __init__(
        self, routes: Routes, gets: Gets, copier: Copier, counters: dict[str, int], replicas: Replicas | None,
        deadline_s: float,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._gets = gets
        self._copier = copier
        self._check = gets.check if gets.checksum else None
        self.counters = counters
        self._owners = Owners(routes, counters)
        self._replicas = replicas
        self._deadline_s = deadline_s
        #: Without a lock: a signal's handler may close the client while its thread is in :meth:`pin`. Additions,
        #: removals and copies of a set are one step each.
        self._made: set[weakref.ref[Pins]] = set()

    def pin(self, keys: Sequence[str], digests: Sequence[bytes]) -> Pins:
        """Return the values of these keys, held from now on. O(keys), and an exchange with each worker for 1,024.

        With checksums O(bytes) of the values on this host, too.
        """
        pins = Pins(keys, self._routes, self._copier, self._gets.device_failed, self._deadline_s)
        try:
            self._find(pins, digests)
        except BaseException:
            pins.release()
            raise
        pins.settle()
        held = len(pins.lengths) - pins.lengths.count(None)
        missed = len(digests) - held - len(pins.parted)
        self.counters["hits"] += held
        self.counters["misses"] += missed
        self._made.add(weakref.ref(pins, self._made.discard))
        return pins

    def _find(self, pins: Pins, digests: Sequence[bytes]) -> None:
        if not digests:
            self._routes.group(digests)  # which raises UsageError once closed
            return
        with self._routes.patience() as patience:
            if self._replicas is None:
                self._hold(_PinBatch(digests, range(len(digests)), pins, patience))
                return
            for left, copies, _last in self._replicas.rounds(digests):
                self._hold(_PinBatch(copies, list(left), pins, patience))
                # Of two copies one may be a value in parts, and the other one an ordinary value: whichever comes first.
                left[:] = [number for number in left if pins.lengths[number] is None and number not in pins.parted]

    def release_all(self) -> None:
        """Release what was pinned, as the client ends: at all servers within one deadline."""
        made = [pins for each in self._made.copy() if (pins := each()) is not None]
        end_together([holder for pins in made for holder in pins.give_up()], self._deadline_s)

    def _hold(self, batch: _PinBatch) -> None:
        try:
            self._owners.read(batch, self._pin_in, self._pin_at, self._settle)
        finally:
            end_together([holder for holder in batch.remote.values() if not holder.holds], self._deadline_s)

    # -- in an arena --------------------------------------------------------------------------------

    def _pin_in(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Any, _slots: Any, *, how: int = 0
    ) -> Unresolved:
        """Hold values in an arena that this process maps."""
        unresolved = Unresolved()
        holder = ArenaPins(reader, self._copier, self._check)
        digests = [batch.digests[position] for position in positions]
        # A server that there is no time for is as one that is down: values are held by version.
        in_time = target.session is not None and batch.patience.has_time_for(target)
        holder.positions = numbers = [batch.numbers[position] for position in positions]
        entries = self._pinned(target, reader, holder, digests, how) if in_time else []
        if entries and self._check is None and self._take_all(reader, holder, numbers, digests, entries, batch):
            return unresolved
        for at, (position, number, digest) in enumerate(zip(positions, numbers, digests)):
            status, flags, length, crc, offset, _pin = entries[at] if entries else (Status.UNAVAILABLE, 0, 0, 0, 0, 0)
            if status == Status.OK:
                start = offset - reader.data_offset
                if flags & ~PINNED_FLAGS:
                    _note_kind(batch.pins, number, flags)
                    continue
                check, value = self._check, None
                # Now: for a wrong one the next copy is sought. In place, as nothing of this look is delivered.
                if (
                    check is not None and (value := Checked.of(length, flags, crc))
                    and not value.look(reader.data[start : start + length], check)
                ):  # fmt: skip
                    continue
                holder.values[number] = start, digest, value
                batch.pins.take(number, holder, length)
            elif status in (Status.NO_SPACE, Status.UNAVAILABLE):
                confirm = reader.confirm_previous if how else reader.confirm
                self._note_version(reader, holder, number, digest, batch.pins, confirm)
            elif not how:
                unresolved.by_status(position, status, offset)
        return unresolved

    def _take_all(
        self, reader: ArenaReader, holder: ArenaPins, numbers: Sequence[int], digests: Sequence[bytes],
        entries: Sequence[tuple[int, int, int, int, int, int]], batch: Any,
    ) -> bool:  # fmt: skip
        """Note all values at once, if each is pinned. Return False with nothing done otherwise."""
        statuses, flags, lengths, _, offsets, _ = zip(*entries)
        if statuses.count(Status.OK) < len(statuses) or any(each & ~PINNED_FLAGS for each in set(flags)):
            return False
        base = reader.data_offset
        holder.values = dict(zip(numbers, zip([offset - base for offset in offsets], digests, repeat(None))))
        batch.pins.take_all(numbers, holder, lengths)
        return True

    def _pinned(
        self, target: Target, reader: ArenaReader, holder: ArenaPins, digests: Sequence[bytes], how: int
    ) -> list[tuple[int, int, int, int, int, int]]:
        """Return the worker's answers, whose pins the holder has from then on; none if it cannot be asked."""
        session = target.session
        if session is None or session.reader is not reader:
            return []
        entries: list[tuple[int, int, int, int, int, int]] = []
        copying = session.copying
        ends = iter([copying.pop])
        held = False
        try:
            copying += (None,)  # until the holder ends: its pins are not released before. See ShmPut._fill
            try:
                if session.closed:
                    raise TransportError("the session was closed")
                entries = session.pin_many(digests, how)
                holder.take_pins(session, [entry[5] for entry in entries], ends)
                held = True
            finally:
                if not held:
                    for end in ends:
                        end()
                    for entry in entries:  # interrupted: the holder may release them once more
                        if entry[5]:
                            session.unpin_later(entry[5])
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
            return []
        return entries

    def _note_version(
        self, reader: ArenaReader, holder: ArenaPins, number: int, digest: bytes, pins: Pins,
        confirm: Callable[[bytes, int, int], bool],
    ) -> None:  # fmt: skip
        """Hold a value by its version: the pins are used up, or the worker is away."""
        try:
            found = reader.locate(digest)
        except Unsettled:
            return
        if found is None:
            if not 0 < reader.shard_word(digest) < PLAIN_BELOW:
                self.counters["outages"] += 1  # nobody can say where it may be
        elif not confirm(digest, found.slot, found.seq) or not reader.is_own(found):
            pass
        elif found.flags & ~PINNED_FLAGS:
            _note_kind(pins, number, found.flags)
        else:
            value = Checked.of(found.length, found.flags, found.crc, found) if self._check is not None else None
            holder.values[number] = found.offset - reader.data_offset, digest, value or found
            pins.take(number, holder, found.length)

    # -- at a server elsewhere ------------------------------------------------------------------------

    def _pin_at(self, target: Target, positions: Sequence[int], batch: Any, *, how: int = 0) -> Steps[Unresolved]:
        """Hold values by a lease."""
        unresolved = Unresolved()
        holder: RemotePins | None = batch.remote.get(target)
        if holder is None:
            with contextlib.suppress(*UNLOADABLE):
                from .remote_pins import RemotePins  # a client whose workers are all on its host has no need of it

                holder = yield from RemotePins.at(target, self._routes, self._copier, self._check, self.counters)
            if holder is None:
                count = len(positions)
                self.counters["outages"] += count
                return unresolved
            batch.remote[target] = holder
        entries = yield from holder.pin(
            [(batch.numbers[position], batch.digests[position]) for position in positions], previous=bool(how)
        )
        for position, (status, flags, length, _crc, epoch, _seq, _slot) in zip(positions, entries):
            if status == Status.OK:
                batch.pins.take(batch.numbers[position], holder, length)
            elif status == Status.NOT_FOUND and flags:
                _note_kind(batch.pins, batch.numbers[position], flags)
            elif status == Status.NO_SPACE:
                self.counters["outages"] += 1  # it is stored, and the leases have no room for its version
            elif not how:
                unresolved.by_status(position, status, epoch)
        return unresolved

    # -- not at the owner -----------------------------------------------------------------------------

    def _settle(self, target: Target, left: Unresolved, batch: Any, hops: int = HOPS) -> None:
        """Hold values that ``target``, their owner by the map, does not have, where they are."""
        routes, digests = self._routes, batch.digests
        found = left.next_reads(
            target, routes.table(), lambda position: shard_of(digests[position]), hops=hops,
            connected=routes.manager_connected(),
        )  # fmt: skip
        if found.refresh:
            routes.refresh()
        for previous, positions in found.at_previous.items():
            self._visit(previous, positions, batch, M.LOCATE_PREVIOUS)
        for owner, positions in found.start_over.items():
            more = self._visit(owner, positions, batch, 0)
            if more:
                self._settle(owner, more, batch, hops - 1)

    def _visit(self, target: Target, positions: Sequence[int], batch: Any, how: int) -> Unresolved:
        if self._owners.leaves_out(target, batch):
            self._owners.count_unavailable(positions, batch, late=True)
            return Unresolved()
        reader = target.arena()
        if reader is not None:
            return self._pin_in(target, reader, positions, batch, None, how=how)
        return finish(self._pin_at(target, positions, batch, how=how))


def _note_kind(pins: Pins, number: int, flags: int) -> None:
    """Note that an entry with these flags is none that can be pinned."""
    if flags & ENTRY_LARGE:
        pins.parted.add(number)
