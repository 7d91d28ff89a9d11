"""A GET over RDMA, one word at a time, against a worker that overwrites, deletes and loses the shard.

The rules (``sdk/rdma_get.py``; the slot is ``table.py``'s, the arena's words are those of ``slot.py``):

    call, first part     READ the slot (in a READ of its set): image S1. No key, or seq odd: the call is over.
    call, second part    one chain: READ shard word; READ data; READ slot: image M; FENCED_READ of seq.
                         A hit if M equals S1, the fenced seq is S1's, and the shard word says "ours".
    cached               S1 of an earlier hit: the second part only, without M.

The words of a READ arrive one by one in any order, and so do READs that are not fenced. A fenced READ begins after all
others are done. A value has two words, in one of two chunks. The slot has three words: seq, key, offset.

    worker, overwrite    seq odd; key; offset = new; seq even; the grant has ended, the old chunk is free
    worker, clear        seq odd; key = 0; offset = 0; seq even; the chunk is free (evicted, deleted, shard given up)
    writer               gets a free chunk; stores two words, in any order; then sends its commit, or gives up
    shard                given up: word = 0, then the slot is cleared; regained: word = 1, with nothing current

What must not happen: a hit whose two words are not one value of K that was current, with the shard ours, at some moment
of the call.

M exists because a slot is read word by word. S1 may be a mixture (the old offset, the new seq). A fenced image of the
whole slot may be a mixture too, of a later entry that lies in the old chunk again. Both look alike, and the data that
was read from that chunk in between may be anything (``BUGS["one_image"]``; the shortest run has about 20 steps). M is
read while the seq does not change, hence it is whole.

``puts`` bounds the runs: that many grants are made. The first value is in the slot at the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import numpy as np

from tests.models.explorer import Batch, Layout, Mask, Model, Step

_U64 = np.uint64

#: Bugs to inject -> what it is, and the options of a small model that shows it.
BUGS: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "one_image": ("no M: the fenced image of the whole slot is compared with S1", {"cache": 0, "shard": 0}),
    "seq_only": ("no M: the fenced seq is compared with S1's", {"cache": 0, "shard": 0}),
    "not_fenced": ("the last seq is read with the data, not after it", {"cache": 0, "shard": 0}),
    "no_reread": ("the seq is not read again", {"cache": 0, "shard": 0}),
    "m_early": ("M is read in the first part, with S1", {"cache": 0, "shard": 0}),
    "no_word": ("the shard word is not checked", {"cache": 0, "shard": 1}),
    "word_last": ("the shard word is read after the seq", {"cache": 0, "shard": 1}),
    "word_kept": ("a cached location comes with the shard word of the earlier call", {"cache": 1, "shard": 1}),
    "cache_unproved": ("a location is cached before it is proved", {"cache": 1, "shard": 0}),
    "cache_trusted": ("a cached location is used without reading the seq again", {"cache": 1, "shard": 0}),
    "cache_body": ("for a cached location the body is compared, but not the seq", {"cache": 1, "shard": 0}),
    "no_key": ("the key in S1 is not compared", {"cache": 0, "shard": 0}),
    "keeps_rows": ("a shard that is given up keeps its entries", {"cache": 1, "shard": 1}),
    "free_early": ("the replaced chunk is free before the seq is odd", {"cache": 0, "shard": 0}),
    "unflushed": ("the commit is sent before both words are there", {"cache": 0, "shard": 0}),
}

NONE, KEY, OTHER = 0, 1, 2
#: Of L; 0 is "never written", 1 to 6 are values of K.
FOREIGN: Final = 7


class W(IntEnum):
    """Places of the worker."""

    IDLE = 0
    ODD = 1
    PUT_KEY = 2
    PUT_OFFSET = 3
    EVEN = 4
    CLEAR_ODD = 5
    CLEAR_KEY = 6
    CLEAR_OFFSET = 7
    CLEAR_EVEN = 8
    AWAY = 9


class R(IntEnum):
    """Places of the reader: no call, the first READ, the chain, its fenced part, what follows that."""

    IDLE = 0
    FIND = 1
    CHAIN = 2
    FENCED = 3
    AFTER = 4


FAULTS: Final = {
    1: "a hit whose words are of two values",
    2: "a hit with another key's bytes, or bytes never written",
    3: "a hit with a value that was not current, or the shard not ours, at any time of the call",
}

#: The slot's words and their bits.
_SLOT: Final = {"seq": 4, "key": 2, "offset": 2}
_IMAGES: Final = ("s", "m", "f")


def layout() -> Layout:
    """Return the fields of a state.

    ``*_got``: read in this READ; ``x_0``, ``x_1``: the writer has stored that word.
    """
    arena = {
        "seq": 4, "key": 2, "offset": 2, "word": 1, "a0": 3, "a1": 3, "b0": 3, "b1": 3, "current": 3,
        "w": 4, "old": 2, "new": 2, "newkey": 2, "why": 1, "puts": 3, "values": 3, "bad": 2,
        "x": 2, "x_0": 1, "x_1": 1, "x_chunk": 2, "x_key": 2, "x_value": 3,
    }  # fmt: skip
    reader = {"r": 3, "right": 8, "cached": 1, "w_value": 1, "w_got": 1, "d0": 3, "d0_got": 1, "d1": 3, "d1_got": 1}
    images = {}
    for image in _IMAGES:
        for word, bits in _SLOT.items():
            images[f"{image}_{word}"] = bits
            images[f"{image}_{word}_got"] = 1
    return Layout(arena, reader, images)


class GetModel:
    """Builds the model with some bugs injected.

    Args:
        bugs: names out of :data:`BUGS`; none: the real rules.
        puts: grants made in a run, 1 to 5.
        cache: locations are kept for later calls.
        shard: the shard may be given up and come back.
        other: values of the other key are among the puts.
    """

    def __init__(self, *bugs: str, puts: int = 2, cache: int = 1, shard: int = 1, other: int = 1) -> None:
        self.bugs = set(bugs)
        if self.bugs - BUGS.keys():
            raise ValueError(f"no such bug: {self.bugs - BUGS.keys()}")
        self.layout = layout()
        self.puts, self.cache, self.shard, self.other = puts, bool(cache), bool(shard), bool(other)

    def model(self) -> Model:
        first = {"key": KEY, "offset": 1, "a0": 1, "a1": 1, "current": 1, "values": 1, "word": 1, "puts": self.puts}
        programs = {"w": self._worker(), "x": self._writer(), "r": self._reader()}
        return Model(self.layout, self.layout.pack(first), programs, "bad", FAULTS, describe)

    # -- the worker -------------------------------------------------------------------------------

    def _worker(self) -> dict[int, list[tuple[str, Step]]]:
        program: dict[int, list[tuple[str, Step]]] = {place: [] for place in W}

        def store(place: W, name: str, then: W, word: str, value: int | str) -> None:
            def step(s: Batch) -> Batch:
                s[word] = s[value] if isinstance(value, str) else value
                s["w"] = int(then)
                return s

            program[place].append((f"worker: {name}", step))

        def at(place: W, name: str, step: Step) -> None:
            program[place].append((f"worker: {name}", step))

        for chunk in (1, 2):
            for key in (KEY, OTHER) if self.other else (KEY,):
                name = f"chunk {' AB'[chunk]} granted for {' KL'[key]}"
                at(W.IDLE, name, self._grant(chunk, key))
                if "free_early" in self.bugs:
                    at(W.ODD, f"(fault) {name}", self._grant(chunk, key))
        at(W.IDLE, "takes the commit", self._take)
        at(W.ODD, "seq odd", self._odd(W.PUT_KEY))
        store(W.PUT_KEY, "key", W.PUT_OFFSET, "key", "newkey")
        store(W.PUT_OFFSET, "offset", W.EVEN, "offset", "new")
        at(W.EVEN, "seq even, the old chunk is free", self._even)
        at(W.IDLE, "evicts or deletes", self._clear)
        at(W.CLEAR_ODD, "seq odd (clear)", self._odd(W.CLEAR_KEY))
        store(W.CLEAR_KEY, "key = 0", W.CLEAR_OFFSET, "key", 0)
        store(W.CLEAR_OFFSET, "offset = 0", W.CLEAR_EVEN, "offset", 0)
        at(W.CLEAR_EVEN, "seq even (cleared), the chunk is free", self._cleared)
        if self.shard:
            at(W.IDLE, "gives the shard up: word = 0", self._give_up)
            at(W.AWAY, "has the shard again: word = 1", self._regain)
        return {int(place): steps for place, steps in program.items() if steps}

    def _grant(self, chunk: int, key: int) -> Step:
        def step(s: Batch) -> Batch:
            free = (s["offset"] != chunk) | ((s["w"] == W.ODD) & (s["old"] == chunk))
            free &= (s["w"] == W.IDLE) | (s["new"] != chunk)
            s = s.where(free & (s["x"] == 0) & (s["puts"] > 0))
            s["puts"] = s["puts"] - _U64(1)
            s["x"] = 1
            s["x_chunk"] = chunk
            s["x_key"] = key
            s["values"] = s["values"] + _U64(key == KEY)
            s["x_value"] = s["values"] if key == KEY else FOREIGN
            return s

        return step

    def _take(self, s: Batch) -> Batch:
        s = s.where((s["x"] == 2) & ((s["key"] == NONE) | (s["key"] == s["x_key"])))
        s["old"], s["new"], s["newkey"] = s["offset"], s["x_chunk"], s["x_key"]
        s["w"] = int(W.ODD)
        if "unflushed" not in self.bugs:
            _clear(s, "x", "x_0", "x_1", "x_chunk", "x_key")
        else:
            s["x"] = 3  # spent, and its WRITE still under way
        return s

    def _odd(self, then: W) -> Step:
        def step(s: Batch) -> Batch:
            s["seq"] = s["seq"] | _U64(1)
            s["current"] = np.where(s["w"] == W.CLEAR_ODD, _U64(0), s["current"])
            s["w"] = int(then)
            return s

        return step

    def _even(self, s: Batch) -> Batch:
        """Publish the value."""
        s["seq"] = s["seq"] + _U64(1)
        ours = s["key"] == KEY
        # One writer at a time, and values are numbered as they are granted: this is the last granted so far,
        # unless the chunk came free too early, and somebody else has a grant already.
        value = s["x_value"] if "free_early" not in self.bugs else s["values"] - (s["x_key"] == KEY).astype(_U64)
        s["current"] = np.where(ours, value, s["current"])
        if "free_early" not in self.bugs:
            s["x_value"] = np.where(s["x"] == 0, _U64(0), s["x_value"])
        s["right"] = s["right"] | np.where(ours & (s["r"] != R.IDLE), _U64(1) << value, _U64(0))
        _clear(s, "old", "new", "newkey")
        s["w"] = int(W.IDLE)
        return s

    def _clear(self, s: Batch) -> Batch:
        s = s.where(s["key"] != NONE)
        s["w"] = int(W.CLEAR_ODD)
        return s

    def _cleared(self, s: Batch) -> Batch:
        s["seq"] = s["seq"] + _U64(1)
        s["w"] = np.where(s["why"] == 1, _U64(int(W.AWAY)), _U64(int(W.IDLE)))
        s["why"] = 0
        return s

    def _give_up(self, s: Batch) -> Batch:
        """Give the shard up: others may store K from now on, so nothing is current here."""
        s["word"] = 0
        s["current"] = 0
        live = s["key"] != NONE
        if "keeps_rows" in self.bugs:
            live &= False
        s["why"] = live.astype(_U64)
        s["w"] = np.where(live, _U64(int(W.CLEAR_ODD)), _U64(int(W.AWAY)))
        return s

    def _regain(self, s: Batch) -> Batch:
        s["word"] = 1
        s["w"] = int(W.IDLE)
        return s

    # -- the writer -------------------------------------------------------------------------------

    def _writer(self) -> dict[int, list[tuple[str, Step]]]:
        def word(which: int) -> Step:
            def step(s: Batch) -> Batch:
                s = s.where(s[f"x_{which}"] == 0)
                for chunk, letter in ((1, "a"), (2, "b")):
                    s[f"{letter}{which}"] = np.where(s["x_chunk"] == chunk, s["x_value"], s[f"{letter}{which}"])
                s[f"x_{which}"] = 1
                return s

            return step

        def commit(s: Batch) -> Batch:
            if "unflushed" not in self.bugs:
                s = s.where((s["x_0"] == 1) & (s["x_1"] == 1))
            s["x"] = 2
            return s

        def give_up(s: Batch) -> Batch:
            """Return the grant, or close the connection: the words written so far stay."""
            s = s.where(s["w"] == W.IDLE)
            _clear(s, "x", "x_0", "x_1", "x_chunk", "x_key", "x_value")
            return s

        words = [("writer: word 0 lands", word(0)), ("writer: word 1 lands", word(1))]
        program = {1: [*words, ("writer: sends its commit", commit), ("writer: gives up", give_up)]}
        if "unflushed" in self.bugs:
            program[3] = words
        return program

    # -- the reader -------------------------------------------------------------------------------

    def _reader(self) -> dict[int, list[tuple[str, Step]]]:
        """Return the reader's steps: what it reads in each part, by the rules or with a bug."""
        bugs = self.bugs
        image = [f"m_{word}" for word in _SLOT]
        chain = ["w", "d0", "d1"]
        fenced, after = ["f_seq"], []
        if "one_image" in bugs:
            image, fenced = [], [f"f_{word}" for word in _SLOT]
        if "seq_only" in bugs or "cache_unproved" in bugs:
            image = []
        if "not_fenced" in bugs:
            chain, fenced = [*chain, *fenced], []
        if "no_reread" in bugs:
            fenced = []
        if "word_last" in bugs:
            chain, after = ["d0", "d1"], ["w"]
        if "no_word" in bugs:
            chain = ["d0", "d1"]
        find = ["s_seq", "s_key", "s_offset"]
        if "m_early" in bugs:
            find, image = find + image, []
        # A cached location goes without M, and with some faults without more.
        again, fenced_again = list(chain), list(fenced)
        if "word_kept" in bugs:
            again.remove("w")
        if "cache_trusted" in bugs:
            fenced_again = []
        if "cache_body" in bugs:
            fenced_again = ["f_key", "f_offset"]
        self.parts = {
            R.FIND: (find, find),
            R.CHAIN: (chain + image, again),
            R.FENCED: (fenced, fenced_again),
            R.AFTER: (after, after),
        }
        program: dict[int, list[tuple[str, Step]]] = {int(R.IDLE): [("reader: a call", self._call)]}
        if self.cache:
            program[R.IDLE].append(("reader: a call, by the cached location", self._call_again))
        for place, parts in self.parts.items():
            words = sorted(set(parts[0]) | set(parts[1]))
            program[place] = [(f"reader: {place.name.lower()}: {word}", self._read(place, word)) for word in words]
        return program

    def _call(self, s: Batch) -> Batch:
        s["right"] = _U64(1) << s["current"]
        s["cached"] = 0
        _clear(s, "s_seq", "s_key", "s_offset", "w_value")
        s["r"] = int(R.FIND)
        return s

    def _call_again(self, s: Batch) -> Batch:
        s = s.where(s["cached"] == 1)
        s["right"] = _U64(1) << s["current"]
        s["r"] = int(R.CHAIN)
        return s

    def _read(self, place: R, word: str) -> Step:
        """Return the step in which one word arrives; the last word of a part begins the next part or ends the call."""
        both = self.parts[place]

        def step(s: Batch) -> Batch:
            cached = s["cached"] == 1
            asked = np.where(cached, word in both[1], word in both[0])
            s = s.where(asked & (s[f"{word}_got"] == 0))
            s[f"{word}_got"] = 1
            self._load(s, word)
            cached = s["cached"] == 1
            done = np.where(cached, _all(s, both[1]), _all(s, both[0]))
            return _join(s.where(~done), self._next(s.where(done), place))

        return step

    def _load(self, s: Batch, word: str) -> None:
        if word == "w":
            s["w_value"] = s["word"]
        elif word in ("d0", "d1"):
            which = word[1]
            s[word] = np.where(s["s_offset"] == 1, s[f"a{which}"], s[f"b{which}"])
        else:
            s[word] = s[word[2:]]

    def _next(self, s: Batch, place: R) -> Batch:
        """Go on after a complete part."""
        for words in self.parts[place]:
            # What was read stays, that it was is forgotten.
            _clear(s, *(f"{word}_got" for word in words))
        if place is R.FIND:
            good = ((s["s_seq"] & _U64(1)) == 0) & (s["s_offset"] != 0)
            if "no_key" not in self.bugs:
                good &= s["s_key"] == KEY
            if "cache_unproved" in self.bugs:
                s["cached"] = good.astype(_U64)
            return _join(self._enter(s.where(good), R.CHAIN), self._over(s.where(~good), keep=False))
        return self._enter(s, R(place + 1)) if place < R.AFTER else self._judge(s)

    def _enter(self, s: Batch, place: R) -> Batch:
        """Enter the next part that has anything to read."""
        cached = s["cached"] == 1
        empty = np.where(cached, not self.parts[place][1], not self.parts[place][0])
        going, on = s.where(~empty), s.where(empty)
        going["r"] = int(place)
        if not len(on):
            return going
        return _join(going, self._enter(on, R(place + 1)) if place < R.AFTER else self._judge(on))

    def _judge(self, s: Batch) -> Batch:
        """End the call: decide whether it is a hit, and whether a hit is right."""
        cached = s["cached"] == 1
        hit = np.ones(len(s), bool)
        for number, mask in enumerate((~cached, cached)):
            read = {word for part in self.parts.values() for word in part[number]}
            for word in _SLOT:
                if f"m_{word}" in read:
                    hit &= ~mask | (s[f"m_{word}"] == s[f"s_{word}"])
                if f"f_{word}" in read:
                    hit &= ~mask | (s[f"f_{word}"] == s[f"s_{word}"])
        if "no_word" not in self.bugs:
            hit &= s["w_value"] == 1
        first, second = s["d0"], s["d1"]
        value = np.where(hit, first, _U64(0))
        current = ((s["right"] >> value) & _U64(1)) == 1
        bad = np.where(first != second, 1, np.where((first == 0) | (first == FOREIGN), 2, np.where(current, 0, 3)))
        s["bad"] = np.where(hit, bad, 0).astype(_U64)
        kept, ended = s.where(hit), s.where(~hit)
        return _join(self._over(kept, keep=self.cache), self._over(ended, keep="cache_unproved" in self.bugs))

    def _over(self, s: Batch, *, keep: bool) -> Batch:
        if keep:
            s["cached"] = 1
        else:
            _clear(s, "cached", "s_seq", "s_key", "s_offset")
        if "word_kept" not in self.bugs or not keep:
            s["w_value"] = 0
        _clear(s, "r", "right", "d0", "d1")
        _clear(s, *(f"{image}_{word}" for image in "mf" for word in _SLOT))
        return s


