"""The reader of the slot model: the steps 1 to 6 of ``slot.py``, and the judgement of its hits."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from tests.models.explorer import Batch, Mask, Step, Words
from tests.models.slot_canonical import Canonical
from tests.models.slot_state import FOREIGN, KEY, NONE, R

_U64 = np.uint64


class SlotReader:
    """Builds the programs of readers."""

    def __init__(self, bugs: Set[str], canonical: Canonical, *, bounds: bool) -> None:
        self.bugs = bugs
        self.canonical = canonical
        self.bounds = bounds

    def program(self, me: str) -> dict[int, list[tuple[str, Step]]]:
        """Return the steps of one reader, by place."""
        bugs = self.bugs

        def over(s: Batch) -> None:
            for field in ("", "_seq", "_offset", "_length", "_value", "_torn", "_right", "_writes"):
                s[me + field] = 0

        def on(s: Batch, good: Mask, then: R) -> Batch:
            """Go on where ``good``; elsewhere the read is over, without a hit."""
            going, ended = s.where(good), s.where(~good)
            going[me] = int(then)
            over(ended)
            both = _both(going, ended)
            return self.canonical.renamed(both) if self.canonical.reduced else both

        def seq(s: Batch) -> Batch:
            s = s.where((s["seq"] & _U64(1)) == 0)
            s[me] = int(R.KEY)
            s[f"{me}_seq"] = s["seq"]
            current = s["current"]
            s[f"{me}_right"] = np.where(current != 0, _U64(1) << current, _U64(0))
            return s

        def key(s: Batch) -> Batch:
            good = s["key"] == KEY if "no_step_2" not in bugs else s["key"] != NONE
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
            if "no_step_3" in bugs:
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
            return self.canonical.renamed(s)

        def byte_1(s: Batch) -> Batch:
            s[f"{me}_torn"] = (byte(s, 1) != s[f"{me}_value"]).astype(_U64)
            s[f"{me}_offset"] = 0
            s[me] = int(R.SEQ_LAST if bugs & {"no_step_5", "word_last"} else R.WORD)
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
            if "no_step_6" in bugs:
                good = np.ones(len(s), bool)
            if "word_last" in bugs:
                return self.canonical.renamed(on(s, good, R.WORD_LAST))
            hits, rest = s.where(good), s.where(~good)
            over(rest)
            hits = judge(hits)
            return self.canonical.renamed(_both(hits, rest))

        def word_last(s: Batch) -> Batch:
            hits, rest = s.where(s["word"] != 0), s.where(s["word"] == 0)
            over(rest)
            hits = judge(hits)
            return self.canonical.renamed(_both(hits, rest))

        def done(step: Step) -> Step:
            """Steps that may drop a value rename what is left."""
            return lambda s: self.canonical.renamed(step(s))

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
        if "word_last" in bugs:
            program[int(R.WORD_LAST)] = [(f"reader {me} (fault) shard word last", word_last)]
        return program


def _both(one: Batch, other: Batch) -> Batch:
    return Batch(one.layout, [np.concatenate(pair) for pair in zip(one.words, other.words)])
