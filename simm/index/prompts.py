"""Reads questions, and remembers their prompts: most begin as one before did, and only what is new has to be read.

What is remembered is text. A question is cut into pieces of ``PIECE`` bytes. A piece that follows the same pieces as
once before, from the first byte on, has the same token ids, whatever follows. So its token ids and the keys of its
blocks are looked up, by the bytes themselves. From the last comma on the question is read as JSON, as if its token ids
began there. Everything else of a question is before the token ids, and remembered with them, or behind them, and read.

That is taken for granted of questions alone in which it is evident where the token ids are: a field of the outermost
object, named once, and no backslash anywhere. All others are read as a whole each time.

8,192 token ids have 60 KB of text. To read them, to hash their blocks, and to look their pieces up, takes some 650, 300
and 60 us (docs/performance.md).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .keys import SEED, chain, id_bytes, pair_chain, token_bytes
from .libraries import msgspec
from .table import Keys

#: Bytes of a piece, and of all that is remembered.
PIECE: Final = 4096
REMEMBERED_BYTES_MAX: Final = 64 << 20
#: Of a piece, beside its text, token ids and keys.
_PIECE_COST: Final = 1024
#: Sizes of blocks for which a piece's keys are remembered: the least, and how many. Those of pairs are others.
_SIZE_MIN: Final = 8
_SIZES_MAX: Final = 2

_FIELD: Final = "token_ids"
_NAME: Final = _FIELD.encode()
#: Where they end, behind a comma: no JSON.
_END: Final = re.compile(rb"[ \t\r\n]*\]")
_BEGIN: Final = re.compile(rb'"token_ids"[ \t\r\n]*:[ \t\r\n]*\[')

_Ids = NDArray[np.uint32]


class _Piece:
    """A piece of a question's text, behind others.

    Attributes:
        end: where the text behind its last comma begins, counted from the question's beginning.
        head: the text before the token ids, with the bracket.
        ids: its token ids, up to the last comma.
        first: the number of token ids before those.
        keys: by the size of blocks, of the blocks that end in it; by the negative size of blocks of pairs.
    """

    __slots__ = ("end", "first", "head", "ids", "key", "keys")

    def __init__(self, key: tuple[int, bytes], end: int, head: bytes, ids: _Ids, first: int) -> None:
        self.key = key
        self.end = end
        self.head = head
        self.ids = ids
        self.first = first
        self.keys: dict[int, Keys] = {}

    @property
    def nbytes(self) -> int:
        """Bytes at the most, with the keys that it may get."""
        return len(self.key[1]) + self.ids.nbytes + _SIZES_MAX * 8 * (len(self.ids) // _SIZE_MIN + 1) + _PIECE_COST


class Prompt:
    """A prompt's token ids: those of pieces that are remembered, and others."""

    def __init__(self, pieces: Sequence[_Piece], tail: list[int], seed: int = SEED) -> None:
        self._pieces = list(pieces)
        self._tail: _Ids = np.frombuffer(token_bytes(tail), np.uint32)
        self._seed = seed
        self._ids: _Ids | None = None

    def __len__(self) -> int:
        known = self._pieces[-1].first + len(self._pieces[-1].ids) if self._pieces else 0
        return known + len(self._tail)

    @property
    def ids(self) -> _Ids:
        """All token ids. O(token ids) once."""
        if self._ids is None:
            parts = [*(each.ids for each in self._pieces), self._tail]
            self._ids = np.concatenate(parts) if len(parts) > 1 else self._tail
        return self._ids

    def _behind(self, start: int) -> _Ids:
        """Return the token ids from this one on. O(those)."""
        parts = [self._tail]
        for piece in reversed(self._pieces):
            if piece.first + len(piece.ids) <= start:
                break
            parts.append(piece.ids[max(0, start - piece.first) :])
        return np.concatenate(parts[::-1])

    def keys(self, size: int, *, pairs: bool = False) -> Keys:
        """Return the keys of its full blocks of ``size`` token ids. O(token ids that are not remembered + pieces).

        ``pairs``: of its blocks of pairs of neighbouring tokens, see :func:`~simm.index.keys.pair_chain`.
        """
        kind, behind, hashed = (-size, 1, pair_chain) if pairs else (size, 0, chain)
        found: list[Keys] = []
        done = 0
        for piece in self._pieces:
            mine = piece.keys.get(kind)
            if mine is None:
                break
            found.append(mine)
            done += len(mine)
        parent = next((int(each[-1]) for each in reversed(found) if len(each)), None)
        rest = np.array(hashed(id_bytes(self._behind(done * size)), size, parent=parent, seed=self._seed), np.uint64)
        at = 0
        for piece in self._pieces[len(found) :] if size >= _SIZE_MIN else ():
            count = (piece.first + len(piece.ids) - behind) // size - done - at
            if len(piece.keys) < _SIZES_MAX:
                piece.keys[kind] = rest[at : at + count].copy()
            at += count
        return np.concatenate((*found, rest)) if found else rest

    def add(self, pieces: Sequence[_Piece]) -> None:
        """Take the next token ids as pieces, which are remembered now."""
        self._pieces += pieces
        self._tail = self._tail[sum(len(each.ids) for each in pieces) :]


