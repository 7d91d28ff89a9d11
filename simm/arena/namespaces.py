"""Namespaces of one arena: names, their numbers, and how the place of one that nobody uses is found.

A namespace has a number, which slots, sessions and peers of the worker carry. The ledger has 256 lines for names, so a
line is used again. **A number never is**: it is ``generation << 8 | line``, and a line's generation grows with each
use. So a number that somebody has kept too long names nothing, and never another namespace. A line ends with its last
generation. So an arena has 65,025 namespaces in its life, as the line of OTHERS_NAMESPACE is never free.

    word    length of the name, in the low half; generation, in the high half
    name    up to 104 bytes of UTF-8
    lease   until when the epoch may be believed
    epoch   that of the values that may be read, 0 for a namespace without epochs (cluster/epochs.py)

The word is stored last when a name comes. When it goes, the word gets length 0 and the next generation. A worker that
dies in between leaves a free line.

**What is used.** A number is used by slots, sessions, and the names that must stay. To count it in each commit would
cost each put. Instead a *sweep* marks what it finds, when lines become rare: first all sessions, then the slots block
by block, in turns of the worker. Meanwhile each number that is given out or committed under is marked as well. So at
the end every entry's number has a mark: an entry that was there before its slot was looked at was found there, and a
later one was committed by a session or under a number that was marked. Entries never change their slots.

Peers that keep numbers without a session (a stream, for its clients) compare the word with the number before they use
it (:func:`names_line`). If the line changes after that, the worker refuses the commit.

**Names without a place.** All lines may be in use, or used up. Clients of one more name then come by TCP or RDMA, and
their values count as those of OTHERS_NAMESPACE. No client may have that name, and no token may be bound to it. So they
are no tenant's, and no quota pays for them. To refuse them would be simpler. But 255 names, each with one old value in
an arena that is not full, would then keep every new name out for as long as nothing is evicted.

Who is bound to a name without a place stores nothing, and so does everybody where that name has a quota. Nor is
anything stored there once a namespace has an epoch: an advance reaches values by their namespace's number. The line of
OTHERS_NAMESPACE then has the epoch NEVER, with which no digest ends that a map leads to. So it has advanced like any
other: its values are dropped before the worker acknowledges the epoch, and what streams and movers still commit there
is refused. A worker makes that line before all others, so that it is always there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..constants import OTHERS_NAMESPACE
from ..errors import CapacityError
from .events.ring import NAMESPACE, EventRing
from .hashing import TAG_AT, tag_of
from .layout import ENTRY_EPOCH, EPOCH_WORD, LEASE_WORD, NAMESPACE_LINE_BYTES, NAMESPACES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..table import Table
    from .space import Space

_LINE_BITS: Final = NAMESPACES.bit_length() - 1
_LENGTH_MASK: Final = (1 << 32) - 1
#: Numbers have 16 bits, and quotas use a number plus 1.
GENERATIONS: Final = 255
#: A sweep is due when fewer lines than this are free.
FREE_LINES_MIN: Final = 64
_NAME_BYTES: Final = 8 * LEASE_WORD - 8
_LINE_WORDS: Final = NAMESPACE_LINE_BYTES // 8
#: The epoch of OTHERS_NAMESPACE where namespaces have epochs. No map comes as far.
NEVER: Final = (1 << 64) - 1
#: Entries that one turn of the room that a put needs drops, at most.
STALE_ENTRIES: Final = 64


def line_of(number: int) -> int:
    """Return the line of a number, which may be any."""
    return number % NAMESPACES


def name_bytes(word: int) -> int:
    """Return the length of the name in a line with this word, 0 for none."""
    return word & _LENGTH_MASK


def names_line(number: int, word: int) -> bool:
    """Return True if a line with this word has the name of this number."""
    return word >> 32 == number >> _LINE_BITS and 0 < word & _LENGTH_MASK <= _NAME_BYTES


def names_in(words: memoryview, first: int) -> set[str]:
    """Return the names in an arena's lines, of which the first one begins at a word. O(lines).

    The worker may change a line meanwhile, so a name can be wrong.
    """
    found = set()
    for at in range(first, first + NAMESPACES * _LINE_WORDS, _LINE_WORDS):
        size = name_bytes(words[at])
        if 0 < size <= _NAME_BYTES:
            found.add(words[at + 1 : at + _LINE_WORDS].tobytes()[:size].decode(errors="replace"))
    return found


class NamespaceTable:
    """The names of one arena. Constructed for empty lines; :meth:`recover` reads a predecessor's. Methods are O(1)."""

    def __init__(self, lines: memoryview, shown: memoryview | None = None) -> None:
        """``shown``: a copy of the lines for others, who do not see ``lines`` then."""
        self._lines = lines
        self._shown = shown
        self._words = lines.cast("Q")
        #: By number, in the order in which they came. A name that is damaged is "".
        self.names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        #: What free lines will have as numbers; those that were not used for longest come first.
        self._free: deque[int] = deque(range(NAMESPACES))
        #: Numbers of names that are not freed.
        self._kept: set[int] = set()
        #: What the sweep has found in use; None outside a sweep.
        self._marked: set[int] | None = None
        #: By name: the epochs that the supervisor has named.
        self._epochs: dict[str, int] = {}
        #: By number, for namespaces with epochs: how the digests of values end that may be stored and read.
        self.tags: dict[int, bytes] = {}
        self._until_ns = 0
        #: Returns CLOCK_BOOTTIME in ns. The worker sets it.
        self.clock: Callable[[], int] = lambda: 0
        #: Numbers whose older entries a predecessor may have left undropped.
        self._unswept: set[int] = set()
        #: Where others are told which namespaces advance (``arena/events/ring.py``); None: nobody is.
        self.events: EventRing | None = None

    def number(self, name: str) -> int:
        """Return the namespace's number, a new one for a new name. Raise CapacityError if no line is free."""
        number = self._numbers.get(name)
        if number is None:
            number = self._add(name)
        if self._marked is not None:
            self._marked.add(number)
        return number

    def find(self, name: str) -> int:
        """Return the namespace's number, -1 if it has none."""
        return self._numbers.get(name, -1)

    def _add(self, name: str) -> int:
        if not self._free:
            raise CapacityError(f"an arena has at most {NAMESPACES} namespaces at a time, {OTHERS_NAMESPACE} included")
        number = self._free.popleft()
        line = line_of(number)
        raw = name.encode()
        at = line * NAMESPACE_LINE_BYTES
        self._lines[at + 8 : at + 8 + len(raw)] = raw
        never = name == OTHERS_NAMESPACE and bool(self.tags or self._epochs)
        self._store_epoch(number, NEVER if never else self._epochs.get(name, 0))
        self._words[at // 8] = number >> _LINE_BITS << 32 | len(raw)
        self._show(line)
        self.names[number] = name
        self._numbers[name] = number
        return number

    def _show(self, line: int) -> None:
        """Copy a line for others, its word last."""
        if self._shown is not None:
            at = line * NAMESPACE_LINE_BYTES
            self._shown[at + 8 : at + NAMESPACE_LINE_BYTES] = self._lines[at + 8 : at + NAMESPACE_LINE_BYTES]
            self._shown[at : at + 8].cast("Q")[0] = self._words[at // 8]

    def mend(self) -> int:
        """Show the lines again in which somebody else has stored something. Return how many. O(lines), by numpy."""
        if self._shown is None:
            return 0
        rows = np.frombuffer(self._lines, np.uint64).reshape(NAMESPACES, -1)
        spoilt = np.flatnonzero((rows != np.frombuffer(self._shown, np.uint64).reshape(NAMESPACES, -1)).any(axis=1))
        for line in spoilt.tolist():
            self._show(line)
        return len(spoilt)

    def knows(self, number: int) -> bool:
        """Return True for the number of a namespace; entries of it may be committed then."""
        if number not in self.names:
            return False
        if self._marked is not None:
            self._marked.add(number)
        return True

    def keep(self, names: Sequence[str]) -> list[str]:
        """Give these namespaces their numbers before others take all there are, and keep no others. Return notes.

        They have them until the next call, also while nobody uses them. So has OTHERS_NAMESPACE, before them.
        """
        notes = []
        self._kept.clear()
        for name in (OTHERS_NAMESPACE, *names):
            try:
                self._kept.add(self.number(name))
            except CapacityError as exc:
                notes.append(f"no room for the namespace {name!r}: {exc}")
        return notes

    # -- places of names that nobody uses ------------------------------------------------------------

    @property
    def short(self) -> bool:
        """Whether a sweep is due."""
        return len(self._free) < FREE_LINES_MIN

    def begin_sweep(self, used: Iterable[int]) -> None:
        """Begin to look for what is used: the kept names, and these numbers of sessions. O(sessions)."""
        self._marked = {*used, *self._kept, *self.tags}

    def mark(self, numbers: Iterable[int]) -> None:
        """Note that a sweep has found entries with these numbers."""
        if self._marked is not None:
            self._marked.update(numbers)

    def end_sweep(self) -> int:
        """Free the lines of all numbers without a mark, and return how many. O(names)."""
        marked, self._marked = self._marked, None
        if marked is None:
            return 0
        unused = self.names.keys() - marked
        for number in sorted(unused):
            self._free_line(number)
        return len(unused)

    def _free_line(self, number: int) -> None:
        generation = (number >> _LINE_BITS) + 1
        line = line_of(number)
        self._words[line * NAMESPACE_LINE_BYTES // 8] = generation << 32
        self._show(line)
        name = self.names.pop(number)
        self.tags.pop(number, None)
        if name:
            del self._numbers[name]
        if generation < GENERATIONS:
            self._free.append(generation << _LINE_BITS | line)

    # -- epochs --------------------------------------------------------------------------------------

    def _store_epoch(self, number: int, epoch: int) -> None:
        """Store a number's epoch in its line. The lease follows: a reader looks at it first."""
        at = line_of(number) * _LINE_WORDS
        if self.events is not None:
            self.events.append(NAMESPACE, number)
        for word, value in ((EPOCH_WORD, epoch), (LEASE_WORD, self._until_ns if epoch else 0)):
            self._words[at + word] = value
            if self._shown is not None:
                self._shown.cast("Q")[at + word] = value
        self.tags.pop(number, None)
        if epoch:
            self.tags[number] = tag_of(epoch)
            if self._marked is not None:
                self._marked.add(number)  # as a sweep that begins now would: its line says that there are epochs

    def take_epochs(self, epochs: Mapping[str, int]) -> set[int]:
        """Store newer epochs of namespaces, by name, and return the numbers of those that had none. O(names).

        Their entries without an epoch can be read until they are dropped (:class:`StaleEntries`). Each gets a line, as
        only lines say that there are epochs. With the first epoch, OTHERS_NAMESPACE gets one as well.
        """
        first, self._unswept = self._unswept, set()
        for name, epoch in epochs.items():
            # A manager of another build may name OTHERS_NAMESPACE. Its epoch is NEVER, and no other.
            if name == OTHERS_NAMESPACE or epoch <= self._epochs.get(name, 0):
                continue
            self._epochs[name] = epoch
            number = self._numbers.get(name)
            known = self._words[line_of(number) * _LINE_WORDS + EPOCH_WORD] if number is not None else 0
            if number is not None and known < epoch:
                self._store_epoch(number, epoch)
            if not known and number is not None:
                first.add(number)
            if number is None:
                with contextlib.suppress(CapacityError):
                    self.number(name)
        others = self._numbers.get(OTHERS_NAMESPACE)
        if self._epochs and others is not None and others not in self.tags:
            self._store_epoch(others, NEVER)
            first.add(others)
        return first

    def wrapping(self, epochs: Mapping[str, int]) -> list[int]:
        """Return the numbers whose digests may end like those of a much older epoch, with these new ones."""
        known = self.epochs()
        return [self._numbers[name] for name, epoch in epochs.items() if epoch >> 32 > known.get(name, epoch) >> 32]

    def epochs(self) -> dict[str, int]:
        """Return the epochs in the lines, by name, without that of OTHERS_NAMESPACE."""
        return {
            self.names[each]: self._words[line_of(each) * _LINE_WORDS + EPOCH_WORD]
            for each in self.tags if self.names[each] != OTHERS_NAMESPACE
        }  # fmt: skip

    def forget_epochs(self) -> None:
        """Forget all epochs and the lease, as they are another cluster's. No entry is left that has an epoch.

        The next cluster may give shorter leases, and a manager that cannot reach this worker counts on those.
        """
        self._epochs.clear()
        self._unswept.clear()
        self._until_ns = 0
        for number in list(self.tags):
            self._store_epoch(number, 0)

    def extend_lease(self, until_ns: int) -> None:
        """Let values with an epoch be read until this CLOCK_BOOTTIME, in ns. O(namespaces with epochs)."""
        self._until_ns = until_ns
        for number in self.tags:
            at = line_of(number) * _LINE_WORDS
            self._words[at + LEASE_WORD] = until_ns
            if self._shown is not None:
                self._shown.cast("Q")[at + LEASE_WORD] = until_ns

    def readable(self, number: int, digest: bytes, flags: int) -> bool:
        """Return True if an entry may be read, as far as epochs say: see ``cluster/epochs.py``."""
        tag = self.tags.get(number)
        if tag is None or not flags & ENTRY_EPOCH:
            return tag is None and not flags & ENTRY_EPOCH
        return digest[TAG_AT:] == tag and self.clock() < self._until_ns

    def readable_many(
        self, number: int, high: NDArray[np.uint64], flags: NDArray[np.uint16]
    ) -> NDArray[np.bool_]:
        """Do :meth:`readable` for many entries of one namespace. ``high``: the upper halves of their digests."""
        tag = self.tags.get(number)
        readable: NDArray[np.bool_] = flags & ENTRY_EPOCH == (0 if tag is None else ENTRY_EPOCH)
        if tag is not None:
            readable &= high >> np.uint64(32) == np.uint64(int.from_bytes(tag, "little"))
            readable &= self.clock() < self._until_ns
        return readable

    # -- recovery ------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Read a predecessor's lines, and return notes for the log. O(lines)."""
        notes = []
        self.tags.clear()
        self.names.clear()
        self._numbers.clear()
        free: list[int] = []
        for line in range(NAMESPACES):
            at = line * NAMESPACE_LINE_BYTES
            word = self._words[at // 8]
            generation, size = word >> 32, word & _LENGTH_MASK
            number = generation << _LINE_BITS | line
            if generation >= GENERATIONS:  # used up, or damaged
                if generation > GENERATIONS or size:
                    notes.append(f"the line of namespace {line} is damaged: given up")
                continue
            if not size:
                free.append(number)
                continue
            try:
                name = bytes(self._lines[at + 8 : at + 8 + size]).decode() if size <= _NAME_BYTES else ""
            except UnicodeDecodeError:
                name = ""
            if not name or name in self._numbers:
                # No client has this one: the keys' digests tell namespaces apart, not the line.
                notes.append(f"the name of namespace {number} is damaged: given up")
                name = ""
            else:
                self._numbers[name] = number
            self.names[number] = name
            if epoch := self._words[line * _LINE_WORDS + EPOCH_WORD]:
                self.tags[number] = tag_of(epoch)
                self._until_ns = max(self._until_ns, self._words[line * _LINE_WORDS + LEASE_WORD])
        self._free = deque(sorted(free))
        self._unswept = set(self.tags)
        self.mend()  # the predecessor may have died before it had shown an epoch
        return notes

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        self._words.release()
        self._lines.release()
        if self._shown is not None:
            self._shown.release()


class StaleEntries:
    """Drops the entries of one table that nobody can read, as their namespaces have advanced.

    It looks through the table in rounds. What advances in the middle of one does not begin it anew: else advances that
    come faster than a round lasts would keep it from the last slots for ever. Another round follows instead, so each
    namespace of :attr:`first` is there for two rounds at most.

    ``drop``: removes the entry in a slot; ``drop_many``: those of many, none of which is held, and whose chunks lie at
    these offsets. Nothing may be pending.
    """

    def __init__(
        self, namespaces: NamespaceTable, table: Table, space: Space, drop: Callable[[int], None],
        drop_many: Callable[[list[int], list[int]], None] | None = None,
    ) -> None:  # fmt: skip
        self._namespaces = namespaces
        self._table = table
        self._space = space
        self._drop, self._drop_many = drop, drop_many
        self._found: list[int] = []
        self._at = table.slots
        #: Namespaces that have just got epochs: until all their older entries are dropped, these can be read.
        self.first: set[int] = set()
        #: Those of them that came in the middle of this round; another one follows it.
        self._later: set[int] = set()
        self._again = False
        #: Entries dropped so far.
        self.dropped = 0

    @property
    def due(self) -> bool:
        """Whether there may be stale entries."""
        return bool(self._found) or self._at < self._table.slots

    def take(self, epochs: Mapping[str, int]) -> None:
        """Make all values of these namespaces unreadable but those of these epochs, if they are newer. O(names).

        Entries of :attr:`first` can be read until they are dropped. If room is needed, a step of them goes before what
        can be read, and of a batch another one while that makes room. No more: in slabs of other classes, 10^7 of them
        may make no room for the value.
        """
        before = self._namespaces.epochs()
        for number in self._namespaces.wrapping(epochs):
            self._drop_all(number)
        first = self._namespaces.take_epochs(epochs)
        if not self._table.entries or (not first and before == self._namespaces.epochs()):
            return  # nothing is old: what is committed from now on has these epochs
        self.first |= first
        if self._at and self.due:
            self._later |= first
            self._again = True
        else:
            self._at = 0
        self._space.spare = self.step

    def _drop_all(self, number: int) -> None:
        """Drop all entries of a namespace, whose tags begin anew: after 2^32 maps, or by a false epoch. O(slots)."""
        at = 0
        while at < self._table.slots:
            found, at = self._table.stale_from(at, {number: -1})
            for slot in found:
                self._drop(slot)
            self.dropped += len(found)

    def _drop_found(self, slots: list[int]) -> None:
        """Drop the entries in these slots: together, as that is much faster, but for those that are held."""
        space = self._space
        alone = slots
        if self._drop_many is not None:
            placed = [(slot, space.offset(slot)) for slot in slots]
            alone = [slot for slot, offset in placed if space.is_held(offset)]
            if together := [(slot, offset) for slot, offset in placed if not space.is_held(offset)]:
                self._drop_many([slot for slot, _ in together], [offset for _, offset in together])
        for slot in alone:
            self._drop(slot)
        self.dropped += len(slots)

    def end(self) -> None:
        """Look no further."""
        self.first.clear()
        self._later.clear()
        self._found.clear()
        self._again = False
        self._at = self._table.slots

    def step(self) -> bool:
        """Drop STALE_ENTRIES at most. Return True while :attr:`due`. O(STALE_ENTRIES + a block), by numpy."""
        namespaces, table = self._namespaces, self._table
        if not self._found and self._at < table.slots:
            tags = {number: int.from_bytes(tag, "little") for number, tag in namespaces.tags.items()}
            found, self._at = table.stale_from(self._at, {**dict.fromkeys(self.first, -1), **tags})
            self._found += found
        stale: list[int] = []
        for slot in self._found[-STALE_ENTRIES:]:
            # Since the search it may have been replaced, and epochs may have come.
            entry = table.entry(slot)
            tag = namespaces.tags.get(entry.namespace)
            old = entry.digest[TAG_AT:] != tag or not entry.flags & ENTRY_EPOCH
            if entry.offset and old and (tag is not None or entry.namespace in self.first):
                stale.append(slot)
        del self._found[-STALE_ENTRIES:]
        self._drop_found(stale)
        if not self.due:
            self.first, self._later = self._later, set()
            self._at = 0 if self._again else table.slots
            self._again = False
        return self.due


class Sweep:
    """One search for namespaces that nobody uses, in steps of a block of slots.

    ``sessions``: the numbers of all sessions now.
    """

    def __init__(self, namespaces: NamespaceTable, table: Table, sessions: Iterable[int]) -> None:
        self._namespaces = namespaces
        self._table = table
        self._at = 0
        namespaces.begin_sweep(sessions)

    def step(self) -> bool:
        """Look at the next block. Return False when all is done, and the unused places are free. By numpy."""
        found, self._at = self._table.namespaces_from(self._at)
        self._namespaces.mark(np.unique(found).tolist())
        if self._at < self._table.slots:
            return True
        self.freed = self._namespaces.end_sweep()
        return False

    #: How many namespaces were freed.
    freed = 0


class Sweeper:
    """Runs a sweep when one is due, in turns of at most ``turn_s`` seconds of the worker's loop.

    ``sessions``: returns the numbers of all sessions. ``later``: calls a function after so many seconds.
    """

    #: A sweep that has freed too little is repeated after this, seconds.
    AGAIN_S: Final = 1.0

    def __init__(
        self, namespaces: NamespaceTable, table: Table, sessions: Callable[[], Iterable[int]],
        clock: Callable[[], float], later: Callable[[float, Callable[[], None]], object], turn_s: float,
    ) -> None:  # fmt: skip
        self._namespaces = namespaces
        self._table = table
        self._sessions = sessions
        self._clock = clock
        self._later = later
        self._turn_s = turn_s
        self._sweep: Sweep | None = None
        self._not_before = 0.0
        #: Namespaces freed so far.
        self.freed = 0

    def maintain(self) -> None:
        """Begin a sweep if one is due. Call it when somebody has asked for a name's number. O(1) if none is due."""
        if self._sweep is None and self._namespaces.short and self._clock() >= self._not_before:
            self._sweep = Sweep(self._namespaces, self._table, self._sessions())
            self._later(0.0, self._turn)

    def _turn(self) -> None:
        sweep = self._sweep
        if sweep is None:
            return
        until = self._clock() + self._turn_s
        while sweep.step():
            if self._clock() >= until:
                self._later(self._turn_s, self._turn)
                return
        self._sweep = None
        self.freed += sweep.freed
        self._not_before = self._clock() + self.AGAIN_S
