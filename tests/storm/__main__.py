"""Command line of the storm; see ``storm.storm``."""

from __future__ import annotations

import argparse
import sys

from .storm import client_main, storm


def main(arguments: list[str]) -> int:
    """Run a storm and print its figures; 1 when a byte was wrong, or a value went back or got lost."""
    if arguments[:1] == ["client"]:
        return client_main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description="Kill workers and clients under load.")
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
    return 1 if figures.wrong or figures.back or figures.lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
