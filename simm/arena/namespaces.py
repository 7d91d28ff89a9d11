"""Namespaces of one arena: names, their numbers, and how the place of one that nobody uses is found.

A namespace has a number, which slots, sessions and peers of the worker carry. The ledger has 256 lines for names, so a
line is used again. **A number never is**: it is ``generation << 8 | line``, and a line's generation grows with each
use. So a number that somebody has kept too long names nothing, and never another namespace. A line ends with its last
generation, after 65,280 namespaces in all.

    word    length of the name, in the low half; generation, in the high half
    name    up to 120 bytes of UTF-8

The word is stored last when a name comes. When it goes, the word gets length 0 and the next generation. A worker that
dies in between leaves a free line.

**What is used.** A number is used by slots, sessions, and the names that must stay. To count it in each commit would
cost each put. Instead a *sweep* marks what it finds, when lines become rare: first all sessions, then the slots block
by block, in turns of the worker. Meanwhile each number that is given out or committed under is marked as well. So at
the end every entry's number has a mark: an entry that was there before its slot was looked at was found there, and a
later one was committed by a session or under a number that was marked. Entries never change their slots.

Peers that keep numbers without a session (a stream, for its clients) compare the word with the number before they use
it (:func:`names_line`). If the line changes after that, the worker refuses the commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import CapacityError
from .layout import NAMESPACE_LINE_BYTES, NAMESPACES

if TYPE_CHECKING:
    from ..table import Table

_LINE_BITS: Final = NAMESPACES.bit_length() - 1
_LENGTH_MASK: Final = (1 << 32) - 1
#: Numbers have 16 bits, and quotas use a number plus 1.
GENERATIONS: Final = 255
#: A sweep is due when fewer lines than this are free.
FREE_LINES_MIN: Final = 64
_NAME_BYTES: Final = NAMESPACE_LINE_BYTES - 8


def line_of(number: int) -> int:
    """Return the line of a number, which may be any."""
    return number % NAMESPACES


def name_bytes(word: int) -> int:
    """Return the length of the name in a line with this word, 0 for none."""
    return word & _LENGTH_MASK


def names_line(number: int, word: int) -> bool:
    """Return True if a line with this word has the name of this number."""
    return word >> 32 == number >> _LINE_BITS and 0 < word & _LENGTH_MASK <= _NAME_BYTES


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
        #: Numbers of names that are never freed.
        self._kept: set[int] = set()
        #: What the sweep has found in use; None outside a sweep.
        self._marked: set[int] | None = None

    def number(self, name: str) -> int:
        """Return the namespace's number, a new one for a new name. Raise CapacityError if no line is free."""
        number = self._numbers.get(name)
        if number is None:
            number = self._add(name)
        if self._marked is not None:
            self._marked.add(number)
        return number

    def _add(self, name: str) -> int:
        if not self._free:
            raise CapacityError(f"an arena has at most {NAMESPACES} namespaces at a time")
        number = self._free.popleft()
        line = line_of(number)
        raw = name.encode()
        at = line * NAMESPACE_LINE_BYTES
        self._lines[at + 8 : at + 8 + len(raw)] = raw
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
        """Give these namespaces their numbers before others take all there are, for good. Return notes for the log."""
        notes = []
        for name in names:
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
        self._marked = {*used, *self._kept}

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
        if name:
            del self._numbers[name]
        if generation < GENERATIONS:
            self._free.append(generation << _LINE_BITS | line)

    # -- recovery ------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Read a predecessor's lines, and return notes for the log. O(lines)."""
        notes = []
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
        self._free = deque(sorted(free))
        return notes

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        self._words.release()
        self._lines.release()
        if self._shown is not None:
            self._shown.release()


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

    def look(self) -> None:
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