def _clear(s: Batch, *fields: str) -> None:
    for field in fields:
        s[field] = 0


def _all(s: Batch, words: Iterable[str]) -> Mask:
    done = np.ones(len(s), bool)
    for word in words:
        done &= s[f"{word}_got"] == 1
    return done


def _join(one: Batch, other: Batch) -> Batch:
    if not len(one):
        return other
    if not len(other):
        return one
    return Batch(one.layout, [np.concatenate(pair) for pair in zip(one.words, other.words)])


def with_bug(name: str, **options: int) -> Model:
    """Return a small model with one bug."""
    return GetModel(name, **{**BUGS[name][1], **options}).model()


def describe(state: dict[str, int]) -> str:
    """Return one line for people."""
    images = {
        image: " ".join(
            f"{word}={state[f'{image}_{word}']}"
            for word in _SLOT
            if state[f"{image}_{word}_got"] or (image == "s" and state["r"] > R.FIND)
        )
        for image in _IMAGES
    }
    return (
        f"slot {state['seq']} {' KL'[state['key']]} {' AB'[state['offset']]}  A {state['a0']}{state['a1']} "
        f"B {state['b0']}{state['b1']}  current {state['current']} word {state['word']}  {W(state['w']).name.lower()}"
        f"  {R(state['r']).name.lower()} S1({images['s']}) M({images['m']}) F({images['f']}) "
        f"data {state['d0'] if state['d0_got'] else '-'}{state['d1'] if state['d1_got'] else '-'}"
    )
