"""Pin values in parts: a value is held by pins of all of its parts, as each part is an ordinary entry.

The manifests are read first, then the parts of all values are pinned together, by one lease at each worker elsewhere. A
part's digest names the put that stored it. So all parts of a value are of one version, whatever happens to the key
meanwhile. If one of them is not there, the value is a miss, and its other parts are given up, so that nothing of it
stays pinned. If it was replaced meanwhile, the search for it begins again, once. The values that are whole stay held.

Forged manifests name any number of parts. So at most PARTS_ASKED are pinned together, and the other values come after.

Parts that find no room among the pins are held by their version alone, as other values are. Once one of those has
changed, a read that touches it is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...host.buffers import Ranges
from .sections import sinks_of
from .values import PARTS_ASKED

if TYPE_CHECKING:
    from ..ops.pinner import Pinner
    from ..ops.pins import Pins, Want
    from .manifest import Manifest
    from .values import Large


class PinnedParts:
    """One value, held by its parts: ``pins`` has those of several values, this one's from number ``first`` on."""

    def __init__(self, manifest: Manifest, pins: Pins, first: int) -> None:
        self._manifest = manifest
        self._pins = pins
        self._first = first

    @property
    def pins(self) -> Pins:
        """Return what holds the parts."""
        return self._pins

    @property
    def total(self) -> int:
        """Return the bytes of the value."""
        return self._manifest.total

    @property
    def whole(self) -> bool:
        """Return whether all parts are there."""
        mine = self.numbers
        return self._pins.lengths[mine.start : mine.stop] == [size for _, size in self._manifest.bounds()]

    @property
    def numbers(self) -> range:
        """Return the numbers of the parts."""
        return range(self._first, self._first + self._manifest.parts)

    def divide(self, ranges: Ranges) -> list[Want]:
        """Return what is read of each part. O(ranges + parts that they touch).

        Raises UsageError for ranges that overlap in the value so much that one part would be sent several times over.
        """
        return [(self._first + index, sink) for index, _, sink in sinks_of(self._manifest, ranges)]

    def read(self, wants: Sequence[Want]) -> bool:
        """Read what :meth:`divide` returned; return whether all of it was there."""
        return None not in self._pins.read_wants(wants)


def pin_parts(large: Large, pinner: Pinner, pins: Pins, digests: Sequence[bytes]) -> None:
    """Hold those of the keys of ``pins`` whose entries are manifests.

    Two exchanges with each worker for all of them, and more for those that turn out to lack a part.
    """
    numbers = sorted(pins.parted)
    found = large.manifests([digests[number] for number in numbers], asked=True)
    # Of two copies of an entry one may be a manifest, and the other one was asked.
    manifests = {number: each or large.manifest(digests[number]) for number, each in zip(numbers, found)}
    left = {number: each for number, each in manifests.items() if each is not None}
    again: set[int] = set()
    while left:
        some = _taken(left)
        held = _held(pinner, pins, digests, some)
        lacking = [number for number, each in held.items() if not each.whole]
        for number, each in held.items():
            if each.whole:
                pins.take_parts(number, each)
        if len(lacking) == len(held):
            held[lacking[0]].pins.release()
        elif lacking:
            held[lacking[0]].pins.drop([part for number in lacking for part in held[number].numbers])
        for number in lacking:
            if number not in again:
                again.add(number)
                now = large.manifest(digests[number])
                if now is not None and now.version != some[number].version:
                    left[number] = now


def _taken(left: dict[int, Manifest]) -> dict[int, Manifest]:
    """Take the first values out of ``left``, by number: of PARTS_ASKED parts together, but at least one value."""
    taken: dict[int, Manifest] = {}
    parts = 0
    for number, manifest in left.items():
        parts += manifest.parts
        if taken and parts > PARTS_ASKED:
            break
        taken[number] = manifest
    for number in taken:
        del left[number]
    return taken


def _held(
    pinner: Pinner, pins: Pins, digests: Sequence[bytes], manifests: dict[int, Manifest]
) -> dict[int, PinnedParts]:
    """Pin the parts of values, by number; return what holds each."""
    keys: list[str] = []
    names: list[bytes] = []
    firsts: list[tuple[int, Manifest, int]] = []
    for number, manifest in manifests.items():
        firsts.append((number, manifest, len(names)))
        keys += [pins.keys[number]] * manifest.parts
        names += manifest.digests(digests[number])
    parts = pinner.pin(keys, names)
    return {number: PinnedParts(manifest, parts, first) for number, manifest, first in firsts}
