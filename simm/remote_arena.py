"""An arena on another machine: where its words, slots and values lie for RDMA, and what the bytes READ from it mean.

The reader's side of ``table.py`` once more, for a reader that cannot load single words: it READs, and what one READ
brings are aligned 8-byte words, each as it was at some time of its own between the READ's begin and its completion.

    1  READ both sets     find the digest, keep the slot's 64 bytes (``image``)
    2  READ shard word    ours?
    3  READ the value
    4  READ the slot      between 1 and 5: bytewise the same as in 1?
    5  READ the slot      begun after 2, 3 and 4 have completed: bytewise the same again?

Why three images, when two would do if READs were atomic? In the local protocol the seq is loaded before the fields and
once more after them. Here each READ's words come in any order. A seq that was there at two times was there all
the time between, as it only grows: so if 1 and 5 have the same even seq, the entry was there from the one moment to the
other, and its chunk had no other tenant while 3 was under way. But was it that entry's chunk? The image of 1 may have
the offset of before an overwrite beside the seq of after it. That the image of 5 has the same offset shows nothing:
it may be that of a later overwrite, whose value came to lie in the old chunk again; then we READ that chunk while
somebody was writing into it. So there is 4: all of it was READ while the seq stood still, hence it is the entry's own,
whole; and if 1 has the same bytes, what we READ was its value. (``tests/rdmamodel`` searches all orders of events; with
two images it finds the run above, with three it finds none.) 4 costs 64 bytes in the chain of 2 and 3, and no time.

An image may be old: kept from an earlier call, it is as good (the *location cache*), and saves step 1. If that call
came to its end, it has been proved to be one entry's (``Place.proved``), and 4 is not needed either. What must be
of this call is the shard word. It is READ before the last image, so at that moment the shard was owned and the entry
there.

A miss is a miss where neither set has the digest and the shard's word is plain. Everything else is not for this
module to decide: an odd slot, a moving, frozen or foreign shard. The caller looks again, or asks by TCP.

Pure: it does no I/O. Costs: 1.5 us a key for the addresses, 1 us for an image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from .constants import SET_BYTES, SLOT_BYTES, VALUE_BYTES_MAX, WAYS
from .errors import CorruptionError, RemoteProtocolError
from .hashing import SHARD_BITS, SHARD_MASK, split
from .layout import HEADER_BYTES, SLOT, Geometry
from .messages import REGION_WRITABLE, RdmaRegion
from .shards import FROZEN

#: No operation carries more bytes: devices have limits from 8 MiB on, and a piece is what stripes and progress go by.
OP_BYTES_MAX: Final = 1 << 20

_FROZEN: Final = FROZEN
_SLOT_MASK: Final = SLOT_BYTES - 1
_unpack: Final = SLOT.unpack_from

#: (remote address, rkey, bytes)
Piece = tuple[int, int, int]


def confirmed(place: Place, between: bytes, now: bytes, word: int) -> bool:
    """Steps 2, 4 and 5: was what was READ the value that ``place`` names? The rule of every RDMA read.

    ``between`` counts unless the place was proved before, and has been READ before ``now``; so has ``word``, the
    shard's, and in this call. The place is proved from now on if it is right.
    """
    image = place.image
    if now != image or not 0 < word < _FROZEN:
        return False
    if not place.proved:
        if between != image:
            return False
        place.proved = True
    return True


class Spots:
    """Where one entry and its shard word lie by one rail."""

    __slots__ = ("pieces", "slot", "slot_key", "visited", "visited_key", "word", "word_key")

    def __init__(self, side: Side, place: Place) -> None:
        geometry = side.geometry
        self.slot, self.slot_key = side.meta(geometry.slots_offset + place.slot * SLOT_BYTES, SLOT_BYTES)
        self.word, self.word_key = side.meta(place.word_offset, 8)
        self.visited, self.visited_key = side.at(geometry.visited_offset + place.slot, 1)
        self.pieces = side.split(place.offset, place.length)


class Place:
    """An entry as its slot's image has it, and where that lies by each rail: what the location cache remembers."""

    __slots__ = ("crc", "flags", "image", "length", "offset", "proved", "slot", "spots", "touched", "word_offset")

    def __init__(self, digest: bytes, slot: int, image: bytes, offset: int, length: int, crc: int, flags: int) -> None:
        self.slot = slot
        self.image = image
        self.offset = offset
        self.length = length
        self.crc = crc
        self.flags = flags
        self.word_offset = HEADER_BYTES + ((digest[0] | digest[1] << 8) & SHARD_MASK) * 8
        #: By side; filled in as they are needed.
        self.spots: dict[Side, Spots] = {}
        #: When its visited byte was stored last, monotonic seconds.
        self.touched = 0.0
        #: Is the image known to be that of one entry, and no mixture? See :func:`confirmed`.
        self.proved = False

    def at(self, side: Side) -> Spots:
        """Where it lies by this rail."""
        spots = self.spots.get(side)
        if spots is None:
            spots = self.spots[side] = Spots(side, self)
        return spots


