"""An RDMA network in software, in one process, that keeps the promises of ``simm.rdma.api`` and no other.

``FakeNetwork(seed)`` is the wire and the peers' memory; ``network.fabric(names)`` stands for ``verbs.open_fabric``.
Remote addresses are addresses of this process: a READ or WRITE copies between two places of its memory, word by word
(8 bytes; longer operations in at most ``pieces`` runs of words), in random order, at random moments between post and
completion. So torn values and reordering really occur, and some seed finds code that works by luck only.

What is random, because the API promises nothing else
-----------------------------------------------------
* The words of a READ are read in any order. They may be read before the words of an earlier READ, and before an earlier
  WRITE has landed. Only a FENCED_READ waits, for READs. Completions come in order.
* A READ may execute before or after a WRITE that was posted after it.
* A WRITE may complete, so that its source may be used again, before it has landed in the peer's memory. A READ after it
  completes only when it has landed. The WRITE's source is read at any time until it completes.
* A WRITE that has left lands even if its sender's end is closed or broken. Closing the *peer's* end stops it.
* A READ still writes to local memory after its queue pair broke, until that queue pair is closed.
* An invalidation meets WRITEs in flight: each lands before the invalidation returns, or is refused.

Time is the calls of :meth:`FakeNetwork.step`: ``poll`` and ``wait`` of any queue pair make some, in the caller's
thread. With one thread the seed determines everything. The network calls ``between`` between two steps of a ``wait``
(without the lock), so that a test with one thread can let a writer work in the middle of a READ. With
``background=True`` a thread of the network makes the steps.

GPU memory: ``network.gpu`` is a ``fake_cuda.FakeCuda``. Its memory can be registered by the dma-buf that it exports,
under addresses that count from 0 as in pyverbs, and by its own address if ``network.peermem``. The driver makes writes
to it visible at a flush only.

Faults: :meth:`FakeNetwork.hold` and ``release``, ``drop`` and ``restore`` (a rail's cable), ``sever`` (the path between
two rails), ``kill`` (a queue pair), ``overrun`` (its completion queue), ``gone`` (a device), the fields of ``Limits``,
``memlock``, and ``refuse`` (asked at registrations, queue pairs and windows).

The network records in ``network.violations`` what code under test must not do although no error reports it (two threads
in one queue pair at once). Every test ends with :func:`all_closed`.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from simm.errors import CorruptionError
from simm.rdma.api import (
    Access,
    FabricError,
    Limits,
    Neighbours,
    Op,
    Rail,
    Region,
)
from tests.support.fake_queue_pair import FakeQueuePair
from tests.support.fake_region import FakeRegion, FakeWindow, Refused

WORD: Final = 8
#: How often the background thread looks again when nothing can move, in seconds.
_NAP_S: Final = 0.002
_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)


class FakeRail:
    """One port of a device."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.fabric, self.network, self.name = fabric, fabric.network, name
        self.gid = self.network.new_gid()
        self.lid, self.mtu = 0, 4096
        self.limits = self.network.limits
        self.why = ""
        self.regions: list[FakeRegion] = []
        self.queue_pairs: list[FakeQueuePair] = []
        self.windows: list[FakeWindow] = []
        self.lkeys: dict[int, FakeRegion] = {}
        self.rkeys: dict[int, FakeRegion | FakeWindow] = {}
        self.network.rails[self.gid] = self

    def register(self, address: int, length: int, access: Access) -> Region:
        with self.network.lock:
            self._usable("register")
            if length < 1 or address < 1:
                raise FabricError(f"cannot register {length} bytes at {address:#x}", "EINVAL")
            if length > self.limits.region_bytes:
                raise FabricError(f"a region has at most {self.limits.region_bytes} bytes: register pieces", "EINVAL")
            if access & (Access.REMOTE_WRITE | Access.WINDOWS) and not access & Access.LOCAL_WRITE:
                raise FabricError("remote writing and windows need LOCAL_WRITE", "EINVAL")
            if sum(region.length for region in self.regions) + length > self.network.memlock:
                raise FabricError("cannot register: the limit on locked memory; raise it (ulimit -l)", "ENOMEM")
            on_gpu = self.network.gpu is not None and self.network.gpu.owns(address)
            if on_gpu and not self.network.peermem:
                raise FabricError(f"cannot register {length} bytes: that memory is not mapped", "EFAULT")
            region = FakeRegion(self, address, length, access)
            region.device = 0 if on_gpu else None
            return region

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Region:
        with self.network.lock:
            self._usable("register_dmabuf")
            if self.network.gpu is None or "fake-dma-buf" not in os.readlink(f"/proc/self/fd/{fd}"):
                raise FabricError("that descriptor is no dma-buf", "EBADF")
            start, size = struct.unpack("QQ", os.pread(fd, 16, 0))
            if offset < 0 or length < 1 or offset + length > size:
                raise FabricError(f"{length} bytes from {offset} on are not within the dma-buf", "EINVAL")
            region = FakeRegion(self, offset, length, access)
            region.device = start
            return region

    def reaches(self, gid: bytes, *, neighbours: Neighbours | None = None) -> bool:
        return gid not in self.network.silent

    def queue_pair(self) -> FakeQueuePair:
        with self.network.lock:
            self._usable("queue pair")
            return FakeQueuePair(self)

    def window(self) -> FakeWindow:
        with self.network.lock:
            self._usable("window")
            if len(self.windows) >= self.limits.windows:
                raise FabricError(f"a device has at most {self.limits.windows} windows", "ENOMEM")
            return FakeWindow(self)

    def close(self) -> None:
        with self.network.lock:
            for qp in list(self.queue_pairs):
                qp.close()
            for window in list(self.windows):
                window.close()
            for region in list(self.regions):
                region.close()
            self.why = self.why or "closed"

    # --- for the queue pairs, the network's lock held ---

    def check_local(self, lkey: int, address: int, length: int, write: bool) -> FakeRegion:
        region = self.lkeys.get(lkey)
        if region is None or not region.covers(address, length) or (write and not region.rights & _LOCAL_WRITE):
            raise Refused("LOC_PROT_ERR")
        return region

    def check_remote(self, qp: FakeQueuePair, rkey: int, address: int, length: int, right: Access) -> None:
        """Raise Refused unless this side, the responder, allows an operation that arrives at its queue pair ``qp``."""
        held = self.rkeys.get(rkey)
        if isinstance(held, FakeWindow):
            allowed = held.qp is qp and right == Access.REMOTE_WRITE
        else:
            allowed = held is not None and bool(held.rights & int(right))
        if held is None or not allowed or not held.covers(address, length):
            raise Refused("REM_ACCESS_ERR")

    def _usable(self, what: str) -> None:
        self.fabric.touched()
        why = self.why or self.network.refuse(what, self)
        if why:
            raise FabricError(f"{self.name}: {what}: {why}")


