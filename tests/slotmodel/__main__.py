"""``python -m slotmodel`` in tests/: every search, with its figures and its traces."""

from __future__ import annotations

import sys

from . import move, slot
from .packed import explore


def main() -> int:
    """Run all but the longest; 1 when something is not as it should be."""
    wrong = 0
    for options in ({"readers": 2, "closes": False, "shard": False}, {"readers": 1}, {"readers": 1, "deaths": True}):
        model = slot.SlotModel(reduced=True, **options).model()  # type: ignore[arg-type]
        found = explore(model)
        wrong += bool(found.trace)
        print(f"slot, {options}", *found.lines(model.describe), sep="\n")
    for name, (text, _) in slot.PLANTS.items():
        model = slot.planted(name)
        found = explore(model)
        wrong += not found.trace
        print(f"\nslot, planted: {text}", *found.lines(model.describe), sep="\n")
    for name in ("", *move.PLANTS):
        moving = move.MoveModel((name,) if name else (), **move.SMALLEST[name])
        result = move.explore(moving)
        wrong += bool(result.trace) != bool(name)
        print(
            f"\nmove, {'planted: ' + move.PLANTS[name] if name else 'the real rules'}",
            *result.lines(moving.describe),
            sep="\n",
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
