"""Compare loading one layer of many pages from pinned values with loading the whole pages.

    python benchmarks/pins.py                       a cluster of its own, by shared memory; --path tcp by TCP
    python benchmarks/pins.py --page-kib 128        pages of another size; also --pages, --layers, --pairs

The bar: the first layer is there, the pin included, after 1/layers + 10 % of the time of the whole load. A whole load
is one ``get_into_many`` of all pages. Bursts alternate, and the median of the pairs' ratios is the result, with the
quartiles beside it. All buffers have been touched before. ``SIMM_COPY_THREADS`` says how many threads share both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from simm.client import Client


def took(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def show(name: str, ratios: list[float], times: list[float], bar: float | None) -> None:
    """Print one line."""
    low, ratio, high = statistics.quantiles(ratios, n=4)
    verdict = "" if bar is None else f"   bar {bar:.3f} {'ok' if ratio <= bar else 'MISSED'}"
    print(
        f"{name:<46}{statistics.median(times) * 1e3:9.2f} ms{ratio:9.3f}   {low:.3f} to {high:.3f}{verdict}", flush=True
    )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=15)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    size = given.page_kib << 10
    layer = size // given.layers
    total = given.pages * size
    arena = total * (3 if given.path == "shm" else 5)  # of which a client may pin two fifths, or a quarter
    with Client.local(max(256 << 20, arena), path=given.path, deadline_s=30.0) as client:
        assert client.wait_ready(60.0)
        rng = np.random.default_rng(1)
        page = rng.integers(0, 256, size, dtype=np.uint8)
        keys = [f"page {number}" for number in range(given.pages)]
        for key in keys:
            assert client.put(key, page)
        pages = np.zeros((given.pages, size), np.uint8)
        rows = np.zeros((given.layers, given.pages, layer), np.uint8)
        buffers = list(pages)
        half = [[(2 * at * layer // 2, layer // 2, rows[at, :, : layer // 2]),
                 ((2 * at + 1) * layer // 2, layer // 2, rows[at, :, layer // 2 :])]
                for at in range(given.layers)]  # fmt: skip

        def whole() -> None:
            assert None not in client.get_into_many(keys, buffers)

        def first(ranges: list[Any]) -> float:
            began = time.perf_counter()
            pins = client.pin(keys)
            assert None not in pins.read(ranges)
            seconds = time.perf_counter() - began
            pins.release()
            return seconds

        def layer_alone() -> float:
            with client.pin(keys) as pins:
                return took(lambda: pins.read([(0, layer, rows[0])]))

        def all_layers() -> None:
            with client.pin(keys) as pins:
                for at in range(given.layers):
                    assert None not in pins.read([(at * layer, layer, rows[at])])

        lists = list(rows[0])
        ways: list[tuple[str, Callable[[], float], float | None]] = [
            ("pin alone", lambda: took(lambda: client.pin(keys).release()), None),
            ("a layer of what is pinned, into an array", layer_alone, None),
            ("pin, first layer into an array", lambda: first([(0, layer, rows[0])]), 1 / given.layers + 0.1),
            ("pin, first layer into a list of buffers", lambda: first([(0, layer, lists)]), 1 / given.layers + 0.1),
            ("pin, first layer in two halves, as k and v", lambda: first(half[0]), 1 / given.layers + 0.1),
            ("pin, all layers, one after the other", lambda: took(all_layers), None),
        ]  # fmt: skip
        print(f"{given.pages} pages of {given.page_kib} KiB, {given.layers} layers, by {given.path}")
        for name, way, bar in ways:
            took(whole)
            way()
            ratios, times = [], []
            for _ in range(given.pairs):
                before, middle, after = took(whole), way(), took(whole)
                times.append(middle)
                ratios.append(2 * middle / (before + after))
            show(name, ratios, times, bar)
        print(f"{'the whole load':<46}{statistics.median([took(whole) for _ in range(5)]) * 1e3:9.2f} ms")


if __name__ == "__main__":
    main()
