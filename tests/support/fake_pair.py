"""Two connected queue pairs of the network in software, each with memory of its own: for tests of that network."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from simm.rdma.api import Access, Binding, Fabric, Op
from tests.support.fake_fabric import FakeNetwork, FakeQueuePair, FakeRegion, FakeWindow, all_closed

SIZE = 4096
RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.WINDOWS
SEEDS = range(40)


class Memory:
    """Registered memory of one side."""

    def __init__(self, fabric: Fabric, access: Access = RIGHTS, size: int = SIZE) -> None:
        self.words = (ctypes.c_uint64 * (size // 8))()
        self.address = ctypes.addressof(self.words)
        region = fabric.rails[0].register(self.address, size, access)
        assert isinstance(region, FakeRegion)
        self.region = region

    def at(self, word: int) -> int:
        return self.address + 8 * word

    def __getitem__(self, word: int) -> int:
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value


class Pair:
    """Two sides with memory, and a queue pair between them."""

    def __init__(self, seed: int = 0, access: Access = RIGHTS, **options: object) -> None:
        self.network = FakeNetwork(seed, **options)  # type: ignore[arg-type]
        self.near, self.far = self.network.fabric(("near0",)), self.network.fabric(("far0",))
        self.mine, self.theirs = Memory(self.near), Memory(self.far, access)
        self.qp, self.end = self.connected()

    def connected(self) -> tuple[FakeQueuePair, FakeQueuePair]:
        one, other = self.near.fakes[0].queue_pair(), self.far.fakes[0].queue_pair()
        one.connect(other.address())
        other.connect(one.address())
        return one, other

    def op(self, kind: int, mine: int, theirs: int, words: int = 1, rkey: int = 0) -> Op:
        return (
            kind,
            self.mine.at(mine),
            self.mine.region.lkey,
            8 * words,
            self.theirs.at(theirs),
            rkey or self.theirs.region.rkey,
        )

    def do(self, *ops: Op) -> None:
        self.qp.wait(self.qp.post(ops), time.monotonic() + 120)

    def window(self, word: int, words: int) -> FakeWindow:
        window = self.far.fakes[0].window()
        self.end.bind([Binding(window, self.theirs.region, self.theirs.at(word), 8 * words)])
        return window

    def close(self) -> None:
        self.near.close()
        self.far.close()
        all_closed(self.network)


#: Makes pairs that are closed at the end of the test.
Make = Callable[..., Pair]


def order(first: int, second: int) -> str:
    return "<" if first < second else ">" if first > second else "="


def seen(make: Make, chain: Callable[[Pair], list[Op]], look: Callable[[Pair], str], **options: object) -> set[str]:
    """Return what ``look`` finds after the chain, over the seeds, while the peer's words 0 and 1 count up."""
    found = set()
    for seed in SEEDS:
        pair = make(seed, **options)

        def count(pair: Pair = pair) -> None:
            pair.theirs[0] += 1
            pair.theirs[1] += 1

        pair.network.between = count
        pair.do(*chain(pair))
        found.add(look(pair))
    return found
