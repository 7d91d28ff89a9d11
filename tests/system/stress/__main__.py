"""Command line of the storm; see ``stress.py``."""

from __future__ import annotations

import argparse
import json
import sys

from tests.support.load import FAULTS
from tests.system.stress.stress import come_late, storm


def main(arguments: list[str]) -> int:
    """Run a storm and print its figures; 1 when a client saw what it must not."""
    if arguments[:1] == ["come-late"]:
        print(json.dumps(come_late(arguments[1])), flush=True)
        return 0
    parser = argparse.ArgumentParser("python -m tests.system.stress", description="Kill workers and clients.")
    parser.add_argument("--kills", type=int, default=50, help="kill -9 of the worker, so many times")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--memory", default="128M", help="of the arena; the values are about three times as much")
    parser.add_argument("--fits", action="store_true", help="small values that all fit: nothing may get lost")
    options = parser.parse_args(arguments)
    figures = storm(**vars(options))
    print(figures.lines())
    for text in figures.said:
        print("!", text)
    return 1 if any(getattr(figures, name) for name in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
