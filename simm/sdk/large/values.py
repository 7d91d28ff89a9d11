"""Put, read and delete values that are stored in parts. One for each client that meets any.

A put stores the parts, then the manifest (``manifest.py``), and then drops the parts of the value that it replaced. A
read reads the manifest, then the parts. The manifest alone decides which put's value there is: until it is stored, the
old value is whole, and from then on the new one.

What can go wrong, and what we chose
------------------------------------
* *A value is replaced while it is read.* Its parts are gone: the read finds one missing, and a manifest of another
  version, and begins again, once. Parts have the version in their digests, so it never takes some of each value.
* *A part was evicted.* The read is a miss, though the manifest exists: ``exists`` asks for no parts. Whoever reads
  the whole marks all parts as used, so they age together. A put that stores nothing over a stored value asks for the
  parts, as each read keeps the manifest young: the key would be a miss for good.
* *A put ends half way.* The parts that it has stored are dropped. If the client dies, nobody reads them, and they are
  evicted in their turn. So are those of a value that was replaced by an ordinary one, or deleted by a client that has
  not met it.
* *The manifest's server does not answer a put.* The manifest is read again: the put has succeeded if it is the new one.
  If it is not, the server may still store it, once it goes on. So the new parts are dropped only if a third put's
  manifest is in force; else they stay, and are evicted in their turn. The old parts are dropped once another value is
  in force. If nobody knows which one is, they stay too.
* *Two clients put at once with two copies.* Each manifest may end as one of the copies, and a read takes either. So a
  put looks at all copies, and drops its parts only if none of them names it. If a server does not answer that, they
  stay. A copy cannot be deleted by its version, so none is. A read that finds a part missing tries another copy.
* *It is to be kept.* Manifest and parts are, all or none: what was kept before one of them could not be is given up,
  and so is what may have been kept by a server that has not answered.
  So is what was kept of a value that was replaced meanwhile, the key's own entry with it, though who replaced it may
  have kept that. A put in parts ends the keeping of what it replaces.
* *Servers do not answer.* All exchanges of a call have one deadline, however many values and parts it has. What there
  is no time for is not begun. What is to be undone then has half a deadline more, and half of that is enough for a
  server.
* *There is no room.* Waits for room that were in vain have half a deadline in all, in a call. Values for which nothing
  is left of that are tried, but not waited for. A wait after which a part is stored costs nothing: a put that comes
  forward may be as long as it likes. What was waited in vain is taken off the call's deadline, too. An exchange then
  needs a quarter of a deadline to be begun, or a full server would cost the values for the others their try.
* *A manifest is forged, or damaged.* Its numbers are bounded, and nothing is allocated before bytes are there for it.
  Of its parts only those of exactly the right size count. A forged one may name thousands of parts, and a thousand of
  them in one call would take minutes to drop: so a call drops parts for as long as its deadline. What is left is
  evicted in its turn.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...constants import KEEP_PARTS, KEEP_SOFT, VALUE_BYTES_MAX
from ...errors import DeviceError, UsageError
from ...host.buffers import Ranges, Span, fits
from ...ipc.grant_pool import RoomWait, room_of_call
from ...ipc.patience import Patience
from ...net.allowance import ALLOWANCE, allowed, at_least
from ...wire.status import Status
from ..batch import LARGE, MISS, UNAVAILABLE, Answer, Sink, View, WrongSize, is_hit, misfit
from ..ops.parts import is_wide
from . import manifest as manifests
from .manifest import MANIFEST_BYTES, Manifest
from .sections import sinks_of, source_section

if TYPE_CHECKING:
    from ..ops.replicas import Replicas
    from ..reads import Gets
    from ..writes import Puts

#: Parts that one exchange reads or stores. A server that does not answer costs a call the deadline of one.
PARTS_TOGETHER: Final = 16
#: How often a read begins: once more if the value was replaced meanwhile.
READS: Final = 2
#: Parts of all values of one question: those of a TiB. Forged manifests name any number.
PARTS_ASKED: Final = 1 << 16
#: Keys of one exchange that drops parts.
_DELETES: Final = 1024

_Read = Callable[[Sequence[bytes], Sequence[Sink]], list[Any]]
_Put = Callable[[Sequence[bytes], Sequence[memoryview | Span]], list[int]]


class _InForce(NamedTuple):
    """What the copies under a key say."""

    #: By their versions.
    manifests: dict[bytes, Manifest]
    #: Whether there is an ordinary value.
    ordinary: bool
    #: Whether a server has not answered, so that there may be more.
    silent: bool

    def has_other(self, *known: Manifest | None) -> bool:
        """Return whether there is a manifest that is none of these."""
        return not self.manifests.keys() <= {each.version for each in known if each is not None}

    def first(self, other_than: bytes = b"") -> Manifest | None:
        """Return a manifest of another version than this one, None if there is none."""
        return next((each for version, each in self.manifests.items() if version != other_than), None)


class Large:
    """A client's values in parts. Any thread may call it.

    Args:
        gets, puts, replicas: the client's.
        manifest_gets, manifest_puts: the same for manifests.
        manifest_replicas: the same for both copies of manifests; None without replicas.
        look: reads manifests that nobody has asked a value of, which counts nothing; None: as the others.
        put_once: a put of a key that is stored stores nothing, and succeeds.
    """

    def __init__(
        self, gets: Gets, puts: Puts, replicas: Replicas | None, manifest_gets: Gets, manifest_puts: Puts,
        manifest_replicas: Replicas | None, counters: dict[str, int], *, put_once: bool, deadline_s: float,
        look: _Read | None = None,
    ) -> None:  # fmt: skip
        self._gets = gets
        self._counters = counters
        self._put_once = put_once
        self._deadline_s = deadline_s
        self._read_plain: _Read = gets.read_many if replicas is None else replicas.read
        self._put_plain: _Put = puts.put if replicas is None else replicas.put
        self._put_parts: _Put = puts.store if replicas is None else replicas.put
        self._values = replicas or gets
        self._delete: Callable[..., list[int]] = (replicas or puts).delete
        self._keep: Callable[[Sequence[bytes], int, int], list[int]] = (replicas or puts).keep
        self._read_manifests: _Read = manifest_gets.read_many if manifest_replicas is None else manifest_replicas.read
        self._look_manifests: _Read = look or self._read_manifests
        self._put_manifests: _Put = (manifest_replicas or manifest_puts).put
        self._manifest_copies = manifest_replicas

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        """Give what is undone half a deadline, also if the call has none left. It counts for what comes after."""
        left_s = self._deadline_s / 2
        mine = ALLOWANCE.mine
        lost = mine.lost
        with at_least(left_s), Patience(left_s):
            yield
        mine.seconds = max(0.0, mine.seconds - (mine.lost - lost))

    # -- manifests ----------------------------------------------------------------------------------

    def manifest(self, digest: bytes) -> Manifest | None:
        """Return the manifest under a key, None if no copy of its entry is one."""
        manifest, got = self._found(digest, self._read_manifests)
        if got is LARGE and self._manifest_copies is not None:  # this copy is an ordinary value
            return self._in_force(digest).first()
        return manifest

    def _found(self, digest: bytes, read: _Read | None = None) -> tuple[Manifest | None, Any]:
        """Return the manifest under a key, None if there is none; and the answer, LARGE if an ordinary value is there
        instead."""
        room = bytearray(MANIFEST_BYTES)
        got = (read or self._look_manifests)([digest], [memoryview(room)])[0]
        return _decoded(digest, room, got), got

    def _in_force(self, digest: bytes) -> _InForce:
        """Return what is under a key, in all of its copies. One exchange with each server of one."""
        if self._manifest_copies is None:
            there, got = self._found(digest)
            found = [(there, got)]
        else:
            copies = self._manifest_copies.read_copies(digest, MANIFEST_BYTES)
            found = [(_decoded(digest, room, got), got) for got, room in copies]
        return _InForce(
            {there.version: there for there, _ in found if there is not None},
            any(got is LARGE for _, got in found),
            any(got == UNAVAILABLE for _, got in found),
        )

    def manifests(self, digests: Sequence[bytes], *, asked: bool = False) -> list[Manifest | None]:
        """Return the manifest under each key, None where there is none. Two exchanges with each worker elsewhere.

        ``asked``: for their values, so they count as gets.
        """
        rooms = [bytearray(MANIFEST_BYTES) for _ in digests]
        read = self._read_manifests if asked else self._look_manifests
        got = read(digests, [memoryview(room) for room in rooms])
        return [_decoded(*each) for each in zip(digests, rooms, got)]

    def drop(self, digest: bytes, manifest: Manifest, until: float = 0.0) -> None:
        """Drop the parts of a value that is no longer there, as far as they can be reached, and before ``until``.

        ``until``: monotonic seconds; 0 for those of one call.
        """
        until = until or time.monotonic() + self._deadline_s
        for start in range(0, manifest.parts, _DELETES):
            if time.monotonic() >= until:
                return
            self._delete([manifest.digest(digest, at) for at in range(start, min(start + _DELETES, manifest.parts))])

    # -- put ----------------------------------------------------------------------------------------

    def put(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], put_others: _Put, most: int,
        if_absent: bool = False,
    ) -> list[int]:  # fmt: skip
        """Store values, those above ``most`` bytes in parts; return a Status for each. Of a duplicate key the later
        value is stored.

        ``put_others`` stores the others. ``if_absent``: a stored value of the same length is left alone.
        """
        last = {digest: position for position, digest in enumerate(digests)}
        statuses: dict[bytes, int] = {}
        others = [position for position in last.values() if len(sources[position]) <= most]
        with Patience(self._deadline_s):
            mine = ALLOWANCE.mine
            before = mine.room, mine.least_s
            mine.room = room = room_of_call(self._deadline_s / 2)
            try:
                if others:
                    names = [digests[position] for position in others]
                    answers = self._put_charged(put_others, names, [sources[position] for position in others], room)
                    statuses.update(zip(names, answers))
                for digest, position in last.items():
                    if digest not in statuses:
                        statuses[digest] = self._put(digest, sources[position], if_absent, room)
            finally:
                mine.room, mine.least_s = before
        return [statuses[digest] for digest in digests]

    def _put_charged(
        self, put: _Put, digests: Sequence[bytes], sources: Sequence[memoryview | Span], room: RoomWait
    ) -> list[int]:
        """Call ``put``, and take its waits for room that were in vain off what the call may wait for servers."""
        left_s, vain_s = room.left_s, room.vain_s
        answers = put(digests, sources)
        if all(answer == Status.OK for answer in answers):
            room.left_s = left_s - (room.vain_s - vain_s)
        gone_s = left_s - room.left_s
        if gone_s > 0.0:
            mine = ALLOWANCE.mine
            mine.seconds = max(0.0, mine.seconds - gone_s)
            mine.least_s = min(mine.least_s, self._deadline_s / 4)
        return answers

    def _put(self, digest: bytes, source: memoryview | Span, if_absent: bool, room: RoomWait) -> int:
        self._counters["large"] += 1
        old, got = self._found(digest)
        spared = old if old is not None and (self._put_once or (if_absent and old.total == len(source))) else None
        if (self._put_once and got is LARGE) or (spared is not None and self._has_parts(digest, spared)):
            self._counters["present"] += 1
            return Status.OK
        new = self._new_manifest(len(source))
        stored: list[bytes] = []
        status: int = Status.OK
        for some in _grouped(list(zip(new.digests(digest), new.bounds())), PARTS_TOGETHER):
            names = [name for name, _ in some]
            sections = [source_section(source, *bounds) for _, bounds in some]
            answers = self._put_charged(self._put_parts, names, sections, room)
            stored += [name for name, answer in zip(names, answers) if answer == Status.OK]
            status = next((answer for answer in answers if answer != Status.OK), Status.OK)
            if status != Status.OK:
                self._counters["put_failures"] += 1
                break
        if status == Status.OK:
            if not self._put_once:
                there, got = self._found(digest)  # as late as possible: whose parts nobody reads any more
                old = old if got == UNAVAILABLE else there
            elif spared is not None and self._is_there(digest, spared):
                self._delete([digest])  # or the new one would not be stored
            status = self._put_charged(self._put_manifests, [digest], [memoryview(new.encode(digest))], room)[0]
            if status == Status.UNAVAILABLE:
                return self._find_out(digest, old, new)
        if status == Status.OK and self._put_once:
            return self._settle_once(digest, old, new)
        if status != Status.OK:
            with self._undoing():
                for some in _grouped(stored, _DELETES):
                    self._delete(some)
        elif old is not None and old.version != new.version:
            with self._undoing():
                self.drop(digest, old)
        return status

    def _settle_once(self, digest: bytes, old: Manifest | None, new: Manifest) -> int:
        """Return the Status of a put whose manifest was stored unless there was one, and drop what no copy names.

        One exchange, and those of :meth:`drop`.
        """
        found = self._in_force(digest)
        stored = new.version in found.manifests
        remains = old is not None and old.version in found.manifests
        beaten = found.ordinary or found.has_other(old, new)
        unused: list[Manifest] = []
        if not found.silent:  # else a copy may name them that nobody has read
            # No copy at all: the new one has gone again, and its parts go in their turn.
            if not stored and (beaten or remains):
                unused.append(new)
            if old is not None and not remains:
                unused.append(old)
        if unused:
            with self._undoing():
                for each in unused:
                    self.drop(digest, each)
        if remains and not stored and not beaten:
            self._counters["put_failures"] += 1
            return Status.UNAVAILABLE
        return Status.OK  # also if another client was first: its value stays

    def _find_out(self, digest: bytes, old: Manifest | None, new: Manifest) -> int:
        """Return the Status of a put whose manifest may be stored, or be stored later. Drop what nobody will read.

        One exchange, and those of :meth:`drop`.
        """
        with self._undoing():
            found = self._in_force(digest)
            stored = new.version in found.manifests
            # Unless a third put came after this one, its manifest may be stored once the server goes on. Of two copies
            # one says nothing of what the other's server does.
            if not stored and not self._put_once and found.has_other(old, new):
                self.drop(digest, new)
            another = found.ordinary or bool(found.manifests)
            if old is not None and another and old.version not in found.manifests and not found.silent:
                self.drop(digest, old)
        return Status.OK if stored else Status.UNAVAILABLE

    def _is_there(self, digest: bytes, manifest: Manifest) -> bool:
        """Return True if this manifest is still the one under the key."""
        there = self.manifest(digest)
        return there is not None and there.version == manifest.version

    def _has_parts(self, digest: bytes, manifest: Manifest) -> bool:
        """Return True if all parts are stored, as far as the servers answer."""
        names = manifest.digests(digest)
        return all(all(self._values.stored_many(some)) for some in _grouped([*names], _DELETES))

    def _new_manifest(self, total: int) -> Manifest:
        """Return the manifest of a put of so many bytes. The simulator has versions out of its own seed."""
        return Manifest.new(total, manifests.PART_BYTES)

    # -- read ---------------------------------------------------------------------------------------

    def resolve(self, digests: Sequence[bytes], sinks: Sequence[Sink], results: list[Any]) -> None:
        """Read what the results of other reads call large."""
        positions = [position for position, got in enumerate(results) if got is LARGE]
        if positions:
            with Patience(self._deadline_s):
                for position in positions:
                    results[position] = self.read(digests[position], sinks[position])

    def read(self, digest: bytes, sink: Sink) -> Answer:
        """Read a value that is stored in parts; return its length, the bytes if ``sink`` is None, or why there is none.

        Raises UsageError for ranges of which one part's would be too many bytes.
        """
        try:
            with Patience(self._deadline_s):
                return self._read(digest, sink)
        except DeviceError as exc:
            return self._gets.device_failed(exc)

    def _read(self, digest: bytes, sink: Sink) -> Answer:
        manifest = self.manifest(digest)
        for _ in range(READS):
            if manifest is None:  # it was replaced by an ordinary value, dropped, or cannot be read
                got = self._read_ordinary(digest, sink)
                return MISS if got is LARGE else got
            if sink is not None and not fits_large(manifest.total, sink):
                return misfit(manifest.total, sink)
            got = self._read_parts(digest, manifest, sink)
            if is_hit(got) or got == UNAVAILABLE:
                return got
            manifest = self._in_force(digest).first(other_than=manifest.version)
            if manifest is None:
                return MISS  # with two replicas it may be there for all that: a server may not have answered
        return MISS

    def _read_ordinary(self, digest: bytes, sink: Sink) -> Answer:
        """Read a value that has no parts. No server is asked for ranges that no such value has."""
        if not isinstance(sink, Ranges) or not is_wide(sink):
            return self._read_plain([digest], [sink])[0]  # type: ignore[no-any-return]
        end = Ranges([(VALUE_BYTES_MAX - 1, 1, 0, memoryview(bytearray(1)))], VALUE_BYTES_MAX, 1)
        got = self._read_plain([digest], [end])[0]
        length = got.length if type(got) is WrongSize else int(got)
        if length <= 0:
            return got  # type: ignore[no-any-return]
        if sink.least > length:
            return WrongSize.of(length)
        raise UsageError(f"the ranges of this value have at most {VALUE_BYTES_MAX} bytes together, not {sink.total}")

    def _read_parts(self, digest: bytes, manifest: Manifest, sink: Sink) -> Answer:
        """Read the parts that are wanted. UNAVAILABLE if a server does not answer, MISS if a part is not there."""
        whole: list[bytes] = []
        for some in _grouped(sinks_of(manifest, sink), PARTS_TOGETHER):
            names = [manifest.digest(digest, index) for index, _, _ in some]
            answers = self._read_plain(names, [part for _, _, part in some])
            for got, (_, size, _) in zip(answers, some):
                if type(got) is bytes and len(got) == size:
                    whole.append(got)
                elif got != size:
                    return UNAVAILABLE if got == UNAVAILABLE else MISS
        return b"".join(whole) if sink is None else manifest.total

    def view(self, digest: bytes) -> View:
        """Return a copy of a value as a view, which is false for a miss."""
        got = self.read(digest, None)
        return View(memoryview(got)) if type(got) is bytes else View.miss()

    # -- delete and the rest ------------------------------------------------------------------------

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        """Drop entries as the client does, and the parts of those that have some; return a Status for each.

        With ``sizes`` only values of these sizes.
        """
        with Patience(self._deadline_s):
            return self._drop_values(digests, sizes)

    def _drop_values(self, digests: Sequence[bytes], sizes: Sequence[int] | None) -> list[int]:
        found = self.manifests(digests)
        if sizes is None:
            statuses = self._delete(digests)
        else:
            # A value in parts has its own size, its manifest's entry another one.
            wanted = [
                size if manifest is None else MANIFEST_BYTES if manifest.total == size else 0
                for manifest, size in zip(found, sizes)
            ]
            asked = [position for position, size in enumerate(wanted) if 0 < size < 1 << 32]
            statuses = [Status.NOT_FOUND] * len(digests)
            answers = self._delete([digests[each] for each in asked], [wanted[each] for each in asked]) if asked else []
            for position, status in zip(asked, answers):
                statuses[position] = status
        until = time.monotonic() + self._deadline_s
        for digest, manifest, status in zip(digests, found, statuses):
            if manifest is not None and status == Status.OK:
                self.drop(digest, manifest, until)
        return statuses

    # -- keep ---------------------------------------------------------------------------------------

    def keep(self, digests: Sequence[bytes], statuses: list[int], how: int, seconds: int) -> None:
        """Keep, with all of their parts, the values that the servers have called TOO_LARGE. Fill in their statuses."""
        with Patience(self._deadline_s):
            for at, status in enumerate(statuses):
                if status == Status.TOO_LARGE:
                    self._counters["large"] += 1
                    statuses[at] = self._keep_whole(digests[at], how, seconds)

    def _keep_whole(self, digest: bytes, how: int, seconds: int) -> int:
        """Keep a value and its parts, 0 seconds to end that. OK: all are kept; else none, and why one of them is not.

        Two exchanges with each server that has a part, and one with that of the manifest after them.
        """
        manifest, got = self._found(digest)
        silent = bool(got == UNAVAILABLE)
        status: int = Status.UNAVAILABLE
        for _ in range(READS):
            if manifest is None:
                break
            names = [*manifest.digests(digest), digest]
            if not seconds:
                return self._keep(names, KEEP_SOFT | KEEP_PARTS, 0)[-1]
            may_send = allowed(math.inf) >= min(self._deadline_s / 2, ALLOWANCE.mine.least_s)
            answers = self._keep(names, how | KEEP_PARTS, seconds)
            status = next((answer for answer in answers if answer != Status.OK), Status.OK)
            found = self._in_force(digest)
            silent = found.silent
            same = manifest.version in found.manifests
            if same and status == Status.OK:
                return status
            # A server that has not answered may have kept some. Without time nothing was sent, and nothing is undone:
            # each value of the call would take half a deadline more for that.
            if may_send or any(answer != Status.UNAVAILABLE for answer in answers):
                # Also that of the key, though who has replaced the value may have kept it: else a keep that fails could
                # leave it hard kept for nobody.
                with self._undoing():
                    self._keep(names, KEEP_SOFT | KEEP_PARTS, 0)
            if same:
                return status
            manifest = found.first()
        if silent:  # nobody knows that it has gone
            return status or Status.UNAVAILABLE
        return Status.NOT_FOUND

    def with_parts(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return digests with those of the parts of values that have some, ``PARTS_ASKED`` parts at most."""
        found = zip(digests, self.manifests(digests))
        parts = (
            manifest.digest(digest, at)
            for digest, manifest in found
            if manifest is not None
            for at in range(manifest.parts)
        )
        return [*digests, *itertools.islice(parts, PARTS_ASKED)]


def _decoded(digest: bytes, room: bytearray, got: Any) -> Manifest | None:
    """Return the manifest that a read of a key has left, None if ``got`` is no manifest's length."""
    return Manifest.decode(digest, bytes(room)) if got == MANIFEST_BYTES else None


def fits_large(length: int, sink: memoryview | Span) -> bool:
    """Do :func:`fits` for a length that ranges of a value need not have as a bound."""
    return sink.least <= length if isinstance(sink, Ranges) else fits(length, sink)


def _grouped(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
