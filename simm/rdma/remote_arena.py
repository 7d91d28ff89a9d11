"""The slots of an arena read by RDMA: where they lie, and when bytes that were READ are a value.

This is the reader's side of ``table.py`` for a reader that cannot load single words. A READ returns aligned 8-byte
words, each as it was at some time between the READ's begin and its completion. The words of one READ, and READs without
a fence between them, have no order.

    1  READ both sets     find the digest, keep the slot's 64 bytes (``image``)
    2  READ shard word    is the shard here?
    3  READ the value
    4  READ the slot      between 1 and 5: bytewise the same as in 1?
    5  READ the slot      begun after 2, 3 and 4 have completed: bytewise the same again?

The three-image rule
--------------------
Two images would do if READs were atomic. In the local protocol a reader loads the sequence number before the fields and
again after them. Here the words of one READ come in any order.

* The sequence number only grows. So if images 1 and 5 have the same even number, the entry was there from one moment to
  the other, and its chunk had no other tenant while 3 was in flight.
* But that need not be the chunk that 3 READ. Image 1 may pair the offset from before an overwrite with the number from
  after it. Image 5 may have the same offset from a later overwrite, whose value was placed in the old chunk. Then 3
  READ that chunk during a write.
* Image 4 excludes this. All of it was READ while the number stood still, so it is one entry's image. If image 1 has the
  same bytes, 3 READ that entry's value.

``tests/models/rdma_get.py`` searches all orders of events. With two images it finds the run above; with three it finds
none. Image 4 costs 64 bytes in the chain of 2 and 3, and no round trip.

Cached entries
--------------
Image 1 may come from an earlier call (the *location cache*), which saves step 1. If that call confirmed it, the image
is known to be one entry's (``CachedEntry.proved``), and 4 is not needed either. The shard word must be READ in this
call and before image 5. So at the time of the word, the shard was owned and the entry was there.

A key is a miss if neither set has its digest and the shard's word is plain. Everything else is undecided here: an odd
slot, or a moving, frozen or foreign shard. The caller looks again, or asks by TCP.

This module is pure: it does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from ..arena.hashing import SHARD_BITS, SHARD_MASK, split
from ..arena.layout import ENTRY_BOUND, ENTRY_EPOCH, ENTRY_LARGE, HEADER_BYTES, SLOT, Geometry
from ..constants import SET_BYTES, SLOT_BYTES, VALUE_BYTES_MAX, WAYS
from ..errors import RemoteProtocolError
from ..wire.rdma_messages import REGION_WRITABLE, RdmaRegion
from ..wire.shard_set import FROZEN

#: The largest operation, bytes. Devices have limits from 8 MiB on; stripes and progress go by this unit.
OP_BYTES_MAX: Final = 1 << 20

_FROZEN: Final = FROZEN
_SLOT_MASK: Final = SLOT_BYTES - 1
_unpack: Final = SLOT.unpack_from
#: Only the stream knows whether such entries are of the client's namespace, and of its epoch.
_FOR_STREAM: Final = ENTRY_BOUND | ENTRY_EPOCH

#: (remote address, rkey, bytes)
Piece = tuple[int, int, int]


def confirmed(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    """Return whether the bytes of step 3 are the value that ``entry`` names. Every RDMA read applies this rule.

    ``between`` is image 4; it counts unless the entry is proved. ``now`` is image 5, READ after ``between`` and after
    ``word``, the shard word of this call. The entry is proved from now on if the result is True.
    """
    image = entry.image
    if now != image or not 0 < word < _FROZEN:
        return False
    if not entry.proved:
        if between != image:
            return False
        entry.proved = True
    return True


class RemoteAddresses:
    """Remote addresses and rkeys of one entry and its shard word, by one rail."""

    __slots__ = ("pieces", "slot", "slot_key", "visited", "visited_key", "word", "word_key")

    def __init__(self, region_map: RegionMap, entry: CachedEntry) -> None:
        geometry = region_map.geometry
        self.slot, self.slot_key = region_map.meta(geometry.slots_offset + entry.slot * SLOT_BYTES, SLOT_BYTES)
        self.word, self.word_key = region_map.meta(entry.word_offset, 8)
        self.visited, self.visited_key = region_map.at(geometry.visited_offset + entry.slot, 1)
        self.pieces = region_map.split(entry.offset, entry.length)


class CachedEntry:
    """An entry as its slot's image describes it, with its addresses by each rail. The location cache holds these."""

    __slots__ = ("addresses", "crc", "flags", "image", "length", "offset", "proved", "slot", "touched", "word_offset")

    def __init__(self, digest: bytes, slot: int, image: bytes, offset: int, length: int, crc: int, flags: int) -> None:
        self.slot = slot
        self.image = image
        self.offset = offset
        self.length = length
        self.crc = crc
        self.flags = flags
        self.word_offset = HEADER_BYTES + ((digest[0] | digest[1] << 8) & SHARD_MASK) * 8
        #: By region map, filled in on demand.
        self.addresses: dict[RegionMap, RemoteAddresses] = {}
        #: When its visited byte was last stored, monotonic seconds.
        self.touched = 0.0
        #: Whether the image is known to be one entry's, not a mixture; see :func:`confirmed`.
        self.proved = False

    def at(self, region_map: RegionMap) -> RemoteAddresses:
        """Return its addresses by this rail."""
        addresses = self.addresses.get(region_map)
        if addresses is None:
            addresses = self.addresses[region_map] = RemoteAddresses(region_map, self)
        return addresses


