"""How long a thread waits for the interpreter while another one reads, and what a get costs that lets it have it.

    python benchmarks/company.py

Gets of 4 KiB into buffers, in bursts that alternate between two modes: copies that keep the GIL, as of a process with
one working thread, and copies that release it (``simm/host/company.py`` chooses between them). Beside them, bursts of
gets into spans (``simm.kv``'s), which always release it. A second thread sleeps for 2 ms, works for some microseconds,
and notes how much later than wanted it came to work; without gets that is what the machine itself takes. It sleeps
while gets are timed. The costs are processor time of the calling thread.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simm.client import Client
from simm.host.buffers import RELEASE_BYTES, Span, address_of
from simm.host.company import COMPANY, Company

PAUSE_S: Final = 0.002
BURST_S: Final = 0.1
KEYS: Final = 4096
SIZE: Final = 4096
TURNS: Final = 40


class Other:
    """The second thread."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.late: list[float] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.go.wait():
            began = time.perf_counter()
            time.sleep(PAUSE_S)
            self.late.append(time.perf_counter() - began - PAUSE_S)
            sum(range(300))


def main() -> int:
    """Measure, and print both tables."""
    modes: dict[str, tuple[int, bool]] = {
        "no gets": (-1, False), "keeps the GIL": (RELEASE_BYTES, False), "releases it": (0, False),
        "chosen": (-1, False), "spans": (RELEASE_BYTES, True),
    }  # fmt: skip
    with Client.local("256M") as client:
        client.wait_ready()
        keys = [f"key{number}" for number in range(KEYS)]
        assert all(client.put_many(keys, [bytes(SIZE)] * KEYS)), "the puts failed"
        buffers = [bytearray(SIZE) for _ in range(64)]
        spans = [Span(address_of(memoryview(buffer)), SIZE, keep=buffer) for buffer in buffers]
        other = Other()
        look = Company.look
        waits: dict[str, list[float]] = {mode: [] for mode in modes}
        costs: dict[str, list[float]] = {mode: [] for mode in modes}

        def burst(get: Callable[[str, object], object], targets: list, seconds: float) -> float:
            count = 0
            began, until = time.thread_time_ns(), time.perf_counter() + seconds
            while time.perf_counter() < until:
                for at in range(64):
                    get(keys[(count + at) * 17 % KEYS], targets[at])
                count += 64
            return (time.thread_time_ns() - began) / 1000 / count

        for turn in range(TURNS):
            for mode in list(modes) if turn % 2 else list(modes)[::-1]:
                held, by_span = modes[mode]
                targets = spans if by_span else buffers
                Company.look = look if mode == "chosen" else lambda _: None  # type: ignore[method-assign]
                if held >= 0:
                    COMPANY.held_bytes = held
                other.late.clear()
                other.go.set()
                if mode == "chosen":
                    burst(client.get_into, targets, 0.3)  # until a look has seen both threads at work
                    other.late.clear()
                if mode == "no gets":
                    time.sleep(BURST_S)
                else:
                    burst(client.get_into, targets, BURST_S)
                other.go.clear()
                waits[mode] += other.late
                if mode == "chosen":
                    COMPANY.held_bytes = RELEASE_BYTES  # as once the other one has slept for a second
                if mode != "no gets":
                    costs[mode].append(burst(client.get_into, targets, BURST_S / 4))
        print("second thread, ms late    median    p90    p99")
        for mode, late in waits.items():
            quantiles = statistics.quantiles(late, n=100)
            print(f"  {mode:<22}{quantiles[49] * 1e3:8.2f}{quantiles[89] * 1e3:7.2f}{quantiles[98] * 1e3:7.2f}")
        print("processor time of a get, us")
        base = costs["keeps the GIL"]
        for mode, found in costs.items():
            if found:
                ratio = statistics.median(one / other for one, other in zip(found, base))
                print(f"  {mode:<22}{statistics.median(found):8.2f}   {ratio:.3f} of those that keep the GIL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