class Side:
    """The arena as one rail of the server has it: pieces of the segment, each at an address with a key.

    Raises RemoteProtocolError unless they are in order, apart, and hold all that a reader needs in one piece each.
    """

    def __init__(self, geometry: Geometry, rail: int, regions: Sequence[RdmaRegion]) -> None:
        self.geometry = geometry
        self.rail = rail
        mine = sorted((region for region in regions if region.rail == rail), key=lambda region: region.start)
        self._regions = mine
        self._starts = [region.start for region in mine]
        self.check()
        first = mine[0]
        #: Offset of the address, and the key, where one region has header, shards and slots: the usual case.
        self._meta: tuple[int, int] | None = None
        if first.start == 0 and first.length >= geometry.slots_offset + geometry.sets * SET_BYTES:
            self._meta = first.address, first.rkey

    def check(self) -> None:
        """Raise RemoteProtocolError when these regions cannot be an arena. O(regions)."""
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
        """(address, rkey) of bytes that lie in one region. Raises RemoteProtocolError when they do not."""
        number = bisect_right(self._starts, start) - 1
        if number >= 0:
            region = self._regions[number]
            if start + length <= region.start + region.length:
                return region.address + start - region.start, region.rkey
        raise RemoteProtocolError(f"bytes {start} to {start + length} of the segment lie in no one region")

    def meta(self, start: int, length: int) -> tuple[int, int]:
        """:meth:`at` for header, shards and slots."""
        meta = self._meta
        return (meta[0] + start, meta[1]) if meta is not None else self.at(start, length)

    def split(self, start: int, length: int, *, writable: bool = False) -> list[Piece]:
        """The pieces in which bytes are READ or WRITTEN: cut at region ends, at most OP_BYTES_MAX each.

        Raises RemoteProtocolError where there is no region, or, if it shall be ``writable``, one that is not.
        """
        pieces: list[Piece] = []
        end = start + length
        while start < end:
            number = bisect_right(self._starts, start) - 1
            region = self._regions[number] if number >= 0 else None
            if region is None or start >= region.start + region.length:
                raise RemoteProtocolError(f"byte {start} of the segment lies in no region of rail {self.rail}")
            if writable and (not region.flags & REGION_WRITABLE or start < self.geometry.data_offset):
                raise RemoteProtocolError(f"byte {start} of the segment is not there to be written")
            part = min(end, region.start + region.length, start + OP_BYTES_MAX) - start
            pieces.append((region.address + start - region.start, region.rkey, part))
            start += part
        return pieces

    def keyed(self, start: int, length: int, rkey: int) -> list[Piece]:
        """The pieces of a chunk that a key of its own allows, whatever regions it lies in.

        The segment is mapped in one piece by whoever registered it, so a chunk goes on where its first region ends.
        """
        geometry = self.geometry
        if start < geometry.data_offset or start + length > geometry.size:
            raise RemoteProtocolError(f"bytes {start} to {start + length} of the segment are no chunk")
        region = self._regions[bisect_right(self._starts, start) - 1]
        base = region.address + start - region.start
        return [(base + at, rkey, min(OP_BYTES_MAX, length - at)) for at in range(0, length, OP_BYTES_MAX)]


