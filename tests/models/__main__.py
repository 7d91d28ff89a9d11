"""``python -m tests.models``: run the searches of the slot and of a move; print figures and traces."""

from __future__ import annotations

import sys

from tests.models import shard_move, slot
from tests.models.explorer import explore, explore_states


def main() -> int:
    """Run all but the longest; return 1 if a result is not the expected one."""
    wrong = 0
    for options in ({"readers": 2, "closes": False, "shard": False}, {"readers": 1}, {"readers": 1, "deaths": True}):
        model = slot.SlotModel(reduced=True, **options).model()  # type: ignore[arg-type]
        found = explore(model)
        wrong += bool(found.trace)
        print(f"slot, {options}", *found.lines(model.describe), sep="\n")
    for name, (text, _) in slot.BUGS.items():
        model = slot.with_bug(name)
        found = explore(model)
        wrong += not found.trace
        print(f"\nslot, with the bug: {text}", *found.lines(model.describe), sep="\n")
    for name in ("", *shard_move.BUGS):
        moving = shard_move.MoveModel((name,) if name else (), **shard_move.SMALLEST[name])
        result = explore_states(moving)
        wrong += bool(result.trace) != bool(name)
        print(
            f"\nmove, {'with the bug: ' + shard_move.BUGS[name] if name else 'the real rules'}",
            *result.lines(moving.describe),
            sep="\n",
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