class Prompts:
    """See the module. Any thread may call it.

    Args:
        seed: of the keys' hash.
        bytes_max: of what is remembered; 0: nothing.
    """

    def __init__(self, seed: int = SEED, bytes_max: int = REMEMBERED_BYTES_MAX) -> None:
        self._seed = seed
        self._max = bytes_max
        self._lock = threading.Lock()
        #: By the piece before (its number, 0 for none) and the text. The one that was used longest ago is the first.
        self._pieces: dict[tuple[int, bytes], tuple[int, _Piece]] = {}
        self._numbers = 0
        self.nbytes = 0

    def read(self, body: bytes) -> dict[str, Any]:
        """Return a question's fields; ``token_ids``, if it is a list, as a :class:`Prompt`. O(bytes).

        Raises UsageError, and what msgspec does for what is no JSON.
        """
        with self._lock:
            number, pieces = self._known(body)
            fields = _rest(body, pieces[-1]) if pieces else None
            if fields is None:
                number, pieces = 0, []
                fields = msgspec.json.decode(body)
            if not isinstance(fields, dict):
                raise UsageError("the body is a JSON object")
            tail = fields.get(_FIELD)
            if isinstance(tail, list):
                fields[_FIELD] = Prompt(pieces, tail, self._seed)
                self._remember(body, number, pieces, fields[_FIELD])
            return fields

    def _known(self, body: bytes) -> tuple[int, list[_Piece]]:
        """Return the pieces that the body begins with, and the number of the last one."""
        number, found = 0, []
        for start in range(0, len(body) - PIECE + 1, PIECE):
            entry = self._pieces.get((number, body[start : start + PIECE]))
            if entry is None:
                break
            number = entry[0]
            found.append(entry[1])
        self._use(found)
        return number, found

    def _use(self, pieces: Sequence[_Piece]) -> None:
        """Drop these last, and those behind others before them."""
        for piece in reversed(pieces):
            self._pieces[piece.key] = self._pieces.pop(piece.key)

    def _remember(self, body: bytes, number: int, pieces: list[_Piece], prompt: Prompt) -> None:
        """Add the pieces that follow, as far as they are token ids."""
        last = pieces[-1] if pieces else None
        place = PIECE * len(pieces)
        if place + PIECE > len(body) or not self._max:
            return
        if last is None:
            begin = _BEGIN.search(body, 0, PIECE)
            if begin is None or body.count(b"{", 0, begin.end()) != 1 or body.count(_NAME, 0, begin.end()) != 1:
                return
            head, end, first = body[: begin.end()], begin.end(), 0
        else:
            head, end, first = last.head, last.end, last.first + len(last.ids)
        stop = body.find(b"]", end)  # a list of integers has no other one
        if b"\\" in head or body.find(b"\\", stop) >= 0 or body.find(_NAME, stop) >= 0:
            return
        commas = np.flatnonzero(np.frombuffer(body, np.uint8, stop - end, end) == ord(","))
        places = range(place, stop - PIECE + 1, PIECE)
        counts = commas.searchsorted([each + PIECE - end for each in places]).tolist()
        added: list[_Piece] = []
        done = 0
        for start, count in zip(places, counts):
            if count == done:
                break
            ids = prompt.ids[first + done : first + count].copy()  # it keeps nothing else alive
            behind = end + int(commas[count - 1]) + 1
            piece = _Piece((number, body[start : start + PIECE]), behind, head, ids, first + done)
            if piece.key in self._pieces:  # of a question with other words behind it
                break
            self._numbers += 1
            number = self._numbers
            self._pieces[piece.key] = number, piece
            self.nbytes += piece.nbytes
            added.append(piece)
            done = count
        prompt.add(added)
        self._use(added)
        while self.nbytes > self._max:
            _, old = self._pieces.pop(next(iter(self._pieces)))
            self.nbytes -= old.nbytes


def _rest(body: bytes, last: _Piece) -> dict[str, Any] | None:
    """Return the fields of a question, of its token ids those behind a piece; None where that cannot be told."""
    if body.find(_NAME, last.end) >= 0 or body.find(b"\\", last.end) >= 0:
        return None
    if _END.match(body, last.end):
        return None
    fields = msgspec.json.decode(last.head + body[last.end :])
    return fields if isinstance(fields, dict) else None


__all__ = ["PIECE", "REMEMBERED_BYTES_MAX", "Prompt", "Prompts"]
