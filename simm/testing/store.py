"""The memory of fakes: values, failures to inject, eviction."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..arena.layout import ENTRY_LARGE
from ..config.parsers import parse_bytes
from ..constants import KEEP_HARD, KEEP_PARTS
from ..errors import UsageError
from ..host import fork
from ..sdk.ops.epochs import SharedEpochs
from ..wire.status import Status

#: Names of a store's calls. ``get`` includes ``get_into`` and reads of pinned values. Each includes its ``_many`` and
#: asyncio forms.
OPERATIONS: Final = ("put", "get", "exists", "delete", "view", "pin", "keep", "prefetch")

_Array = np.ndarray[Any, np.dtype[np.uint8]]

#: Guards all stores. One lock, so that a fork can hold it: the child then finds no store half changed.
LOCK: Final = threading.RLock()
fork.hold(LOCK)


class _Entry:
    """A value, and the memory of its views while there are any."""

    __slots__ = ("flags", "seen", "value")

    def __init__(self, value: bytes, flags: int = 0) -> None:
        self.value = value
        self.flags = flags
        self.seen: weakref.ref[_Array] | None = None

    @property
    def pinned(self) -> bool:
        """Whether a view of it is alive."""
        return self.seen is not None and self.seen() is not None

    def view(self) -> memoryview:
        """Return the value in place, pinned as long as anything made from it is alive."""
        array = None if self.seen is None else self.seen()
        if array is None:
            array = np.frombuffer(self.value, np.uint8)
            self.seen = weakref.ref(array)
        return array.data


class FakeStore:
    """The memory that fakes share, and the failures to inject. Any thread may change all of it at any time.

    Args:
        capacity: bytes of values, or text such as ``"64M"``; None for no bound. The store evicts the least recently
            used value first, and none that has a view.
        unavailable: begin with an outage.
        latency: called with the operation (one of :data:`OPERATIONS`) and the number of keys before each call is
            carried out, in the caller's thread. It may sleep, wait or record its arguments; no lock is held. The call
            raises what it raises.

    Raises ConfigError for a capacity that is not a size.
    """

    def __init__(
        self, capacity: int | str | None = None, *, unavailable: bool = False,
        latency: Callable[[str, int], object] | None = None,
    ) -> None:  # fmt: skip
        self.capacity = None if capacity is None else parse_bytes(capacity)
        #: While this is true, every get is a miss and every put fails. Values stay stored.
        self.unavailable = unavailable
        self.latency = latency
        #: Number of values evicted.
        self.evictions = 0
        self._used = 0
        #: By digest, least recently used first.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        #: Digests that leave together, by each of them.
        self._groups: dict[bytes, frozenset[bytes]] = {}
        #: (operation or None for any, calls until the one that fails)
        self._failing: list[tuple[str | None, int]] = []
        #: By digest: the class, the end by the monotonic clock, and the namespace.
        self._kept: dict[bytes, tuple[int, float, str]] = {}
        self._name = os.urandom(8).hex()
        self._epochs, _stores[self._name] = SharedEpochs(), self

    def __len__(self) -> int:
        """Return the number of values, in all namespaces."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """Return True, also for an empty store."""
        return True

    def __repr__(self) -> str:
        bound = "" if self.capacity is None else f" of {self.capacity}"
        return f"<FakeStore {len(self)} values, {self._used}{bound} bytes{', unavailable' * self.unavailable}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _store_of, (self._name,)

    @property
    def used_bytes(self) -> int:
        """The bytes of all values."""
        return self._used

    def fail(self, *calls: int, operation: str | None = None) -> None:
        """Turn the n-th call from now on into an outage, for each number given; of one operation, or of any.

        The call of a batch fails as a whole. Outages from earlier calls of this method stay pending.
        """
        if operation is not None and operation not in OPERATIONS:
            raise UsageError(f"an operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
        for number in calls:
            if type(number) is not int or number < 1:
                raise UsageError(f"calls are counted from 1, not from {number!r}")
        with LOCK:
            self._failing += [(operation, number) for number in calls]

    def clear(self) -> None:
        """Drop all values, as after a restart of a server. Views of them stay valid."""
        with LOCK:
            self._entries.clear()
            self._kept.clear()
            self._groups.clear()
            self._used = 0

    # -- for fakes --------------------------------------------------------------------------------

    def _serves(self, operation: str, keys: int) -> bool:
        """Begin a call; return whether it is carried out."""
        latency = self.latency
        if latency is not None:
            latency(operation, keys)
        with LOCK:
            due = False
            left = []
            for wanted, number in self._failing:
                number -= wanted is None or wanted == operation
                if number:
                    left.append((wanted, number))
                else:
                    due = True
            self._failing = left
            return not (due or self.unavailable)

    def _used_now(self, digest: bytes) -> _Entry | None:
        """Return an entry, which is the last one used from now on. The lock is held."""
        entry = self._entries.get(digest)
        if entry is not None:
            for each in self._groups.get(digest, ()):
                self._entries.move_to_end(each)
            self._entries.move_to_end(digest)
        return entry

    def _find(self, digest: bytes) -> bytes | None:
        with LOCK:
            entry = self._used_now(digest)
            return None if entry is None else entry.value

    def _view(self, digest: bytes) -> memoryview | None:
        with LOCK:
            entry = self._used_now(digest)
            return None if entry is None else entry.view()

    def _flags(self, digest: bytes) -> int:
        """Return an entry's flags, 0 if there is none."""
        entry = self._entries.get(digest)
        return 0 if entry is None else entry.flags

    def _has(self, digest: bytes) -> bool:
        return digest in self._entries

    def _keep(self, digest: bytes, value: bytes, flags: int = 0) -> bool:
        """Store a value, evicting others. Return False, and change nothing, if there is no room for it."""
        with LOCK:
            old = self._entries.get(digest)
            more = len(value) - (0 if old is None else len(old.value))
            if not self._make_room(more, digest):
                return False
            old = self._entries.get(digest)  # or it has left with others of its group
            self._entries[digest] = _Entry(value, flags)
            if flags & ENTRY_LARGE:
                self._kept.pop(digest, None)  # its parts are not kept
            self._entries.move_to_end(digest)
            self._used += len(value) - (0 if old is None else len(old.value))
            return True

    def _make_room(self, more: int, but: bytes) -> bool:
        if self.capacity is None:
            return True
        lacks = self._used + more - self.capacity
        victims = []
        now = time.monotonic()
        self._kept = {digest: kept for digest, kept in self._kept.items() if kept[1] > now}
        soft = [each for each in self._entries.items() if each[0] in self._kept]
        for digest, entry in [*(each for each in self._entries.items() if each[0] not in self._kept), *soft]:
            if lacks <= 0:
                break
            if digest != but and not entry.pinned and self._kept.get(digest, (0,))[0] != KEEP_HARD:
                victims.append(digest)
                lacks -= len(entry.value)
        if lacks > 0:
            return False
        before = len(self._entries)
        for digest in victims:
            self._drop(digest)
        self.evictions += before - len(self._entries)
        return True

    def _keep_for(self, digest: bytes, how: int, seconds: int, namespace: str) -> int:
        """Keep an entry from eviction, 0 seconds to end that; return a Status."""
        with LOCK:
            entry = self._entries.get(digest)
            if entry is None:
                return Status.NOT_FOUND
            if entry.flags & ENTRY_LARGE and not how & KEEP_PARTS:
                return Status.TOO_LARGE
            how &= ~KEEP_PARTS
            before = self._kept.pop(digest, None)
            if not seconds:
                return Status.OK
            if how == KEEP_HARD and self.capacity is not None:
                now = time.monotonic()
                hard = [
                    (owner, len(self._entries[each].value)) for each, (kind, until, owner) in self._kept.items()
                    if kind == KEEP_HARD and until > now
                ]  # fmt: skip
                own = sum(size for owner, size in hard if owner == namespace) + len(entry.value)
                if own > self.capacity // 4 or sum(size for _, size in hard) + len(entry.value) > self.capacity // 2:
                    if before is not None:
                        self._kept[digest] = before
                    return Status.OVER_QUOTA
            self._kept[digest] = how, time.monotonic() + seconds, namespace
            return Status.OK

    def _is_hard(self, digest: bytes) -> bool:
        """Return True if an entry may not be evicted now. The lock is held."""
        how, until, _ = self._kept.get(digest, (0, 0.0, ""))
        return how == KEEP_HARD and until > time.monotonic()

    def _group(self, digests: Sequence[bytes]) -> bool:
        """Let entries leave together from now on. Return False, and change nothing, unless all of them are there."""
        with LOCK:
            if not all(digest in self._entries for digest in digests):
                return False
            for digest in digests:
                for each in self._groups.get(digest, ()):
                    self._groups.pop(each, None)
            self._groups.update(dict.fromkeys(digests, frozenset(digests)))
            return True

    def _drop(self, digest: bytes, size: int = -1) -> bool:
        """Drop an entry, with ``size`` only if its value has that many bytes; return whether there was one."""
        with LOCK:
            entry = self._entries.get(digest)
            if entry is None or size not in (-1, len(entry.value)):
                return False
            del self._entries[digest]
            self._kept.pop(digest, None)
            self._used -= len(entry.value)
            mates = self._groups.get(digest, frozenset())
            for each in mates:
                del self._groups[each]
            for each in mates - {digest}:
                if not self._entries[each].pinned and not self._is_hard(each):
                    self._drop(each)
            return True


#: The stores of this process by name: a pickled store refers to itself and is not copied.
_stores: weakref.WeakValueDictionary[str, FakeStore] = weakref.WeakValueDictionary()


def _store_of(name: str) -> FakeStore:
    store = _stores.get(name)
    if store is None:
        raise UsageError("this FakeStore is in another process: use simm.testing.local_cluster between processes")
    return store
