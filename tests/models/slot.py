"""The slot protocol of ``simm/table.py`` and ``simm/arena/reader.py``, one load or store at a time.

The processes: one worker, the only one that changes the slot, the shard word and the undo record; two writers (clients
that store a value's two bytes into a chunk granted to them and then send a commit); and two readers. There are two
chunks and one slot. Readers look for key K in it; key L may lie there for a while.

    reader                                  worker, overwrite of K              worker, clear of the slot
    1  rseq = seq, odd: give up             a  undo image, then its valid word  b  seq += 1
    2  key, offset, length                  b  seq += 1                         c  key, offset, length = 0
    3  seq == rseq                          c  key, offset, length = new        d  seq += 1
    4  both bytes of the chunk              d  seq += 1                         -  chunk is free
    5  shard word not 0                     u  undo record's valid word = 0
    6  seq == rseq: a hit                   e  grant ended, old chunk is free

A first write of an empty slot needs no (a) and (u). To give the shard up, the worker sets its word to 0 and then clears
the slot; to regain it, it sets the word to the epoch. While the word is 0, another worker may store a newer K at any
time. The worker may die between any two stores; its successor repairs as ``Table.recover`` does. A writer's connection
may close at any time. Its grant ends only when the writer is fenced, which is one step here: the writer stores nothing
any more and the chunk is free.

What must not happen: a hit whose bytes are not one value of K that was current at some moment between steps 1 and 6
(the value is torn, another key's, never committed, or superseded), and a copy whose offset and length are of different
entries (it would read past the chunk, or past the segment).

A reader that gives up starts over, which is a new read here. That is the harder case, as fewer values are right for it.
Finding the slot needs no step of its own: a find that fails is a miss, one that succeeds leads to step 1. The L that a
writer stores is always one value, as any byte of it is wrong in a read of K.

Few states without a bound on runs
----------------------------------
``slot_canonical.py`` searches one state of each set of states that behave alike, so runs have no bound. The sequence
number has 3 bits and wraps after four writes. That stands for 44 bits when a read lasts less than 2^43 writes: in the
model the worker does not start a fourth write of the slot while a reader is at work (``lasting``); without that bound
the search finds the wrap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.models.explorer import Batch, Mask, Model, Step, Words
from tests.models.slot_canonical import Canonical
from tests.models.slot_reader import SlotReader
from tests.models.slot_state import BUGS, FAULTS, FOREIGN, KEY, NONE, OTHER, C, R, W, layout

_U64 = np.uint64

class SlotModel:
    """Builds the :class:`Model` with some bugs injected.

    Args:
        bugs: names out of :data:`BUGS`; none: the real rules.
        readers, writers: the number of each, 1 or 2. Readers store nothing, so one finds all that two can find; two
            show that the model has not been cut to fit.
        deaths: the worker may die.
        closes: a writer's connection may close.
        shard: the shard may be given up and come back.
        bounds: a copy with fields of two entries counts as a fault by itself.
        reduced: search one of each set of states that behave alike, see ``slot_canonical.py``.
    """

    def __init__(
        self,
        bugs: Iterable[str] = (),
        *,
        readers: int = 2,
        writers: int = 2,
        deaths: bool = False,
        closes: bool = True,
        shard: bool = True,
        bounds: bool = True,
        reduced: bool = False,
    ) -> None:
        self.bugs = set(bugs)
        if self.bugs - BUGS.keys():
            raise ValueError(f"no such bug: {self.bugs - BUGS.keys()}")
        self.layout = layout(readers)
        self.readers = [f"r{number}" for number in range(readers)]
        self.writers = list("xy"[:writers])
        self.deaths = deaths
        self.closes = closes
        self.shard = shard
        self.reduced = reduced
        self.canonical = Canonical(self.readers, self.writers, reduced=reduced)
        self.reader = SlotReader(self.bugs, self.canonical, bounds=bounds)

    def model(self) -> Model:
        initial = self.layout.pack({"word": 1, "x_open": 1, "y_open": 1})
        programs: dict[str, dict[int, list[tuple[str, Step]]]] = {"w": self._worker()}
        for writer in self.writers:
            programs[writer] = self._writer(writer)
        for reader in self.readers:
            programs[reader] = {
                place: [(name, self.canonical.ordered(step)) for name, step in steps]
                for place, steps in self.reader.program(reader).items()
            }
        # The field of a process's place has the process's name.
        return Model(self.layout, initial, programs, "bad", FAULTS, self.describe)

    # -- the worker -------------------------------------------------------------------------------

    def _worker(self) -> dict[int, list[tuple[str, Step]]]:
        bugs = self.bugs
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
                    # An injected bug: in the middle of a store, a chunk counts as free too early.
                    if "free_early" in bugs:
                        at(W.ODD, f"(fault) grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
                    if "free_odd" in bugs:
                        at(W.PUT_LENGTH, f"(fault) grants chunk {chunk} to {writer} for {'-KL'[key]}", grant)
                    if "free_cleared" in bugs:
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
        if "even_first" in bugs:
            at(W.PUT_LENGTH, "(fault) d: seq even before the length", self._even(W.EVEN))
            at(W.EVEN, "(fault) c: length", self._put("length", W.UNDO_OFF))
        else:
            at(W.PUT_LENGTH, "c: length", self._put("length", W.EVEN))
            at(W.EVEN, "d: seq even", self._even(W.UNDO_OFF))
        if "undo_stays" in bugs:
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
        """Return where the worker takes a chunk for free: no slot or hold names it, and it is not being replaced."""
        free = s["offset"] != chunk
        for writer in self.writers:
            free &= ~((s[f"{writer}_chunk"] == chunk) & (s[f"{writer}_held"] == 1))
        at = s["w"]
        idle = at == W.IDLE
        if "free_early" in self.bugs:
            return free | ((s["old"] == chunk) & (at == W.ODD))
        if "free_cleared" in self.bugs:
            return (free & idle) | ((s["old"] == chunk) & (at == W.CLEAR_ODD))
        if "free_odd" in self.bugs:
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
            if "lasting" not in self.bugs:
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
        if "aba" in self.bugs:
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
            return self.canonical.renamed(s)

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
        return self.canonical.renamed(s)

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
        return self.canonical.renamed(s)

    def _give_up(self, s: Batch) -> Batch:
        s["word"] = 0
        if "keeps_rows" in self.bugs:
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
        return self.canonical.renamed(s)

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
        return self.canonical.renamed(s)

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
        return self.canonical.renamed(s)

    # -- writers --------------------------------------------------------------------------------------

    def _close(self, writer: str) -> Step:
        def step(s: Batch) -> Batch:
            s = s.where((s[writer] != C.NONE) & (s[f"{writer}_open"] == 1))
            s[f"{writer}_open"] = 0
            if "no_fence" in self.bugs:
                s[f"{writer}_held"] = 0
            return s

        return step

    def _fence(self, writer: str) -> Step:
        def step(s: Batch) -> Batch:
            s = s.where(s[f"{writer}_open"] == 0)
            for field in ("", "_chunk", "_key", "_held", "_value"):
                s[writer + field] = 0
            s[f"{writer}_open"] = 1
            return self.canonical.renamed(s)

        return step

    def _writer(self, writer: str) -> dict[int, list[tuple[str, Step]]]:
        def first(s: Batch) -> Batch:
            """A fresh value: a name above all in use, put in order by the renaming."""
            ours = s[f"{writer}_key"] == KEY - 1
            value = np.where(ours, _U64(10), _U64(FOREIGN))
            self._store_byte(s, writer, 0, value)
            s[f"{writer}_value"] = value
            s[writer] = int(C.SECOND)
            return self.canonical.renamed(s)

        def second(s: Batch) -> Batch:
            self._store_byte(s, writer, 1, s[f"{writer}_value"])
            s[writer] = int(C.SENT)
            return self.canonical.renamed(s)

        return {
            int(C.FIRST): [(f"writer {writer} stores byte 0", first)],
            int(C.SECOND): [(f"writer {writer} stores byte 1, sends its commit", second)],
        }

    def _store_byte(self, s: Batch, writer: str, which: int, value: Words) -> None:
        for chunk, letter in ((1, "a"), (2, "b")):
            field = f"{letter}{which}"
            s[field] = np.where(s[f"{writer}_chunk"] == chunk, value, s[field])

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


def with_bug(name: str) -> Model:
    """The smallest model that shows a bug: one reader, and of deaths, lost connections... only what it needs."""
    options = {"deaths": False, "closes": False, "shard": False, "bounds": False} | BUGS[name][1]
    return SlotModel([name], readers=1, **options).model()