class RemoteArena:
    """Geometry and regions of one arena; equal for all lanes that one endpoint has opened. Immutable."""

    def __init__(self, geometry: Geometry, rails: int, regions: Sequence[RdmaRegion], incarnation: int) -> None:
        self.geometry = geometry
        self.incarnation = incarnation
        self.key = (geometry, rails, tuple(regions))
        #: By the server's rail; None where it has no region at all.
        self.sides = [
            Side(geometry, rail, regions) if any(region.rail == rail for region in regions) else None
            for rail in range(rails)
        ]
        self._sets = geometry.sets
        self._slots_offset = geometry.slots_offset

    def sets(self, digest: bytes) -> tuple[int, int, int]:
        """Offsets in the segment: of the digest's two sets, and of its shard's word."""
        low, high = split(digest)
        sets = self._sets
        first, second = (low >> SHARD_BITS) % sets, high % sets
        if second == first:
            second = (second + 1) % sets
        base = self._slots_offset
        return base + first * SET_BYTES, base + second * SET_BYTES, HEADER_BYTES + (low & SHARD_MASK) * 8

    def find(self, fetched: Any, at: int, digest: bytes) -> int:
        """Way of the digest among the 16 of its two sets, which were READ to byte ``at`` of ``fetched`` (an mmap or
        bytes); -1 when it is in neither."""
        end = at + 2 * SET_BYTES
        found: int = fetched.find(digest, at, end)
        while found >= 0:
            if (found - at) & _SLOT_MASK == 8:
                return (found - at) // SLOT_BYTES
            found = fetched.find(digest, found + 1, end)
        return -1

    def place(self, fetched: Any, at: int, digest: bytes, way: int) -> Place | None:
        """The entry in that way; None when it is in the middle of a write, or torn into something impossible."""
        at += way * SLOT_BYTES
        image = bytes(fetched[at : at + SLOT_BYTES])
        seq, found, offset, length, crc, chunk, _namespace, flags, _stored, _ = _unpack(image)
        geometry = self.geometry
        if seq & 1 or found != digest or not 0 < length <= chunk or length > VALUE_BYTES_MAX:
            return None
        if offset < geometry.data_offset or offset + length > geometry.size:
            return None
        first, second, _word = self.sets(digest)
        base = first if way < WAYS else second
        slot = (base - self._slots_offset) // SLOT_BYTES + way % WAYS
        return Place(digest, slot, image, offset, length, crc, flags)


class Locations:
    """A bounded memory of places, for any number of threads: two generations, the older one dropped when it is time.

    A place belongs to one :class:`RemoteArena`; :meth:`clear` comes with another. O(1), 1 KiB an entry at most.
    """

    __slots__ = ("_most", "_old", "_young")

    def __init__(self, most: int) -> None:
        self._most = max(2, most)
        self._young: dict[bytes, Place] = {}
        self._old: dict[bytes, Place] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, digest: bytes) -> Place | None:
        """Where the digest was last."""
        place = self._young.get(digest)
        if place is None:
            place = self._old.pop(digest, None)
            if place is not None:
                self.put(digest, place)
        return place

    def put(self, digest: bytes, place: Place) -> None:
        """Remember."""
        young = self._young
        young[digest] = place
        if len(young) * 2 >= self._most:
            self._old = young
            self._young = {}

    def drop(self, digest: bytes) -> None:
        """It is there no more."""
        self._young.pop(digest, None)
        self._old.pop(digest, None)

    def clear(self) -> None:
        """Forget everything."""
        self._young = {}
        self._old = {}

    def check(self) -> None:
        """Raise CorruptionError when it holds more than it may, or a place under another's name."""
        if len(self._young) * 2 >= self._most + 2 or len(self._old) * 2 >= self._most + 2:
            raise CorruptionError(f"{len(self)} places, at most {self._most}")
        for digest, place in (*self._young.items(), *self._old.items()):
            if place.image[8:24] != digest:
                raise CorruptionError(f"the place of {digest.hex()} is another's")
