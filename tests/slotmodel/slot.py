"""The slot protocol of ``simm/table.py`` and ``simm/reader.py``, one load or store at a time.

Who takes part: one worker, which alone changes slot, shard word and undo record; two writers (clients that
store a value's two bytes into a chunk granted to them and then send a commit); two readers; two
chunks; one slot, in which key K is looked for and key L may lie for a while.

    reader                                  worker, overwrite of K              worker, clear of the slot
    1  rseq = seq, odd: give up             a  undo image, then its valid word  b  seq += 1
    2  key, offset, length                  b  seq += 1                         c  key, offset, length = 0
    3  seq == rseq                          c  key, offset, length = new        d  seq += 1
    4  both bytes of the chunk              d  seq += 1                         -  chunk is free
    5  shard word not 0                     u  undo record's valid word = 0
    6  seq == rseq: a hit                   e  grant ended, old chunk is free

A first write of an empty slot goes without (a) and (u). Giving the shard up: its word = 0, then the slot is
cleared; getting it back: its word = epoch. While the word is 0, another worker may store a newer K
at any time. The worker may die between any two stores; its successor repairs as ``Table.recover`` does.
A writer's connection may close at any time; its grant ends only when it has been fenced, which is
one step here: it stores nothing any more and the chunk is free.

What must not be: a hit whose bytes are not one value of K that was current at some moment between steps 1
and 6 (the value is torn, another key's, never committed, or superseded), and a copy whose offset and length
are of different entries (it would read past the chunk, or past the segment).

A reader that gives up starts over, which is a new read here: the harder case, as fewer values are
right for it. Finding the slot needs no step of its own: a find that fails is a miss, one that succeeds leads to
step 1. The L that a writer stores is always one value, as any byte of it is wrong in a read of K.

Without end in few states
-------------------------
Runs have no bound: values are named 1, 2, 3... in the order in which they stand in chunks, writers, and
readers, and renamed after each step that changes one (nothing in the protocol depends on what a value is, so two
states that differ in names alone behave alike). The sequence number has 3 bits and wraps after four
writes. That stands for 44 bits when a read lasts less than 2^43 writes: in the model the worker does not start a
fourth write of the slot while a reader is at work (``lasting``); without that bound the search finds the wrap.

Reduced, three more sets of states count as one. None can hide a fault:

* Sequence numbers are only ever compared for equality, so adding 2 to the slot's and to all readers' at
  once changes nothing: the slot's is kept at 0 or 1.
* Readers run the same program and store nothing, so they may change places.
* Bytes of a chunk that is free, and that nobody is reading or writing, become "never written". A writer stores both
  before it commits; who reads them without that reads something that is wrong in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .packed import Batch, Layout, Mask, Model, Step, Words

_U64 = np.uint64

#: Faults to plant -> what it is, and the smallest model that shows it.
PLANTS: Final[dict[str, tuple[str, dict[str, bool]]]] = {
    "aba": ("the sequence number does not grow: (d) stores what (b) found", {}),
    "lasting": ("a read may last any number of writes, so three bits wrap in it", {}),
    "no_step_2": ("the key in the slot is not compared", {}),
    "no_step_3": ("the fields are not re-checked before the copy", {"bounds": True}),
    "no_step_6": ("the sequence number is not re-checked after the copy", {}),
    "no_step_5": ("the shard word is not looked at", {"shard": True}),
    "word_last": ("the shard word is looked at after the sequence number, not before", {"shard": True}),
    "keeps_rows": ("a shard that is given up keeps its entries, and comes back with them", {"shard": True}),
    "free_early": ("the replaced chunk is free before (b)", {}),
    "free_odd": ("the replaced chunk is free between (b) and (d)", {"deaths": True}),
    "free_cleared": ("a cleared slot's chunk is free before its (b)", {}),
    "no_fence": ("a lost connection's grant is free at once, though its writer may still write", {"closes": True}),
    "undo_stays": ("the undo record stays valid after (d)", {"deaths": True}),
    "even_first": ("the sequence number is even again before the last field is stored", {"bounds": True}),
}

NONE, KEY, OTHER = 0, 1, 2
#: Values: 0 never written, 1 to 9 of K, 15 of L.
FOREIGN: Final = 15


class W(IntEnum):
    """Places of the worker."""

    IDLE = 0
    IMAGE = 1
    VALID = 2
    ODD = 3
    PUT_KEY = 4
    PUT_OFFSET = 5
    PUT_LENGTH = 6
    EVEN = 7
    UNDO_OFF = 8
    END = 9
    CLEAR_ODD = 10
    CLEAR_KEY = 11
    CLEAR_OFFSET = 12
    CLEAR_LENGTH = 13
    CLEAR_EVEN = 14
    AWAY = 15
    DEAD = 16
    FIX_OFFSET = 17
    FIX_LENGTH = 18
    FIX_KEY = 19
    FIX_EVEN = 20
    FIX_UNDO = 21
    FIX_HOLDS = 22


class C(IntEnum):
    """Places of a writer: without a grant, before its first and second byte, with both stored and the commit sent."""

    NONE = 0
    FIRST = 1
    SECOND = 2
    SENT = 3


class R(IntEnum):
    """Places of a reader: what it does next."""

    SEQ = 0
    KEY = 1
    OFFSET = 2
    LENGTH = 3
    SEQ_AGAIN = 4
    BYTE_0 = 5
    BYTE_1 = 6
    WORD = 7
    SEQ_LAST = 8
    WORD_LAST = 9


FAULTS: Final = {
    1: "a hit whose bytes are of two values",
    2: "a hit with another key's bytes, or bytes never written",
    3: "a hit with a value that was not current at any time of the read",
    4: "a copy with the offset of one entry and the length of another",
}


def layout(readers: int) -> Layout:
    """Fields of a state."""
    arena = {
        "seq": 3, "key": 2, "offset": 2, "length": 2, "word": 1, "undo": 1, "undo_offset": 2,
        "a0": 4, "a1": 4, "b0": 4, "b1": 4, "current": 4,
        "w": 5, "by": 1, "old": 2, "why": 1, "bad": 3,
    }  # fmt: skip
    for writer in "xy":
        arena |= {f"{writer}": 2, f"{writer}_chunk": 2, f"{writer}_key": 1, f"{writer}_held": 1, f"{writer}_open": 1}
    groups = [arena, {f"{writer}_value": 4 for writer in "xy"}]
    for number in range(readers):
        reader = f"r{number}"
        groups[1] |= {
            reader: 4, f"{reader}_seq": 3, f"{reader}_offset": 2, f"{reader}_length": 2, f"{reader}_value": 4,
            f"{reader}_torn": 1, f"{reader}_right": 10, f"{reader}_writes": 2,
        }  # fmt: skip
    return Layout(*groups)


class SlotModel:
    """Builds the :class:`Model` with some faults planted.

    Args:
        plants: names out of :data:`PLANTS`; none: the real rules.
        readers, writers: how many take part, 1 or 2 each. Readers store nothing, so what two can find one can find;
            two show that the model has not been cut to fit.
        deaths: the worker may die.
        closes: a writer's connection may close.
        shard: the shard may be given up and come back.
        bounds: a copy with fields of two entries counts as a fault by itself.
        reduced: search one of each set of states that behave alike, see below.
    """

    def __init__(
        self,
        plants: Iterable[str] = (),
        *,
        readers: int = 2,
        writers: int = 2,
        deaths: bool = False,
        closes: bool = True,
        shard: bool = True,
        bounds: bool = True,
        reduced: bool = False,
    ) -> None:
        self.plants = set(plants)
        if self.plants - PLANTS.keys():
            raise ValueError(f"no such plants: {self.plants - PLANTS.keys()}")
        self.layout = layout(readers)
        self.readers = [f"r{number}" for number in range(readers)]
        self.writers = list("xy"[:writers])
        self.deaths = deaths
        self.closes = closes
        self.shard = shard
        self.bounds = bounds
        self.reduced = reduced
        #: Where values stand, in the order that names them.
        self.places = [
            "a0", "a1", "b0", "b1", "current", "x_value", "y_value", *(f"{reader}_value" for reader in self.readers)
        ]  # fmt: skip

    def model(self) -> Model:
        initial = self.layout.pack({"word": 1, "x_open": 1, "y_open": 1})
        programs: dict[str, dict[int, list[tuple[str, Step]]]] = {"w": self._worker()}
        for writer in self.writers:
            programs[writer] = self._writer(writer)
        for reader in self.readers:
            programs[reader] = {
                place: [(name, self._then_in_order(step)) for name, step in steps]
                for place, steps in self._reader(reader).items()
            }
        # The field of a process's place has the process's name.
        return Model(self.layout, initial, programs, "bad", FAULTS, self.describe)

    # -- the worker -------------------------------------------------------------------------------

    def _worker(self) -> dict[int, list[tuple[str, Step]]]:
        plants = self.plants
        program: dict[int, list[tuple[str, Step]]] = {place: [] for place in W}

        def at(place: W, name: str, step: Step) -> None:
            program[place].append((f"worker {name}", step))

        def store(place: W, name: str, then: W, **fields: int | str) -> None:
            """A single store: of a number, or of what lies in a field of the worker's own memory."""

            def step(s: Batch) -> Batch:
                for field, value in fields.items():
                    s[field] = s[value] if isinstance(value, str) else value
                s["w"] = int(then)
                return s

            at(place, name, step)

        for number, writer in enumerate(self.writers):
            at(W.IDLE, f"takes the commit of {writer}", self._take_commit(number, writer))
            for chunk in (1, 2):
                for key in (KEY, OTHER) if writer == "y" or len(self.writers) == 1 else (KEY,):
                    grant = self._grant(writer, chunk, key)
                    at(W.IDLE, f"grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
                    # A planted fault: while it is in the middle of something, a chunk is called free too early.
                    if "free_early" in plants:
                        at(W.ODD, f"(fault) grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
                    if "free_odd" in plants:
                        at(W.PUT_LENGTH, f"(fault) grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
                    if "free_cleared" in plants:
                        at(W.CLEAR_ODD, f"(fault) grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
            if self.closes:
                at(W.IDLE, f"sees {writer}'s connection closed", self._close(writer))
            if self.closes or self.deaths:
                at(W.IDLE, f"has {writer} fenced: its chunk is free", self._fence(writer))
        at(W.IDLE, "evicts or deletes", self._begin_clear)

        store(W.IMAGE, "a: undo image = old fields", W.VALID, undo_offset="old")
        store(W.VALID, "a: undo valid", W.ODD, undo=1)
        at(W.ODD, "b: seq odd", self._odd(W.PUT_KEY))
        at(W.PUT_KEY, "c: key", self._put("key", W.PUT_OFFSET))
        at(W.PUT_OFFSET, "c: offset", self._put("offset", W.PUT_LENGTH))
        if "even_first" in plants:
            at(W.PUT_LENGTH, "(fault) d: seq even before the length", self._even(W.EVEN))
            at(W.EVEN, "(fault) c: length", self._put("length", W.UNDO_OFF))
        else:
            at(W.PUT_LENGTH, "c: length", self._put("length", W.EVEN))
            at(W.EVEN, "d: seq even", self._even(W.UNDO_OFF))
        if "undo_stays" in plants:
            store(W.UNDO_OFF, "(fault) leaves the undo record valid", W.END)
        else:
            store(W.UNDO_OFF, "u: undo not valid", W.END, undo=0)
        at(W.END, "e: grant ended, old chunk free", self._end)

        at(W.CLEAR_ODD, "b: seq odd (clear)", self._odd(W.CLEAR_KEY))
        store(W.CLEAR_KEY, "c: key = 0", W.CLEAR_OFFSET, key=0)
        store(W.CLEAR_OFFSET, "c: offset = 0", W.CLEAR_LENGTH, offset=0)
        store(W.CLEAR_LENGTH, "c: length = 0", W.CLEAR_EVEN, length=0)
        at(W.CLEAR_EVEN, "d: seq even (cleared), chunk free", self._cleared)

        if self.shard:
            at(W.IDLE, "gives the shard up: word = 0", self._give_up)
            at(W.AWAY, "has the shard again: word = epoch", self._regain)
            for place in (W.AWAY, W.CLEAR_ODD, W.CLEAR_KEY, W.CLEAR_OFFSET, W.CLEAR_LENGTH, W.CLEAR_EVEN):
                program[place].append(("another worker stores a newer K", self._elsewhere))

        if self.deaths:
            for place in W:
                if place not in (W.IDLE, W.DEAD):
                    at(place, "dies", self._die)
            at(W.IDLE, "dies", self._die)
            at(W.DEAD, "starts again", self._repair)
            at(W.FIX_OFFSET, "repair: offset", self._fix("offset", W.FIX_LENGTH))
            at(W.FIX_LENGTH, "repair: length", self._fix("length", W.FIX_KEY))
            at(W.FIX_KEY, "repair: key", self._fix("key", W.FIX_EVEN))
            at(W.FIX_EVEN, "repair: seq even", self._fixed)
            store(W.FIX_UNDO, "repair: undo not valid", W.FIX_HOLDS, undo=0)
            at(W.FIX_HOLDS, "repair: slots outrank grants", self._rebuild)
        return {int(place): steps for place, steps in program.items() if steps}

    def _free(self, s: Batch, chunk: int) -> Mask:
        """What the worker takes for free chunks: named by no slot and by no hold, and not being replaced."""
        free = s["offset"] != chunk
        for writer in self.writers:
            free &= ~((s[f"{writer}_chunk"] == chunk) & (s[f"{writer}_held"] == 1))
        at = s["w"]
        idle = at == W.IDLE
        if "free_early" in self.plants:
            return free | ((s["old"] == chunk) & (at == W.ODD))
        if "free_cleared" in self.plants:
            return (free & idle) | ((s["old"] == chunk) & (at == W.CLEAR_ODD))
        if "free_odd" in self.plants:
            return free & (idle | (s["old"] == chunk))
        return free

    def _grant(self, writer: str, chunk: int, key: int) -> Step:
        def step(s: Batch) -> Batch:
            mid = s["w"] != W.IDLE
            allowed = (s[writer] == C.NONE) & (s[f"{writer}_open"] == 1) & self._free(s, chunk)
            # A fault's grant while another commit is under way hands out the chunk being replaced, nothing else.
            s = s.where(allowed & (~mid | (s["old"] == chunk)))
            s[writer] = int(C.FIRST)
            s[f"{writer}_chunk"] = chunk
            s[f"{writer}_key"] = key - 1
            s[f"{writer}_held"] = 1
            return s

        return step

    def _take_commit(self, number: int, writer: str) -> Step:
        def step(s: Batch) -> Batch:
            key = s["key"]
            mine = s[f"{writer}_key"] + _U64(1)
            s = s.where((s[writer] == C.SENT) & (s[f"{writer}_open"] == 1) & ((key == NONE) | (key == mine)))
            live = s["key"] != NONE
            s["by"] = number
            s["old"] = s["offset"]
            s["w"] = np.where(live, _U64(int(W.IMAGE)), _U64(int(W.ODD)))
            return s

        return step

    def _odd(self, then: W) -> Step:
        def step(s: Batch) -> Batch:
            if "lasting" not in self.plants:
                s = s.where(self._may_write(s))
                for reader in self.readers:
                    busy = s[reader] != R.SEQ
                    s[f"{reader}_writes"] = s[f"{reader}_writes"] + busy.astype(_U64)
            s["seq"] = s["seq"] | _U64(1)
            s["w"] = int(then)
            return s

        return step

    def _may_write(self, s: Batch) -> Mask:
        """No reader has seen three writes begin since its step 1: with the fourth its number would come back."""
        may = np.ones(len(s), bool)
        for reader in self.readers:
            may &= s[f"{reader}_writes"] < 3
        return may

    def _next_even(self, s: Batch) -> None:
        seq = s["seq"]
        if "aba" in self.plants:
            s["seq"] = seq & _U64(6)
        elif not self.reduced:
            s["seq"] = (seq + _U64(1)) & _U64(7)
        else:
            for reader in self.readers:
                behind = (s[f"{reader}_seq"] - seq - _U64(1)) & _U64(7)
                s[f"{reader}_seq"] = np.where(s[reader] != R.SEQ, behind, _U64(0))
            s["seq"] = 0

    def _of_writer(self, s: Batch, field: str) -> Words:
        if len(self.writers) == 1:
            return s[f"x_{field}"]
        return np.where(s["by"] == 0, s[f"x_{field}"], s[f"y_{field}"])

    def _put(self, field: str, then: W) -> Step:
        def step(s: Batch) -> Batch:
            s[field] = self._of_writer(s, "key") + _U64(1) if field == "key" else self._of_writer(s, "chunk")
            s["w"] = int(then)
            return s

        return step

    def _even(self, then: W) -> Step:
        """The commit's one moment: from here on the new value is the current one."""

        def step(s: Batch) -> Batch:
            self._next_even(s)
            s["w"] = np.where(s["old"] != 0, _U64(int(then)), _U64(int(W.END if then is W.UNDO_OFF else then)))
            value = self._of_writer(s, "value")
            ours = self._of_writer(s, "key") + _U64(1) == KEY
            s["current"] = np.where(ours, value, s["current"])
            for reader in self.readers:
                busy = ours & (s[reader] != R.SEQ)
                s[f"{reader}_right"] = s[f"{reader}_right"] | np.where(busy, _U64(1) << value, _U64(0))
            return self._renamed(s)

        return step

    def _end(self, s: Batch) -> Batch:
        first = s["by"] == 0 if len(self.writers) == 2 else np.ones(len(s), bool)
        for number, writer in enumerate(self.writers):
            mine = first if number == 0 else ~first
            for field in ("", "_chunk", "_key", "_held", "_value"):
                s[writer + field] = np.where(mine, _U64(0), s[writer + field])
        s["old"] = 0
        s["by"] = 0
        s["w"] = int(W.IDLE)
        return self._renamed(s)

    def _begin_clear(self, s: Batch) -> Batch:
        s = s.where(s["key"] != NONE)
        s["old"] = s["offset"]
        s["w"] = int(W.CLEAR_ODD)
        return s

    def _cleared(self, s: Batch) -> Batch:
        self._next_even(s)
        s["current"] = 0
        s["old"] = 0
        s["w"] = np.where(s["why"] == 1, _U64(int(W.AWAY)), _U64(int(W.IDLE)))
        s["why"] = 0
        return self._renamed(s)

    def _give_up(self, s: Batch) -> Batch:
        s["word"] = 0
        if "keeps_rows" in self.plants:
            s["w"] = int(W.AWAY)
            return s
        live = s["key"] != NONE
        s["old"] = s["offset"]
        s["why"] = live.astype(_U64)
        s["w"] = np.where(live, _U64(int(W.CLEAR_ODD)), _U64(int(W.AWAY)))
        return s

    def _regain(self, s: Batch) -> Batch:
        """What the other worker stored stays there: for this one the key is a miss, unless its rows were kept."""
        s["word"] = 1
        s["w"] = int(W.IDLE)
        return s

    def _elsewhere(self, s: Batch) -> Batch:
        s = s.where((s["word"] == 0) & (s["current"] != 0))
        s["current"] = 0
        return self._renamed(s)

    # -- the worker's death -------------------------------------------------------------------------

    def _die(self, s: Batch) -> Batch:
        for field in ("by", "old", "why"):
            s[field] = 0
        for writer in self.writers:
            s[f"{writer}_open"] = 0
        s["w"] = int(W.DEAD)
        return s

    def _repair(self, s: Batch) -> Batch:
        odd = (s["seq"] & _U64(1)) == 1
        s["w"] = np.where(odd, _U64(int(W.FIX_OFFSET)), _U64(int(W.FIX_UNDO)))
        return s

    def _fix(self, field: str, then: W) -> Step:
        def step(s: Batch) -> Batch:
            # An image is of an overwrite, and that leaves the key as it was.
            image = s["key"] if field == "key" else s["undo_offset"]
            s[field] = np.where(s["undo"] == 1, image, _U64(0))
            s["w"] = int(then)
            return s

        return step

    def _fixed(self, s: Batch) -> Batch:
        self._next_even(s)
        s["w"] = int(W.FIX_UNDO)
        s["current"] = np.where(s["key"] == KEY, s["current"], _U64(0))
        return self._renamed(s)

    def _rebuild(self, s: Batch) -> Batch:
        """Grants that a slot outranks end; the others stay with sessions that are closed; those without end."""
        for writer in self.writers:
            outranked = (s[f"{writer}_chunk"] == s["offset"]) & (s[f"{writer}_held"] == 1) & (s[writer] == C.SENT)
            empty = s[writer] == C.NONE
            for field in ("", "_chunk", "_key", "_held", "_value"):
                s[writer + field] = np.where(outranked, _U64(0), s[writer + field])
            s[f"{writer}_open"] = np.where(outranked | empty, _U64(1), s[f"{writer}_open"])
        away = s["word"] == 0
        live = s["key"] != NONE
        s["old"] = np.where(away & live, s["offset"], _U64(0))
        s["why"] = (away & live).astype(_U64)
        s["w"] = np.where(away, np.where(live, _U64(int(W.CLEAR_ODD)), _U64(int(W.AWAY))), _U64(int(W.IDLE)))
        return self._renamed(s)

    # -- writers --------------------------------------------------------------------------------------

    def _close(self, writer: str) -> Step:
        def step(s: Batch) -> Batch:
            s = s.where((s[writer] != C.NONE) & (s[f"{writer}_open"] == 1))
            s[f"{writer}_open"] = 0
            if "no_fence" in self.plants:
                s[f"{writer}_held"] = 0
            return s

        return step

    def _fence(self, writer: str) -> Step:
        def step(s: Batch) -> Batch:
            s = s.where(s[f"{writer}_open"] == 0)
            for field in ("", "_chunk", "_key", "_held", "_value"):
                s[writer + field] = 0
            s[f"{writer}_open"] = 1
            return self._renamed(s)

        return step

    def _writer(self, writer: str) -> dict[int, list[tuple[str, Step]]]:
        def first(s: Batch) -> Batch:
            """A fresh value: a name above all in use, put in order by the renaming."""
            ours = s[f"{writer}_key"] == KEY - 1
            value = np.where(ours, _U64(10), _U64(FOREIGN))
            self._store_byte(s, writer, 0, value)
            s[f"{writer}_value"] = value
            s[writer] = int(C.SECOND)
            return self._renamed(s)

        def second(s: Batch) -> Batch:
            self._store_byte(s, writer, 1, s[f"{writer}_value"])
            s[writer] = int(C.SENT)
            return self._renamed(s)

        return {
            int(C.FIRST): [(f"writer {writer} stores byte 0", first)],
            int(C.SECOND): [(f"writer {writer} stores byte 1, sends its commit", second)],
        }

    def _store_byte(self, s: Batch, writer: str, which: int, value: Words) -> None:
        for chunk, letter in ((1, "a"), (2, "b")):
            field = f"{letter}{which}"
            s[field] = np.where(s[f"{writer}_chunk"] == chunk, value, s[field])

    # -- readers --------------------------------------------------------------------------------------

    def _reader(self, me: str) -> dict[int, list[tuple[str, Step]]]:
        plants = self.plants

        def over(s: Batch) -> None:
            for field in ("", "_seq", "_offset", "_length", "_value", "_torn", "_right", "_writes"):
                s[me + field] = 0

        def on(s: Batch, good: Mask, then: R) -> Batch:
            """Go on where ``good``; elsewhere the read is over, without a hit."""
            going, ended = s.where(good), s.where(~good)
            going[me] = int(then)
            over(ended)
            both = Batch(s.layout, [np.concatenate(pair) for pair in zip(going.words, ended.words)])
            return self._renamed(both) if self.reduced else both

        def seq(s: Batch) -> Batch:
            s = s.where((s["seq"] & _U64(1)) == 0)
            s[me] = int(R.KEY)
            s[f"{me}_seq"] = s["seq"]
            current = s["current"]
            s[f"{me}_right"] = np.where(current != 0, _U64(1) << current, _U64(0))
            return s

        def key(s: Batch) -> Batch:
            good = s["key"] == KEY if "no_step_2" not in plants else s["key"] != NONE
            return on(s, good, R.OFFSET)

        def offset(s: Batch) -> Batch:
            s[f"{me}_offset"] = s["offset"]
            s[me] = int(R.LENGTH)
            return s

        def length(s: Batch) -> Batch:
            s[f"{me}_length"] = s["length"]
            s[me] = int(R.SEQ_AGAIN)
            return s

        def seq_again(s: Batch) -> Batch:
            good = s["seq"] == s[f"{me}_seq"]
            if "no_step_3" in plants:
                good = np.ones(len(s), bool)
            s = on(s, good, R.BYTE_0)
            torn = (s[me] == R.BYTE_0) & ((s[f"{me}_offset"] != s[f"{me}_length"]) | (s[f"{me}_offset"] == 0))
            if self.bounds:
                s["bad"] = np.where(torn, _U64(4), s["bad"])
            s[f"{me}_length"] = 0
            return s

        def byte(s: Batch, which: int) -> Words:
            return np.where(s[f"{me}_offset"] == 1, s[f"a{which}"], s[f"b{which}"])

        def byte_0(s: Batch) -> Batch:
            value = byte(s, 0)
            s[f"{me}_value"] = value
            # From here on only this value matters: is it right?
            s[f"{me}_right"] = s[f"{me}_right"] & (_U64(1) << value)
            s[me] = int(R.BYTE_1)
            return self._renamed(s)

        def byte_1(s: Batch) -> Batch:
            s[f"{me}_torn"] = (byte(s, 1) != s[f"{me}_value"]).astype(_U64)
            s[f"{me}_offset"] = 0
            s[me] = int(R.SEQ_LAST if plants & {"no_step_5", "word_last"} else R.WORD)
            return s

        def word(s: Batch) -> Batch:
            return on(s, s["word"] != 0, R.SEQ_LAST)

        def judge(s: Batch) -> Batch:
            """The read is a hit: was it right?"""
            value, torn = s[f"{me}_value"], s[f"{me}_torn"] == 1
            foreign = (value == 0) | (value == FOREIGN)
            stale = ((s[f"{me}_right"] >> value) & _U64(1)) == 0
            fault = np.where(torn, 1, np.where(foreign, 2, np.where(stale, 3, 0))).astype(_U64)
            s["bad"] = np.where(fault != 0, fault, s["bad"])
            over(s)
            return s

        def seq_last(s: Batch) -> Batch:
            good = s["seq"] == s[f"{me}_seq"]
            if "no_step_6" in plants:
                good = np.ones(len(s), bool)
            if "word_last" in plants:
                return self._renamed(on(s, good, R.WORD_LAST))
            hits, rest = s.where(good), s.where(~good)
            over(rest)
            hits = judge(hits)
            return self._renamed(Batch(s.layout, [np.concatenate(pair) for pair in zip(hits.words, rest.words)]))

        def word_last(s: Batch) -> Batch:
            hits, rest = s.where(s["word"] != 0), s.where(s["word"] == 0)
            over(rest)
            hits = judge(hits)
            return self._renamed(Batch(s.layout, [np.concatenate(pair) for pair in zip(hits.words, rest.words)]))

        def done(step: Step) -> Step:
            """Steps that may drop a value rename what is left."""
            return lambda s: self._renamed(step(s))

        program: dict[int, list[tuple[str, Step]]] = {
            int(R.SEQ): [(f"reader {me} 1: seq", seq)],
            int(R.KEY): [(f"reader {me} 2: key", key)],
            int(R.OFFSET): [(f"reader {me} 2: offset", offset)],
            int(R.LENGTH): [(f"reader {me} 2: length", length)],
            int(R.SEQ_AGAIN): [(f"reader {me} 3: seq again", seq_again)],
            int(R.BYTE_0): [(f"reader {me} 4: byte 0", byte_0)],
            int(R.BYTE_1): [(f"reader {me} 4: byte 1", byte_1)],
            int(R.WORD): [(f"reader {me} 5: shard word", done(word))],
            int(R.SEQ_LAST): [(f"reader {me} 6: seq last", seq_last)],
        }
        if "word_last" in plants:
            program[int(R.WORD_LAST)] = [(f"reader {me} (fault) shard word last", word_last)]
        return program

    # -- states that are alike ------------------------------------------------------------------------

    def _then_in_order(self, step: Step) -> Step:
        """Reduced: readers are alike, so the one that is further on comes second."""
        if not self.reduced or len(self.readers) < 2:
            return step

        def ordered(s: Batch) -> Batch:
            s = step(s)
            keys = [
                s[r] << _U64(10) | s[f"{r}_seq"] << _U64(7) | s[f"{r}_offset"] << _U64(5) | s[f"{r}_length"] << _U64(3)
                | s[f"{r}_torn"] << _U64(2) | s[f"{r}_writes"]
                for r in self.readers
            ]  # fmt: skip
            swap = keys[0] > keys[1]
            if swap.any():
                for field in ("", "_seq", "_offset", "_length", "_value", "_torn", "_right", "_writes"):
                    one, two = s[f"r0{field}"], s[f"r1{field}"]
                    s[f"r0{field}"], s[f"r1{field}"] = np.where(swap, two, one), np.where(swap, one, two)
                s = self._renamed(s)
            return s

        return ordered

    def _forgotten(self, s: Batch) -> None:
        """Reduced: bytes of a free chunk that nobody reads or writes are as good as never written."""
        for chunk, cells in ((1, ("a0", "a1")), (2, ("b0", "b1"))):
            used = (s["offset"] == chunk) | (s["old"] == chunk) | ((s["undo"] == 1) & (s["undo_offset"] == chunk))
            for writer in self.writers:
                used |= s[f"{writer}_chunk"] == chunk
            for reader in self.readers:
                used |= s[f"{reader}_offset"] == chunk
            for cell in cells:
                s[cell] = np.where(used, s[cell], _U64(0))

    # -- names of values ----------------------------------------------------------------------------

    def _renamed(self, s: Batch) -> Batch:
        """Values of K numbered in the order of their places; readers remember nothing of values that are nowhere."""
        if not len(s):
            return s
        if self.reduced:
            self._forgotten(s)
        old = [s.small(place) for place in self.places]
        new: list[NDArray[np.uint8]] = []
        firsts: list[Mask] = []
        count = np.zeros(len(s), np.uint8)
        for at, value in enumerate(old):
            name = np.where(value == FOREIGN, np.uint8(FOREIGN), np.uint8(0))
            first = (value != 0) & (value != FOREIGN)
            for earlier, given in zip(old[:at], new):
                same = first & (value == earlier)
                name = np.where(same, given, name)
                first &= ~same
            count = count + first
            name = np.where(first, count, name)
            new.append(name)
            firsts.append(first)
        for reader in self.readers:
            right = s[f"{reader}_right"]
            if not right.any():
                continue
            told = np.zeros(len(s), _U64)
            for value, name, first in zip(old, new, firsts):
                bit = (right >> value.astype(_U64)) & first.astype(_U64)
                told |= bit << name.astype(_U64)
            s[f"{reader}_right"] = told
        for place, before, after in zip(self.places, old, new):
            if bool((before != after).any()):
                s[place] = after.astype(_U64)
        return s

    # -- for people -----------------------------------------------------------------------------------

    def describe(self, f: dict[str, int]) -> str:
        """One line: slot, chunks, who holds what, where the readers are."""

        def value(number: int) -> str:
            return {0: ".", FOREIGN: "L"}.get(number, f"v{number}")

        slot = f"seq={f['seq']} {'-KL'[f['key']]}@{f['offset']}/{f['length']} word={f['word']}"
        chunks = " ".join(f"{c}:{value(f[a])}{value(f[b])}" for c, a, b in ((1, "a0", "a1"), (2, "b0", "b1")))
        parts = [slot, chunks, f"K={value(f['current'])}", f"worker {W(f['w']).name.lower()}"]
        if f["undo"]:
            parts.append(f"undo@{f['undo_offset']}")
        for writer in self.writers:
            if f[writer] or not f[f"{writer}_open"]:
                state = "" if f[f"{writer}_open"] else " closed"
                held = "" if f[f"{writer}_held"] else " not held"
                parts.append(f"{writer}@{f[f'{writer}_chunk']} {C(f[writer]).name.lower()}{state}{held}")
        for reader in self.readers:
            if f[reader]:
                copied = ""
                if f[reader] > R.BYTE_0:
                    copied = f" {value(f[reader + '_value'])}{' torn' if f[reader + '_torn'] else ''}"
                parts.append(f"{reader} seq={f[reader + '_seq']}{copied} next {R(f[reader]).name.lower()}")
        return " | ".join(parts)


def planted(name: str) -> Model:
    """The smallest model that shows a plant: one reader, and of deaths, lost connections... only what it needs."""
    options = {"deaths": False, "closes": False, "shard": False, "bounds": False} | PLANTS[name][1]
    return SlotModel([name], readers=1, **options).model()