class RegionMap:
    """The registered regions of an arena on one rail of the server: pieces of the segment, each with address and rkey.

    Raises RemoteProtocolError unless they are in order and disjoint, and cover everything that a reader needs.
    """

    def __init__(self, geometry: Geometry, rail: int, regions: Sequence[RdmaRegion]) -> None:
        self.geometry = geometry
        self.rail = rail
        mine = sorted((region for region in regions if region.rail == rail), key=lambda region: region.start)
        self._regions = mine
        self._starts = [region.start for region in mine]
        self.check()
        first = mine[0]
        #: Address and rkey if one region has header, shard words and slots, as is usual.
        self._meta: tuple[int, int] | None = None
        if first.start == 0 and first.length >= geometry.slots_offset + geometry.sets * SET_BYTES:
            self._meta = first.address, first.rkey

    def check(self) -> None:
        """Raise RemoteProtocolError if these regions cannot be an arena. O(regions)."""
        geometry, end = self.geometry, 0
        for region in self._regions:
            if region.start < end or region.length < 1 or region.address < 1 or region.rkey < 0:
                raise RemoteProtocolError(f"regions of rail {self.rail} overlap or are none: {region}")
            if region.address + region.length > 1 << 64:
                raise RemoteProtocolError(f"a region of rail {self.rail} ends beyond all memory: {region}")
            end = region.start + region.length
        if end > geometry.size:
            raise RemoteProtocolError(f"a region of rail {self.rail} ends at {end}, the segment at {geometry.size}")
        meta_end = geometry.slots_offset + geometry.sets * SET_BYTES
        for start, stop in (
            (0, meta_end),
            (geometry.visited_offset, geometry.visited_offset + geometry.slots),
            (geometry.data_offset, geometry.data_offset + geometry.data_bytes),
        ):
            at = start
            while at < stop:
                number = bisect_right(self._starts, at) - 1
                last = self._regions[number] if number >= 0 else None
                if last is None or last.start + last.length <= at:
                    raise RemoteProtocolError(f"no region of rail {self.rail} has byte {at} of the segment")
                at = last.start + last.length
                if at < stop and at <= meta_end and (at - geometry.slots_offset) % SET_BYTES and at > HEADER_BYTES:
                    raise RemoteProtocolError(f"the regions of rail {self.rail} cut a set at byte {at}")

    def at(self, start: int, length: int) -> tuple[int, int]:
        """Return (address, rkey) of bytes that lie in one region. Raises RemoteProtocolError if they do not."""
        number = bisect_right(self._starts, start) - 1
        if number >= 0:
            region = self._regions[number]
            if start + length <= region.start + region.length:
                return region.address + start - region.start, region.rkey
        raise RemoteProtocolError(f"bytes {start} to {start + length} of the segment lie in no one region")

    def meta(self, start: int, length: int) -> tuple[int, int]:
        """Return :meth:`at` for header, shard words and slots."""
        meta = self._meta
        return (meta[0] + start, meta[1]) if meta is not None else self.at(start, length)

    def split(self, start: int, length: int, *, writable: bool = False) -> list[Piece]:
        """Return the pieces in which bytes are READ or WRITTEN: cut at region ends, at most OP_BYTES_MAX each.

        Raises RemoteProtocolError where there is no region, or no writable one if ``writable``.
        """
        pieces: list[Piece] = []
        data, data_end = self.geometry.data_offset, self.geometry.data_end
        end = start + length
        while start < end:
            number = bisect_right(self._starts, start) - 1
            region = self._regions[number] if number >= 0 else None
            if region is None or start >= region.start + region.length:
                raise RemoteProtocolError(f"byte {start} of the segment lies in no region of rail {self.rail}")
            if writable and not (region.flags & REGION_WRITABLE and data <= start < data_end):
                raise RemoteProtocolError(f"byte {start} of the segment is not there to be written")
            part = min(end, region.start + region.length, start + OP_BYTES_MAX) - start
            pieces.append((region.address + start - region.start, region.rkey, part))
            start += part
        return pieces

    def keyed(self, start: int, length: int, rkey: int) -> list[Piece]:
        """Return the pieces of a chunk that has its own rkey, whatever regions it lies in.

        The endpoint maps the segment in one piece, so a chunk continues where its first region ends. Raises
        RemoteProtocolError if these bytes are no chunk, or end beyond all memory.
        """
        geometry = self.geometry
        if start < geometry.data_offset or start + length > geometry.data_end:
            raise RemoteProtocolError(f"bytes {start} to {start + length} of the segment are no chunk")
        region = self._regions[bisect_right(self._starts, start) - 1]
        base = region.address + start - region.start
        if base + length > 1 << 64:
            raise RemoteProtocolError(f"a chunk of rail {self.rail} ends beyond all memory: {length} from {base:#x} on")
        return [(base + at, rkey, min(OP_BYTES_MAX, length - at)) for at in range(0, length, OP_BYTES_MAX)]


