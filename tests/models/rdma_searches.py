"""``python -m tests.models.rdma_searches``: run the searches of RDMA; ``--more``: the long ones too."""

from __future__ import annotations

import sys

from tests.models import rdma_get, rdma_grants
from tests.models.explorer import explore, explore_states

#: Options of searches with the real rules.
GETS = ({"cache": 0, "shard": 0}, {"cache": 1, "shard": 1, "other": 0}, {"cache": 1, "shard": 1, "puts": 1})
MORE_GETS = ({"cache": 1, "shard": 1}, {"cache": 0, "shard": 0, "other": 0, "puts": 3})
GRANTS = ({"windows": 0}, {"windows": 1}, {"windows": 1, "rogue": 1})
MORE_GRANTS = ({"windows": 1, "rogue": 2},)


def main(more: bool) -> int:
    """Run the searches; return 1 if a result is not the expected one."""
    wrong = 0
    for options in GETS + (MORE_GETS if more else ()):
        found = explore(rdma_get.GetModel(**options).model(), 1 << 28)
        wrong += bool(found.trace) or not found.complete
        print(f"get, {options}", *found.lines(rdma_get.describe), sep="\n", flush=True)
    for name, (text, _) in rdma_get.BUGS.items():
        found = explore(rdma_get.with_bug(name))
        wrong += not found.trace
        print(f"\nget, with the bug: {text}", *found.lines(rdma_get.describe), sep="\n", flush=True)
    for options in GRANTS + (MORE_GRANTS if more else ()):
        model = rdma_grants.GrantModel(**options)
        result = explore_states(model)
        wrong += bool(result.trace) or not result.complete
        print(f"\ngrants, {options}", *result.lines(model.describe), sep="\n", flush=True)
    for name, (text, _) in rdma_grants.BUGS.items():
        model = rdma_grants.with_bug(name)
        result = explore_states(model)
        wrong += not result.trace
        print(f"\ngrants, with the bug: {text}", *result.lines(model.describe), sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--more" in sys.argv[1:]))
