"""``python -m rdmamodel`` in tests/: every search, with its figures and its traces; ``--more``: the long ones too."""

from __future__ import annotations

import sys

from slotmodel.packed import explore

from . import get, grants

#: Options of searches with the real rules.
GETS = ({"cache": 0, "shard": 0}, {"cache": 1, "shard": 1, "other": 0}, {"cache": 1, "shard": 1, "puts": 1})
MORE_GETS = ({"cache": 1, "shard": 1}, {"cache": 0, "shard": 0, "other": 0, "puts": 3})
GRANTS = ({"windows": 0}, {"windows": 1}, {"windows": 1, "rogue": 1})
MORE_GRANTS = ({"windows": 1, "rogue": 2},)


def main(more: bool) -> int:
    """1 when something is not as it should be."""
    wrong = 0
    for options in GETS + (MORE_GETS if more else ()):
        found = explore(get.GetModel(**options).model(), 1 << 28)
        wrong += bool(found.trace) or not found.complete
        print(f"get, {options}", *found.lines(get.describe), sep="\n", flush=True)
    for name, (text, _) in get.PLANTS.items():
        found = explore(get.planted(name))
        wrong += not found.trace
        print(f"\nget, planted: {text}", *found.lines(get.describe), sep="\n", flush=True)
    for options in GRANTS + (MORE_GRANTS if more else ()):
        result = grants.explore(grants.GrantModel(**options))
        wrong += bool(result.trace) or not result.complete
        print(f"\ngrants, {options}", *result.lines(), sep="\n", flush=True)
    for name, (text, _) in grants.PLANTS.items():
        result = grants.explore(grants.planted(name))
        wrong += not result.trace
        print(f"\ngrants, planted: {text}", *result.lines(), sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--more" in sys.argv[1:]))
