"""The fields, places and faults of the model in ``slot.py``."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from tests.models.explorer import Layout

#: Bugs to inject -> what it is, and the smallest model that shows it.
BUGS: Final[dict[str, tuple[str, dict[str, bool]]]] = {
    "aba": ("the sequence number does not grow: (d) stores what (b) found", {}),
    "lasting": ("a read may last any number of writes, so three bits wrap in it", {}),
    "no_step_2": ("the key in the slot is not compared", {}),
    "no_step_3": ("the fields are not re-checked before the copy", {"bounds": True}),
    "no_step_6": ("the sequence number is not re-checked after the copy", {}),
    "no_step_5": ("the shard word is not checked", {"shard": True}),
    "word_last": ("the shard word is checked after the sequence number, not before", {"shard": True}),
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
    """Return the fields of a state."""
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