class FakeFabric:
    """The rails of one simulated process."""

    def __init__(self, network: FakeNetwork, names: Sequence[str]) -> None:
        self.network = network
        self.abandoned = False
        self.fakes = [FakeRail(self, name) for name in names]
        self.rails: Sequence[Rail] = self.fakes

    def close(self) -> None:
        self.touched()
        for rail in self.fakes:
            rail.close()

    def abandon(self) -> None:
        self.abandoned = True

    def touched(self) -> None:
        if self.abandoned:
            self.network.violation("a fabric that was abandoned is used")
            raise AssertionError("a fabric that was abandoned is used")


class FakeNetwork:
    """See the module's docstring. Durations are wall-clock seconds; everything else is counted in steps."""

    def __init__(
        self,
        seed: int = 0,
        *,
        region_bytes: int = 1 << 40,
        windows: int = 1 << 16,
        reads: int = 16,
        depth: int = 256,
        memlock: int = 1 << 50,
        pieces: int = 64,
        background: bool = False,
        refuse: Callable[[str, FakeRail], str] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        #: The order in which queue pairs and windows were made.
        self.births = itertools.count()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.limits = Limits(region_bytes, windows, reads, depth)
        self.memlock = memlock
        self.between = between
        #: Returns why a registration, a queue pair or a window is refused now, or "".
        self.refuse: Callable[[str, FakeRail], str] = refuse or (lambda what, rail: "")
        self.rails: dict[bytes, FakeRail] = {}
        self.queue_pairs: dict[int, FakeQueuePair] = {}
        self.fabrics: list[FakeFabric] = []
        #: Counts of executed operations; and the posted chains, if a test sets this to a list.
        self.count: Counter[str] = Counter()
        self.copies = 0
        self.posted: list[tuple[FakeQueuePair, tuple[Op, ...]]] | None = None
        self.violations: list[str] = []
        #: GIDs that nobody answers for: connecting to one would wait.
        self.silent: set[bytes] = set()
        #: A CUDA driver in software, and whether its memory can be registered by address.
        self.gpu: Any = None
        self.peermem = False
        self.background = background
        self._pieces = pieces
        self._busy: list[FakeQueuePair] = []
        self._held: Callable[[FakeQueuePair, Op], bool] | None = None
        self._dropped: set[bytes] = set()
        self._severed: set[frozenset[bytes]] = set()
        self._inside = threading.local()
        self._ended = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="fake network", daemon=True)
            self._thread.start()

    def fabric(self, names: Sequence[str] = ("fake0",)) -> FakeFabric:
        """Return the rails of one more simulated process."""
        with self.lock:
            made = FakeFabric(self, names)
            self.fabrics.append(made)
            return made

    # --- time ---

    def step(self) -> bool:
        """Do one random step of an operation in flight; return False if nothing can move."""
        with self.lock:
            order = self._busy if len(self._busy) == 1 else self.rng.sample(self._busy, len(self._busy))
            for qp in list(order):
                if qp.step():
                    return True
                if not qp.queue and not qp.landing and not qp.stray:
                    self._busy.remove(qp)
            return False

    def run(self) -> None:
        """Run steps until nothing can move."""
        while self.step():
            pass

    def some_steps(self) -> None:
        for _ in range(0 if self.background else self.rng.randrange(8)):
            self.interlude()
            self.step()

    def interlude(self) -> None:
        """Call the test's ``between``, unless it is the caller."""
        if self.between is not None and not getattr(self._inside, "busy", False):
            self._inside.busy = True
            try:
                self.between()
            finally:
                self._inside.busy = False

    # --- faults ---

    def hold(self, which: Callable[[FakeQueuePair, Op], bool] | None = None) -> None:
        """Let operations (those that ``which`` selects, else all) leave but not arrive, until :meth:`release`."""
        with self.lock:
            self._held = which or (lambda qp, op: True)

    def release(self) -> None:
        with self.lock:
            self._held = None
            self.changed.notify_all()

    def drop(self, rail: Rail) -> None:
        """Pull a rail's cable: nothing arrives until :meth:`restore`, and then what was in flight does."""
        with self.lock:
            self._dropped.add(rail.gid)

    def restore(self, rail: Rail) -> None:
        with self.lock:
            self._dropped.discard(rail.gid)
            self.changed.notify_all()

    def sever(self, one: Rail, other: Rail) -> None:
        """Cut the path between two rails; their paths to other rails stay."""
        with self.lock:
            self._severed.add(frozenset((one.gid, other.gid)))

    def kill(self, qp: FakeQueuePair, status: str = "RETRY_EXC_ERR") -> None:
        """Break both ends of a queue pair."""
        with self.lock:
            far = self.queue_pairs.get(qp.peer.qpn) if qp.peer is not None else None
            qp.fail("killed by the test", status)
            if far is not None:
                far.fail("killed by the test", status)

    def overrun(self, qp: FakeQueuePair) -> None:
        """Lose what a queue pair's completion queue has to say from now on. Its operations go on all the same."""
        with self.lock:
            qp.overrun = True

    def gone(self, rail: Rail) -> None:
        """Remove a device: its queue pairs break, and it provides nothing any more."""
        with self.lock:
            fake = self.rails[rail.gid]
            fake.why = "the device has gone"
            for qp in list(fake.queue_pairs):
                qp.fail("the device has gone", "WR_FLUSH_ERR")

    @property
    def hindered(self) -> bool:
        """True if :meth:`stops` may stop something. The caller holds the lock."""
        return self._held is not None or bool(self._dropped or self._severed)

    def stops(self, qp: FakeQueuePair, far: FakeQueuePair, op: Op) -> bool:
        """Return True if an operation of ``qp`` cannot arrive now. The caller holds the lock."""
        if self._held is not None and self._held(qp, op):
            return True
        gids = (qp.rail.gid, far.rail.gid)
        return (bool(self._dropped) and not self._dropped.isdisjoint(gids)) or (
            bool(self._severed) and frozenset(gids) in self._severed
        )

    # --- the end ---

    def check(self) -> list[str]:
        """Return descriptions of what is still open; raise CorruptionError if the state is inconsistent."""
        with self.lock:
            for qp in self.queue_pairs.values():
                alive = qp.open and not qp.why
                if (qp.queue and not alive) or qp.begun > len(qp.queue) or (qp.stray and not qp.open):
                    raise CorruptionError(f"{qp}: {len(qp.queue)} under way, {qp.begun} begun, {qp.open}")
                if (qp.queue or qp.landing or qp.stray) and qp not in self._busy:
                    raise CorruptionError(f"{qp}: has work and nobody looks after it")
            found = []
            for fabric in self.fabrics:
                if not fabric.abandoned:
                    for rail in fabric.fakes:
                        found += [f"{rail.name}: region of {region.length} bytes" for region in rail.regions]
                        found += [f"{rail.name}: {qp}" for qp in rail.queue_pairs]
                        found += [f"{rail.name}: window {window.rkey:#x}" for window in rail.windows]
            return found

    def close(self) -> None:
        """End the network's thread, if it has one."""
        self._ended = True
        if self._thread is not None:
            self._thread.join()

    # --- for the others, the lock held ---

    def wake(self, qp: FakeQueuePair) -> None:
        if qp not in self._busy:
            self._busy.append(qp)
            self.changed.notify_all()

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Return (offset, size) of the pieces of ``length`` bytes in the order of copying, last first."""
        words = (length + WORD - 1) // WORD
        if words <= self._pieces:
            starts = list(range(0, length, WORD))
        else:
            starts = sorted({0, *(WORD * self.rng.randrange(words) for _ in range(self._pieces - 1))})
        pieces = [(start, end - start) for start, end in zip(starts, [*starts[1:], length])]
        self.rng.shuffle(pieces)
        return pieces

    def new_key(self, taken: Container[int]) -> int:
        while True:
            key = self.rng.randrange(1, 1 << 24) << 8
            if key not in taken:
                return key

    def new_gid(self) -> bytes:
        return b"\xfe\x80" + bytes(10) + (len(self.rails) + 1).to_bytes(4, "big")

    def _run(self) -> None:
        while not self._ended:
            if not self.step():
                with self.lock:
                    self.changed.wait(_NAP_S)


def all_closed(network: FakeNetwork) -> None:
    """Check at the end of a test that nothing is open and that nothing forbidden was done."""
    network.close()
    left = network.check()
    assert not left, left
    assert not network.violations, network.violations
