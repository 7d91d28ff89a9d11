"""Compare what a worker spends on a put in two checkouts, in bursts that alternate between them.

    python benchmarks/store.py BEFORE AFTER              two folders, each a checkout with simm/ in it
    python benchmarks/store.py . . --pairs 20            what the method itself cannot tell apart

Each checkout has a process of its own with a worker's store, without servers, clients and sockets: the frames of COMMIT
are made beforehand, and given to ``Worker.handle`` and ``Store.apply_pending`` as a ring does. What is measured is the
process's processor time, which other programs on the machine disturb by their use of caches, and a host by what it
takes away: so a burst counts with its lower quartile. Each pair of bursts gives a ratio; the median is the result, with
the quartiles beside it.

``full``: new keys in a full arena, each of which evicts one. ``room``: new keys where there is room; they are deleted
afterwards. ``over``: new values of keys that are stored. The number is that of the keys in a frame.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, Final

VALUE: Final = 4096
#: Name and keys of a frame; each burst has about KEYS keys.
BURSTS: Final = [(name, keys) for name in ("full", "room", "over") for keys in (1, 16, 32, 64)]
KEYS: Final = 2048
#: Keys that bursts of ``over`` store again.
STORED: Final = 1 << 15


class Bench:
    """A worker and one client's session, without a connection."""

    def __init__(self, memory: int) -> None:
        from simm.arena.store import Store
        from simm.constants import SHARD_COUNT
        from simm.net.loop import Loop
        from simm.rpc import Connection, decode, encode
        from simm.server.worker import ConnectionState, Worker, WorkerSettings
        from simm.wire import messages as M

        self.messages, self.encode, self.decode, self.connection = M, encode, decode, Connection
        self.store = Store.create(mmap.mmap(-1, memory))
        since = (1).to_bytes(8, sys.byteorder) * SHARD_COUNT
        self.store.begin_shards(1, since, bytes([M.ShardRole.OWNER]) * SHARD_COUNT)
        self.worker = Worker(self.store, WorkerSettings("store", -1), Loop())
        self.peer: Any = SimpleNamespace(context=ConnectionState(os.getpid(), os.geteuid(), M.Role.CLIENT))
        self.session = self.peer.context.session = self.store.sessions.open(os.getpid(), 1, "store")
        self.grants: list[int] = []
        self.random = random.Random(7)
        self.stored = [self.random.randbytes(16) for _ in range(STORED)]

    def fill(self, entries: int) -> None:
        """Store so many keys."""
        for start in range(0, entries, 128):
            self.put([self.stored[at % STORED] if at < STORED else self.random.randbytes(16)
                      for at in range(start, start + 128)])  # fmt: skip

    def put(self, digests: list[bytes]) -> float:
        """Commit one frame, and return its processor time in seconds."""
        M, store, worker = self.messages, self.store, self.worker
        while len(self.grants) < len(digests):
            self.grants += [grant[0] for grant in store.sessions.grant(self.session, VALUE, len(digests))]
        entries = [(digest, self.grants.pop(0), VALUE, 0, 0, 0) for digest in digests]
        commit = self.encode(M.Commit(entries, [(VALUE, len(digests))]), 1)
        received = self.connection()
        received.receive_data(commit)
        frame = received.next_frame()
        from simm.wire.one_key import commit_one_of

        began = time.process_time()
        one = commit_one_of(frame) if len(digests) == 1 else None
        answer = worker._commit_one(self.session, one) if one is not None else worker.handle(self.peer, frame)
        store.apply_pending()
        took = time.process_time() - began
        received.receive_data(answer)
        committed = self.decode(received.next_frame())
        if any(committed.statuses):
            raise SystemExit(f"store: a commit was refused: {committed.statuses}")
        self.grants += [grant[0] for grant in committed.grants]
        return took

    def burst(self, name: str, keys: int) -> float:
        """Return the seconds a key in the frame of a burst that a quarter of its frames undercut."""
        rng, frames = self.random, max(4, KEYS // keys)
        took: list[float] = []
        new: list[bytes] = []
        for number in range(frames + max(1, frames // 8)):
            if name == "over":
                first = rng.randrange(STORED - keys)
                digests = rng.sample(self.stored[first : first + 4 * keys], keys)
            else:
                digests = [rng.randbytes(16) for _ in range(keys)]
            seconds = self.put(digests)
            if number >= frames // 8:  # another process has had the caches
                took.append(seconds)
            new += digests
        if name == "room":
            self.store.delete(new)
        return statistics.quantiles(took, n=4)[0] / keys


def serve(memory: int) -> int:
    """Carry out the bursts that stdin asks for; answer each with its seconds a key."""
    full, room = Bench(memory), Bench(memory)
    full.fill(memory // VALUE)
    room.fill(memory // VALUE // 2)
    print("ready", flush=True)
    for line in sys.stdin:
        name, keys = json.loads(line)
        print((full if name == "full" else room).burst(name, keys), flush=True)
    return 0


class Side:
    """One checkout at work."""

    def __init__(self, folder: str, memory: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", str(memory)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.path.abspath(folder)}, cwd=folder,
        )  # fmt: skip
        if self._line() != "ready":
            raise SystemExit(f"store: {folder} did not start; its message is above")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def burst(self, name: str, keys: int) -> float:
        """Return the microseconds a key of a burst."""
        assert self.process.stdin is not None
        print(json.dumps([name, keys]), file=self.process.stdin, flush=True)
        return float(self._line()) * 1e6

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.communicate(timeout=60)


def main() -> int:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("before", help="folder of a checkout")
    parser.add_argument("after", help="folder of a checkout")
    parser.add_argument("--pairs", type=int, default=40, help="bursts of each kind in each (default: 40)")
    parser.add_argument("--memory", type=int, default=512, help="MiB of each arena (default: 512)")
    parser.add_argument("--only", default="", help="this kind, for example full32")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    sides: list[Side] = []
    try:
        sides = [Side(options.before, options.memory << 20), Side(options.after, options.memory << 20)]
        print(f"{'kind':<10}{'before us':>12}{'after us':>12}{'after/before':>14}   quartiles")
        rows: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(options.pairs):
            for kind in BURSTS:
                if options.only in ("", f"{kind[0]}{kind[1]}"):
                    order = [0, 1] if random.random() < 0.5 else [1, 0]
                    took = {side: sides[side].burst(*kind) for side in order}
                    rows.setdefault(kind, []).append((took[0], took[1]))
        for kind, pairs in rows.items():
            before, after = (statistics.median(column) for column in zip(*pairs))
            low, ratio, high = statistics.quantiles([after / before for before, after in pairs], n=4)
            figures = f"{before:>12.2f}{after:>12.2f}{ratio:>14.3f}   {low:.3f} to {high:.3f}"
            print(f"{kind[0] + str(kind[1]):<10}{figures}", flush=True)
    finally:
        for side in sides:
            side.end()
    return 0


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[2])) if sys.argv[1:2] == ["--serve"] else main())
