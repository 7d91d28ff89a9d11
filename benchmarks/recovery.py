"""How long the successor of a dead worker takes until it knows its arena, by the arena's size and its values.

    python benchmarks/recovery.py                     # 64 GiB with values of 16 KiB; --memory, --value-size, --fill

The arena is a sparse file: of its data it has only what recovery looks at, which is none of the values. So it may be
larger than the machine's memory. Its table takes 2 % of it. A process fills it to ``--fill`` of its data and is killed
with kill -9. Another one, which was forked before as a data server's child is, then recovers it. The time is that of
``Store.recover``. The longest time without a heartbeat is what clients that read the arena see meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import resource
import signal
import threading
import time
from typing import Final

import numpy as np

from simm.arena.layout import Word
from simm.arena.store import Store
from simm.arena.vault import Vault
from simm.config.parsers import parse_bytes
from simm.constants import SHARD_COUNT, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.slab import chunk_bytes_for
from simm.wire.messages import ShardRole

#: Between two looks at the heartbeat, seconds.
LOOK_S: Final = 0.001
NAME: Final = "benchmark"


def fill(mm: mmap.mmap, vault: Vault, value: int, share: float) -> int:
    """Lay the arena out and publish values in chunks side by side; return how many."""
    store = Store.create(mm, vault=vault)
    since = np.ones(SHARD_COUNT, np.uint64).tobytes()
    store.begin_shards(1, since, bytes([ShardRole.OWNER]) * SHARD_COUNT, 1)
    store.open()
    chunk = chunk_bytes_for(value)
    whole = SLAB_BYTES if chunk <= SLAB_CHUNK_BYTES_MAX else chunk
    inside = whole // chunk
    geometry, publish = store.geometry, store.table.publish
    stored = 0
    for number in range(int(geometry.data_bytes // whole * inside * share)):
        offset = geometry.data_offset + number // inside * whole + number % inside * chunk
        digest = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
        if publish(digest, offset, value, 0, chunk, 0, 0, number + 1) is None:
            break  # both sets of a digest are full: the table is
        stored += 1
    return stored


def recover(mm: mmap.mmap, vault: Vault) -> dict[str, float]:
    """Recover the arena; return how long it took and what it needed."""
    words = memoryview(mm)[:4096].cast("Q")
    over = threading.Event()
    longest = [0.0]

    def look() -> None:
        last, at = words[Word.HEARTBEAT], time.monotonic()
        while not over.wait(LOOK_S):
            now = time.monotonic()
            longest[0] = max(longest[0], now - at)
            if words[Word.HEARTBEAT] != last:
                last, at = words[Word.HEARTBEAT], now

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    store = Store.recover(mm, NAME, vault=vault)
    took = time.monotonic() - began
    over.set()
    watch.join()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": took, "values": store.table.entries, "silent_s": longest[0], "grown_mib": grown / 1024,
            "notes": len(store.notes)}  # fmt: skip


def main() -> int:
    """Print a line for a recovery."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=parse_bytes, default=64 << 30, metavar="SIZE", help="of the arena (64G)")
    parser.add_argument("--value-size", type=parse_bytes, default=16 << 10, metavar="SIZE", help="of each value (16K)")
    parser.add_argument("--fill", type=float, default=0.9, metavar="SHARE", help="of its data (0.9)")
    arguments = parser.parse_args()
    fd = os.memfd_create("simm-benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, arguments.memory // SLAB_BYTES * SLAB_BYTES)
    mm = mmap.mmap(fd, os.fstat(fd).st_size)
    vault = Vault()
    told, tell = os.pipe()
    begin, begun = os.pipe()
    successor = os.fork()
    if not successor:
        os.read(begin, 1)
        os.write(tell, json.dumps(recover(mm, vault)).encode())
        os._exit(0)
    worker = os.fork()
    if not worker:
        os.write(tell, b"%d" % fill(mm, vault, arguments.value_size, arguments.fill))
        signal.pause()
    stored = int(os.read(told, 100))
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    os.write(begun, b".")
    found = json.loads(os.read(told, 1000))
    os.waitpid(successor, 0)
    if found["values"] != stored:
        print(f"{stored:,} values were stored, and {found['values']:,} are back")
        return 1
    print(
        f"{arguments.memory >> 20:,} MiB, {stored:,} values of {arguments.value_size:,} bytes: back after "
        f"{found['seconds']:.2f} s; at most {found['silent_s']:.3f} s without a heartbeat, "
        f"{found['grown_mib']:,.0f} MiB with the table"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
