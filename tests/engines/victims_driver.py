"""Runs the whole released SGLang engine through a list of steps, on a CPU, while its storage's servers are harmed.

    python victims_driver.py REQUEST_JSON

Needs what ``whole_driver.py`` needs. A request has its ``folder``, ``weights`` and ``options``, and ``manager``, the
address of the cluster, and ``steps``: each is one of ``COMMANDS`` with its arguments. The only line on stdout is a JSON
object: ``results`` has one for each step, and ``took`` its seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from driver_steps import carry_out
from whole_driver import OPTIONS, STORED_S, generate, model

from simm.arena.events.listing import at_rest
from simm.client import Client

#: A page is larger, and what a backend stores for itself is smaller.
PAGE_BYTES = 4096


class Run:
    """An engine, and the cluster beside it."""

    def __init__(self, request: dict[str, Any]) -> None:
        import sglang

        self.version = sglang.__version__
        self.manager = str(request["manager"])
        folder, weights = Path(request["folder"]), int(request["weights"])
        self.engine: Any = sglang.Engine(model_path=model(folder, weights), **OPTIONS, **request["options"])

    def generate(self) -> list[dict[str, Any]]:
        """Generate for each prompt."""
        return generate(self.engine)

    def flush(self) -> None:
        """Empty the engine's own caches."""
        self.engine.flush_cache()

    def until(self, storage: int) -> list[dict[str, Any]]:
        """Flush and generate until so many tokens of each prompt came out of the storage; return the last output."""
        until = time.monotonic() + STORED_S
        while True:
            self.flush()
            made = self.generate()
            if all(each.get("storage", 0) >= storage for each in made) or time.monotonic() > until:
                return made

    def send(self, pids: list[int], number: int) -> None:
        """Send a signal to processes and all of their children."""
        for pid in pids:
            for each in (*psutil.Process(pid).children(True), psutil.Process(pid)):
                each.send_signal(number)

    def corrupt(self) -> int:
        """Change a bit in each element of each page where it lies, in the servers' memory; return how many pages."""
        pages = 0
        with Client(self.manager, path="shm") as client:
            assert client.wait_ready(STORED_S) and client._router is not None
            for target in client._router.targets.values():
                reader = target.arena()
                assert reader is not None
                for row in at_rest(reader, 0, reader.geometry.slots):
                    if row["length"] >= PAGE_BYTES:
                        start, length = int(row["offset"]) - reader.data_offset, int(row["length"])
                        np.frombuffer(reader.data, np.uint8, length, start)[2::4] ^= 0x40
                        pages += 1
        return pages


COMMANDS = ("generate", "flush", "until", "send", "corrupt")


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = Run(request)
    try:
        results, took = carry_out(run, request["steps"], COMMANDS)
    finally:
        run.engine.shutdown()
    print(json.dumps({"sglang": run.version, "results": results, "took": took}), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
