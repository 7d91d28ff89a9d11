"""Writers that overwrite, evict and delete what readers read over RDMA: processes, each with its own lanes.

    python -m vm.storm write MANAGER DEVICES NUMBER WRITERS SEED SECONDS [CONTROL]     (one line of JSON at the end)

Few keys, all hot, in an arena that holds a third of them, so that chunks change hands while they are READ. Values are
those of :mod:`storm.storm`: each says its key, writer, count and length, and repeats 16 bytes made of these to its end.
All of it is looked at. Each key has one writer, which counts; no reader may see a count go back.

``CONTROL`` takes a safety check out of a reader, to see that the storm notices. ``no-reread``: what was read is taken
for right whatever the slot says afterwards.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import Any, Final

from faults.fleet import child_environment
from storm.storm import Wrongs, count_in, report, value_of

from simm.client import Client

from .world import DEADLINE_S, PATHS, WAIT_S, wait_rdma

KIB: Final = 1 << 10
SIZES: Final = (200, 3000, 20 * KIB, 150 * KIB, 600 * KIB, 1300 * KIB)
KEYS: Final = 12


def keys_of(writer: int, seed: int) -> list[str]:
    """The keys that only this writer writes, and only in this storm: counts begin anew in each."""
    return [f"vm storm/{seed}/{writer}/{number}" for number in range(KEYS)]


def write(client: Client, number: int, seed: int, until: float) -> dict[str, Any]:
    """Put, overwrite, delete, and look after one's own."""
    rng = random.Random(f"write {seed} {number}")
    wrongs, floor, count = Wrongs(), dict[str, int](), 0
    ops = stored = deleted = hits = 0
    keys = keys_of(number, seed)
    while time.monotonic() < until:
        ops += 1
        what, key = rng.random(), rng.choice(keys)
        if what < 0.6:
            count += 1
            if client.put(key, value_of(key, number, count, rng.choice(SIZES))):
                floor[key] = count
                stored += 1
        elif what < 0.75:
            chosen = rng.sample(keys, 6)
            counts = list(range(count + 1, count + 1 + len(chosen)))
            count = counts[-1]
            values = [value_of(key, number, at, rng.choice(SIZES[:4])) for key, at in zip(chosen, counts)]
            for key, at, done in zip(chosen, counts, client.put_many(chosen, values)):
                if done:
                    floor[key] = at
                    stored += 1
        elif what < 0.85:
            deleted += client.delete(key)
            floor.pop(key, None)
        else:
            data = client.get(key)
            if data is not None:
                hits += 1
                seen = count_in(key, data)
                if seen < 0:
                    wrongs.note("wrong", f"{key}: {len(data)} bytes that are no value of it")
                elif seen < floor.get(key, 0):
                    wrongs.note("back", f"{key}: count {seen}, acknowledged was {floor[key]}")
    return {"ops": ops, "stored": stored, "deleted": deleted, "hits": hits, **report(wrongs)}


def read(client: Client, number: int, writers: int, seed: int, until: float) -> dict[str, Any]:
    """Get alone and in batches, into registered memory and through the bounce pool."""
    rng = random.Random(f"read {seed} {number}")
    wrongs, floor = Wrongs(), dict[str, int]()
    ops = hits = 0
    keys = [key for writer in range(writers) for key in keys_of(writer, seed)]
    buffers = [bytearray(max(SIZES)) for _ in range(8)]
    spans = [client.register(buffer) for buffer in buffers]

    def look(key: str, data: bytes | memoryview) -> None:
        nonlocal hits
        hits += 1
        seen = count_in(key, data)
        if seen < 0:
            wrongs.note("wrong", f"{key}: {len(data)} bytes that are no value of it")
        elif seen < floor.get(key, 0):
            wrongs.note("back", f"{key}: count {seen} after {floor[key]}")
        else:
            floor[key] = seen

    while time.monotonic() < until:
        ops += 1
        what, key = rng.random(), rng.choice(keys)
        if what < 0.5:
            got = client.get_into(key, spans[0] if what < 0.25 else buffers[0])
            if got is not None:
                look(key, memoryview(buffers[0])[:got])
        elif what < 0.9:
            chosen = rng.sample(keys, len(buffers))
            for key, buffer, got in zip(chosen, buffers, client.get_into_many(chosen, spans)):
                if got is not None:
                    look(key, memoryview(buffer)[:got])
        else:
            client.exists_many(rng.sample(keys, len(buffers)))
    return {"ops": ops, "hits": hits, **report(wrongs)}


def remove_check(control: str) -> None:
    """Take a safety check out of this process."""
    import simm.rdmaget
    import simm.remote_arena

    if control != "no-reread":
        raise ValueError(control)
    always: Any = lambda *_: True  # noqa: E731
    for module in (simm.remote_arena, simm.rdmaget):
        if hasattr(module, "confirmed"):
            module.confirmed = always  # type: ignore[attr-defined]


def main(arguments: list[str]) -> int:
    """A client process: see above."""
    role, manager, devices, number, writers, seed, seconds, *control = arguments
    if control:
        remove_check(control[0])
    with Client(manager, path=PATHS, rdma_devices=devices, deadline_s=DEADLINE_S) as client:
        assert client.wait_ready(WAIT_S)
        wait_rdma(client)
        until = time.monotonic() + float(seconds)
        if role == "write":
            result = write(client, int(number), int(seed), until)
        else:
            result = read(client, int(number), int(writers), int(seed), until)
        result |= {name: client.counters[name] for name in ("rdma_gets", "rdma_puts", "rdma_retries", "rdma_fallbacks")}
    print(json.dumps(result), flush=True)
    return 0


def storm(
    manager: str, devices: str, *, seconds: float, seed: int, writers: int = 2, readers: int = 3, control: str = ""
) -> dict[str, Any]:
    """Run one: the sums of all clients' figures, and ``said``. Raises AssertionError when a client fails."""
    processes = []
    try:
        for role, count in (("write", writers), ("read", readers)):
            for number in range(count):
                words = [role, manager, devices, *map(str, (number, writers, seed, seconds))]
                if control and role == "read":
                    words.append(control)
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "vm.storm", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        text=True, env=child_environment(),
                    )
                )  # fmt: skip
        sums: dict[str, Any] = {}
        for process in processes:
            said, _ = process.communicate(timeout=seconds + 2 * WAIT_S)
            assert process.returncode == 0, "a client failed: a cache problem went through to the engine"
            for name, value in json.loads(said.splitlines()[-1]).items():
                sums[name] = sums.get(name, type(value)()) + value
        return sums
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
