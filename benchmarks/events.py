"""Measure events: what the ring costs a PUT, and how long an index takes to be complete again.

    python benchmarks/events.py                           # all; --blocks 1000000, --rounds 60, --burst 6000
    python benchmarks/events.py cost | put | parts | restart | memory

*Cost*: a store in this process, with its ring and without in turns of some thousand PUTs each, as a busy worker takes
between two heartbeats: commits in batches of one, grants in batches of 32, and a heartbeat after each turn. The arena
is full, so each PUT evicts. It is one store, as two differ by where their memory lies. The figure is processor time of
the quick turns. It is compared with the wall time of a whole PUT of a client, of the quick
ones too, in the same run.

*Put*: three clusters with one worker each, one with a ring, and a client of each that puts values of 4 KiB and of 64
KiB, in turns: one by one, and 32 with a call. The arenas are full. Of each turn the median latency, and the processor
time of the worker: it polls while it is asked, so that has its waiting in it. What two without a ring differ by says
what the other difference is worth.

*Restart*: a data server with so many values. An index begins anew while ``simm events`` runs; then ``simm events``
begins anew while an index runs. Each time: until the index is complete and has as many blocks as the store has entries.
``simm events`` is a process of its own, the index a thread of this one.

*Memory*: what a publisher needs for one worker with so many values, which are made up: the most at a time (VmHWM), what
stays (VmRSS), and the processor time and the longest step of a look. Not in all, as others would be counted too.

Needs the extra ``simm-store[index]`` for the restarts. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import psutil

from simm.arena.events.ring import HEADER_BYTES, EventRing, attach
from simm.arena.store import Store
from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.sdk.local_cluster import LocalCluster
from simm.wire.messages import ShardRole

VALUE: Final = 4096
GRANTS: Final = 32
#: Of turns and of calls: on a busy machine the higher ones tell of others.
QUANTILE: Final = 0.1
MIB: Final = 1 << 20


class Side:
    """A store that is full, its ring, and a session that puts."""

    def __init__(self) -> None:
        self.arena = OwnedArena.create(f"simm-bench-{os.getpid()}", 64 * MIB)
        self.store = Store.create(self.arena.mm)
        epochs = np.full(SHARD_COUNT, 1, np.uint64).tobytes()
        self.store.begin_shards(1, epochs, bytes([ShardRole.OWNER]) * SHARD_COUNT)
        self.store.open()
        self.ring = EventRing(memoryview(np.zeros((HEADER_BYTES + 4 * MIB) // 8, np.uint64)).cast("B"))
        self.session = self.store.sessions.open(os.getpid(), 1, "bench")
        self.grants: list[tuple[int, int, int]] = []

    def turn(self, digests: list[bytes], ringed: bool) -> float:
        """Put one value for each digest, with the ring or without. Return the processor time of one, in us."""
        store, session = self.store, self.session
        if ringed:
            attach(self.ring, store.table)
        else:
            store.table.events = None
        began = time.process_time_ns()
        for digest in digests:
            if not self.grants:
                self.grants = store.sessions.grant(session, VALUE, GRANTS)
            number = self.grants.pop()[0]
            store.commit(session, [(digest, number, VALUE, 0, 0, 0)])
            store.apply_pending()
        store.table.tell()
        return (time.process_time_ns() - began) / 1000 / len(digests)

    def close(self) -> None:
        self.store.release()
        self.arena.unlink()
        self.arena.close()


def cost(rounds: int, burst: int) -> None:
    """Print what the ring costs, by so many PUTs at a time."""
    rng = np.random.default_rng(1)

    def digests() -> list[bytes]:
        raw = rng.bytes(16 * burst)
        return [raw[at : at + 16] for at in range(0, len(raw), 16)]

    side = Side()
    plain, ringed = [], []
    try:
        warm = max(8, 24_000 // burst)
        for number in range(rounds + warm):
            for ring in (False, True) if number % 2 else (True, False):
                took = side.turn(digests(), ring)
                if number >= warm:  # the arena is full by then
                    (ringed if ring else plain).append(took)
    finally:
        side.close()
    low, high = (float(np.quantile(each, QUANTILE)) for each in (plain, ringed))
    with Client.local("64M") as client:
        value, walls = bytes(VALUE), []
        for number in range(20_000):
            began = time.perf_counter_ns()
            client.put(f"key {number}", value)
            walls.append((time.perf_counter_ns() - began) / 1000)
    put = float(np.quantile(walls[5000:], QUANTILE))
    pairs = float(np.median(np.subtract(ringed, plain)))
    print(f"store's part of a PUT: {low:.2f} us of processor time, with a ring {high:.2f}: {high - low:+.3f} us "
          f"(p{100 * QUANTILE:.0f} of {rounds} turns), {pairs:+.3f} us (median of pairs)")  # fmt: skip
    print(f"a whole PUT of {VALUE} bytes by shm: {put:.1f} us (p{100 * QUANTILE:.0f}); the ring is "
          f"{100 * (high - low) / put:.1f} % of it")  # fmt: skip


def processor_ns(pid: int) -> int:
    """Return the processor time of a process by now: its clock's number is made from its own (``man clock_getres``)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def put(rounds: int, size: int) -> None:
    """Print the latency of a PUT of this size, and the worker's processor time, with and without a ring."""
    value = bytes(size)
    with contextlib.ExitStack() as stack:
        sides = []
        for flags in ((), (), ("--events", "4M")):
            cluster = stack.enter_context(LocalCluster("64M", arguments=flags))
            client = stack.enter_context(Client(cluster.manager, token=cluster.token))
            for number in range(5000):
                client.put(f"first {number}", value)
            children = psutil.Process(cluster.pids["dataserver"]).children()
            worker = max(children, key=lambda each: each.cpu_times().user)  # the others have done nothing yet
            sides.append((client, worker.pid))
        for batch in (1, 32):
            found = {"latency": [[], [], []], "worker's processor time": [[], [], []]}  # type: ignore[var-annotated]
            names = 0
            for number in range(rounds + 20):
                for at in (0, 1, 2) if number % 2 else (2, 1, 0):
                    client, pid = sides[at]
                    began, took = processor_ns(pid), []
                    for _ in range(640 // batch):
                        keys = [f"key {names + each}" for each in range(batch)]
                        names += batch
                        start = time.perf_counter_ns()
                        client.put(keys[0], value) if batch == 1 else client.put_many(keys, [value] * batch)
                        took.append((time.perf_counter_ns() - start) / 1000 / batch)
                    if number >= 20:  # all arenas are full
                        found["latency"][at].append(float(np.median(took)))
                        found["worker's processor time"][at].append((processor_ns(pid) - began) / 640_000)
            for what, turns in found.items():
                plain, again, ringed = map(np.array, turns)
                low = float(np.median(plain))
                print(f"PUT of {size} bytes, {batch} a call, {what} of a value: {low:.2f} us, p50; with a ring "
                      f"{100 * float(np.median((ringed - plain) / plain)):+.1f} %, without one in another cluster "
                      f"{100 * float(np.median((again - plain) / plain)):+.1f} % (medians of pairs)")  # fmt: skip


# -- restarts ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def events(at: tuple[str, str], server: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``simm events``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "simm", "events", "--rfc1527", ",".join(at), "--server", server],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("READY")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def parts(blocks: int) -> None:
    """Print the processor time of each part of a restart, without sockets and without waiting for a core."""
    from simm.arena.events.follow import CHANGE_FIELDS, LOOK_SLOTS, Step
    from simm.arena.events.ring import STORED
    from simm.index.blocks import Blocks
    from simm.index.events import decode
    from simm.index.publish.claims import Claims
    from simm.index.publish.messages import snapshot
    from simm.index.sources import Registration

    rows = np.zeros(blocks, CHANGE_FIELDS)
    rows["low"] = np.random.default_rng(1).integers(1, 1 << 64, blocks, np.uint64)
    rows["operation"] = STORED
    found = []
    for _ in range(5):
        claims, index = Claims(lambda owner, number: "default"), Blocks()
        source = index.register(Registration("pool", "m", "simm"))
        times = [time.process_time()]
        for start in range(0, blocks, LOOK_SLOTS):
            claims.take(1, Step(rows[start : start + LOOK_SLOTS]))
        times.append(time.process_time())
        told = snapshot("rfc1527", claims.all(), "host")
        times.append(time.process_time())
        for raw in told:
            index.apply(source, decode(raw).events)
        times.append(time.process_time())
        assert index.entries == claims.entries
        found.append(np.diff(times))
    first, second, third = np.min(found, axis=0)
    print(f"processor time for {blocks:,} entries, the least of 5: claims from a table {first:.2f} s, a snapshot "
          f"{second:.2f} s, an index from it {third:.2f} s")  # fmt: skip


def restart(blocks: int) -> None:
    """Print how long it takes until an index is complete again."""
    from simm.index.blocks import Blocks
    from simm.index.publishers import Publishers
    from simm.index.sources import Registration
    from simm.ipc.event_files import EventFile, told_by_servers

    memory = max(256 * MIB, blocks * 64 * 5)  # values, slots, and room
    flags = "--events", "4M", "--value-size", "64"
    with (
        tempfile.TemporaryDirectory() as folder, LocalCluster(memory, arguments=flags) as cluster,
        Client(cluster.manager, token=cluster.token) as client,
    ):  # fmt: skip
        at = f"ipc://{folder}/stream", f"ipc://{folder}/replay"
        for start in range(0, blocks, 4096):
            count = min(4096, blocks - start)
            client.put_many([f"key {number}" for number in range(start, start + count)], [bytes(64)] * count)
        (name,) = told_by_servers(cluster.name)
        file, here = EventFile(name), 0
        while file.follower.due:
            here += len(file.step().records)
        print(f"{here:,} entries")

        index = Blocks()
        publishers = Publishers(index)
        told = Registration("pool", "m", "simm", endpoint=at[0], replay=at[1], pool="p")

        def until_complete() -> float:
            began = time.perf_counter()
            while True:
                source = index.sources[told.name]
                stream = publishers.stream(source)
                known = stream is not None and stream.complete and not source.stale and not source.lost
                if known and source.blocks == here:
                    return time.perf_counter() - began
                time.sleep(0.002)

        with events(at, cluster.name):
            publishers.register(told)
            until_complete()
            for _ in range(3):
                publishers.unregister(told.name)
                publishers.register(told)
                print(f"index anew: {until_complete():.2f} s")
        for _ in range(3):
            began = time.perf_counter()
            with events(at, cluster.name):
                ready = time.perf_counter()
                until_complete()
                print(f"simm events anew: {time.perf_counter() - ready:.2f} s after it was ready, which took "
                      f"{ready - began:.2f} s")  # fmt: skip
        publishers.close()


def memory(blocks: int) -> None:
    """Print what looks and a snapshot take, without sockets."""
    from simm.arena.events.follow import Follower
    from simm.arena.events.listing import ENTRY_FIELDS
    from simm.arena.events.ring import RING_BYTES_MIN, RingReader
    from simm.index.publish.claims import Claims
    from simm.index.publish.messages import messages, snapshot
    from simm.index.publish.tabled import Tabled

    class Full:
        slots = blocks

        def page(self, start: int, stop: int) -> np.ndarray:
            rows = np.ones(stop - start, ENTRY_FIELDS)
            rows["low"] = np.random.default_rng(start).integers(1, 1 << 64, len(rows), np.uint64)
            rows["slot"] = np.arange(start, stop)
            return rows

        def some(self, slots: np.ndarray) -> np.ndarray:
            return np.zeros(0, ENTRY_FIELDS)

    def resident(which: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith(which))

    ring = memoryview(np.zeros(RING_BYTES_MIN // 8, np.uint64)).cast("B")
    EventRing(ring)
    before = resident("VmRSS")
    follower, claims = Follower(RingReader(ring), Full(), Tabled(blocks)), Claims(lambda owner, number: "default")
    for what in ("first", "next"):
        follower._page = -1  # as after a gap
        began, longest = time.process_time(), 0.0
        while follower.due:
            step = time.process_time()
            for _ in messages("rfc1527", claims.take(1, follower.step()), "host"):
                pass
            longest = max(longest, time.process_time() - step)
        took = (time.process_time() - began) / blocks
        most, kept = ((resident(name) - before) / blocks for name in ("VmHWM", "VmRSS"))
        print(f"the {what} look: {1e6 * took:.2f} us a value, the longest step {1e3 * longest:.0f} ms; at most "
              f"{most:.0f} bytes a value, then {kept:.0f}")  # fmt: skip
    told = snapshot("rfc1527", claims.all(), "host")
    print(f"a snapshot: {sum(map(len, told)) / blocks:.1f} bytes a value; at most "
          f"{(resident('VmHWM') - before) / blocks:.0f} with it")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "cost", "put", "parts", "restart", "memory"])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--burst", type=int, default=6000)
    arguments = parser.parse_args()
    if arguments.what in ("all", "cost"):
        cost(arguments.rounds, arguments.burst)
    if arguments.what in ("all", "put"):
        for size in (VALUE, 16 * VALUE):
            put(arguments.rounds, size)
    if arguments.what in ("all", "parts"):
        parts(arguments.blocks)
    if arguments.what in ("all", "restart"):
        restart(arguments.blocks)
    if arguments.what == "memory":
        memory(arguments.blocks)


if __name__ == "__main__":
    main()