class RemoteArena:
    """Geometry and regions of one arena; equal for all connections to one endpoint. Immutable.

    ``generation``: the header's, which no other arena has.
    """

    def __init__(self, geometry: Geometry, rails: int, regions: Sequence[RdmaRegion], generation: int) -> None:
        self.geometry = geometry
        self.generation = generation
        self.key = (generation, geometry, rails, tuple(regions))
        #: By the server's rail; None for a rail without regions.
        self.region_maps = [
            RegionMap(geometry, rail, regions) if any(region.rail == rail for region in regions) else None
            for rail in range(rails)
        ]
        self._sets = geometry.sets
        self._slots_offset = geometry.slots_offset

    def sets(self, digest: bytes) -> tuple[int, int, int]:
        """Return the offsets of the digest's two sets and of its shard word in the segment."""
        low, high = split(digest)
        sets = self._sets
        first, second = (low >> SHARD_BITS) % sets, high % sets
        if second == first:
            second = (second + 1) % sets
        base = self._slots_offset
        return base + first * SET_BYTES, base + second * SET_BYTES, HEADER_BYTES + (low & SHARD_MASK) * 8

    def find(self, fetched: Any, at: int, digest: bytes) -> int:
        """Return the way of the digest among the 16 of its two sets, or -1.

        The sets were READ to byte ``at`` of ``fetched``, an mmap or bytes.
        """
        end = at + 2 * SET_BYTES
        found: int = fetched.find(digest, at, end)
        while found >= 0:
            if (found - at) & _SLOT_MASK == 8:
                return (found - at) // SLOT_BYTES
            found = fetched.find(digest, found + 1, end)
        return -1

    def entry(self, fetched: Any, at: int, digest: bytes, way: int) -> CachedEntry | None:
        """Return the entry in that way; None if a write is in progress, it is for TCP, or it is impossible."""
        at += way * SLOT_BYTES
        image = bytes(fetched[at : at + SLOT_BYTES])
        seq, found, offset, length, crc, chunk, _namespace, flags, _stored, _ = _unpack(image)
        geometry = self.geometry
        if seq & 1 or found != digest or not 0 < length <= chunk or length > VALUE_BYTES_MAX:
            return None
        if flags & (_FOR_STREAM | ENTRY_LARGE):
            return None
        if offset < geometry.data_offset or offset + length > geometry.data_end:
            return None
        first, second, _word = self.sets(digest)
        base = first if way < WAYS else second
        slot = (base - self._slots_offset) // SLOT_BYTES + way % WAYS
        return CachedEntry(digest, slot, image, offset, length, crc, flags)

    def is_for_stream(self, fetched: Any, at: int, way: int) -> bool:
        """Return whether only the stream can say if that way's entry counts for this client. Also of one in a write."""
        flags: int = _unpack(fetched, at + way * SLOT_BYTES)[7]
        return bool(flags & _FOR_STREAM)


class Locations:
    """A bounded cache of entries, for any number of threads, in two generations; the older one is dropped when full.

    Entries belong to one :class:`RemoteArena`. O(1) per call, at most 1 KiB per entry.
    """

    __slots__ = ("_most", "_old", "_young")

    def __init__(self, most: int) -> None:
        self._most = max(2, most)
        self._young: dict[bytes, CachedEntry] = {}
        self._old: dict[bytes, CachedEntry] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, digest: bytes) -> CachedEntry | None:
        """Return the digest's entry, or None."""
        entry = self._young.get(digest)
        if entry is None:
            entry = self._old.pop(digest, None)
            if entry is not None:
                self.put(digest, entry)
        return entry

    def put(self, digest: bytes, entry: CachedEntry) -> None:
        """Remember an entry."""
        young = self._young
        young[digest] = entry
        if len(young) * 2 >= self._most:
            self._old = young
            self._young = {}

    def drop(self, digest: bytes) -> None:
        """Forget the digest's entry."""
        self._young.pop(digest, None)
        self._old.pop(digest, None)
