"""The caches of ``ttft.py``: none, one in the engine's own memory, the stores of ``peers_stores.py``, LMCache's server.

An engine asks each of them for as many leading blocks of a prompt as it has, straight into the pool that the model
computes in, and hands over the blocks that it computed. A block that a cache has not is computed again.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from conversations import block_keys
from peers_stores import PEERS, Peer, PeerError, Server, absent, free_port
from ttft_model import LayerPool, Pool, Shape


class Cache:
    """What the benchmark needs from a cache: some leading blocks of a prompt."""

    name = "none"
    #: What there is to say about it in the report: its version, and how it is used.
    note = ""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def load(self, prompt: Sequence[int], most: int) -> int:
        """Put leading blocks of the prompt into the pool, ``most`` at most; return how many. This is timed."""
        return 0

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        """Keep blocks ``start`` to ``end`` of the prompt, which are in the pool. Raises PeerError."""

    def ready(self, layer: int) -> None:
        """Return when the layer's keys and values are in the pool. Raises PeerError if they are lost."""

    def before(self) -> None:
        """Prepare the pool for a load. This is not timed."""
        self.pool.spoil()

    def clear(self) -> None:
        """Forget all blocks."""

    def close(self) -> None:
        """Stop what was started. May be called twice."""


class InProcess(Cache):
    """A cache in the engine's own memory: blocks stay in the pool, nothing is copied. No other process has them."""

    name = "in-process"
    note = "blocks stay where the model reads them"

    def __init__(self, pool: Pool, block: int) -> None:
        super().__init__(pool)
        self._block = block
        self._keys: list[str] = []

    def before(self) -> None:
        pass

    def load(self, prompt: Sequence[int], most: int) -> int:
        pairs = zip(self._keys, block_keys("", prompt[: most * self._block], self._block))
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        self._keys[start:] = block_keys("", prompt, self._block)[start:end]

    def clear(self) -> None:
        self._keys = []


class Stored(Cache):
    """A store of values by key: a value for each block, read into the pool itself."""

    def __init__(self, peer: Peer, pool: Pool, prefix: str) -> None:
        super().__init__(pool)
        self.name = peer.name
        self.note = peer.version()
        self.peer = peer
        self.prefix = prefix
        self._names: set[str] = set()
        if pool.device == "cpu":
            peer.adopt(pool.memory)
        self._handles = [peer.handle(row) for row in pool.rows()]

    def load(self, prompt: Sequence[int], most: int) -> int:
        keys = block_keys(self.prefix, prompt[: most * self.pool.block], self.pool.block)
        there = sum(1 for _ in itertools.takewhile(bool, self.peer.mexists(keys) if keys else ()))
        if not there:
            return 0
        got = self.peer.mget_into(keys[:there], self._handles[:there])
        return sum(1 for _ in itertools.takewhile(lambda size: size == self.pool.block_bytes, got))

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        keys = block_keys(self.prefix, prompt, self.pool.block)[start:end]
        if keys and not all(self.peer.mput(keys, self._handles[start:end])):
            raise PeerError(f"{self.name}: a block was not stored")
        self._names.update(keys)

    def clear(self) -> None:
        if self._names:
            self.peer.delete_many(sorted(self._names))
            self._names.clear()

    def close(self) -> None:
        self.peer.close()


class OnDevice(Stored):
    """SiMM with a pool in a GPU's memory: one DMA for a block, straight out of the arena and into it."""

    def __init__(self, peer: Peer, pool: Pool, prefix: str) -> None:
        from simm.gpu.buffers import device_span

        super().__init__(peer, pool, prefix)
        self._handles = [device_span(row) for row in pool.rows()]
        self.note += ", GPU buffers"
        if peer.name == "simm":
            self.note += f", the arena is registered with the driver in {registered(peer):.1f} s"


class Layered(Cache):
    """SiMM by layers: a thread loads some layers of all blocks after the others, while the model computes.

    Its time of lookup and load is that until the first ones may be waited for.
    """

    #: Layers that are loaded by one call: fewer begin sooner, and take more calls.
    AT_ONCE = 4
    WAIT_S = 60.0

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored.pool)
        pool = stored.pool
        self.name = "simm-layers"
        self.note = f"{stored.note}, {self.AT_ONCE} layers at a time from values that are pinned"
        self._stored = stored
        self._size = pool.block_bytes // pool.layers
        self._thread = ThreadPoolExecutor(1)
        self._parts = [
            (first * self._size, (min(first + self.AT_ONCE, pool.layers) - first) * self._size)
            for first in range(0, pool.layers, self.AT_ONCE)
        ]
        rows = pool.rows()
        take = self._taker()
        self._rows = [[take(row[start : start + size]) for row in rows] for start, size in self._parts]
        self._loaded: list[Future[None]] = []

    def _taker(self) -> Callable[[Any], Any]:
        if self.pool.device == "cpu":
            return lambda row: row
        from simm.gpu.buffers import device_span

        return device_span

    def load(self, prompt: Sequence[int], most: int) -> int:
        keys = block_keys(self._stored.prefix, prompt[: most * self.pool.block], self.pool.block)
        pins = self._stored.peer._client.pin(keys)
        there = sum(1 for _ in itertools.takewhile(lambda size: size == self.pool.block_bytes, pins.lengths))
        self._loaded = [self._thread.submit(self._read, pins, there, part) for part in range(len(self._parts))]
        self._thread.submit(pins.release)
        return there

    def _read(self, pins: Any, there: int, part: int) -> None:
        start, size = self._parts[part]
        got = pins.read([(start, size, self._rows[part][: len(pins)])]) if there else []
        if None in got[:there]:
            raise PeerError(f"{self.name}: a pinned block was lost")

    def ready(self, layer: int) -> None:
        if self._loaded:
            self._loaded[layer // self.AT_ONCE].result(self.WAIT_S)

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        self._stored.save(prompt, start, end)

    def clear(self) -> None:
        self._stored.clear()

    def close(self) -> None:
        self._thread.shutdown()
        self._stored.close()


class Staged(Stored):
    """A store that knows no GPU's memory: its blocks pass pinned host memory, as engines do it."""

    def __init__(self, peer: Peer, pool: Pool, prefix: str) -> None:
        import torch

        own = peer.array(pool.memory.nbytes)
        self._pinned = torch.empty(pool.memory.nbytes, dtype=torch.uint8, pin_memory=True) if own is None else None
        host = Pool(pool.shape, pool.blocks, pool.block, pool.dtype, own if own is not None else self._pinned.numpy())
        super().__init__(peer, host, prefix)
        self.pool = pool
        self.note += ", by pinned host memory" if own is None else ", by its own host memory"
        self._host = torch.from_numpy(host.memory)
        self._done = torch.cuda.synchronize

    def before(self) -> None:
        super().before()
        self._host.fill_(0xFF)

    def load(self, prompt: Sequence[int], most: int) -> int:
        there = super().load(prompt, most)
        end = there * self.pool.block_bytes
        self.pool.memory[:end].copy_(self._host[:end], non_blocking=True)
        self._done()
        return there

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        part = slice(start * self.pool.block_bytes, end * self.pool.block_bytes)
        self._host[part].copy_(self.pool.memory[part])
        super().save(prompt, start, end)


def registered(peer: Any) -> float:
    """Wait until the arena is registered with the driver; return the seconds it took. Raises PeerError."""
    import time

    from simm.gpu import cuda, pinning

    client = peer._client
    client.wait_ready()
    client.put("ttft/first", b"x")
    (target,) = client._router.targets.values()
    began = time.monotonic()
    arena = pinning.pinned_for(target.reader, cuda.load(), 0)
    while arena.ready < arena.size:
        if arena.failure or time.monotonic() > began + 300:
            raise PeerError(f"the arena is not registered with the driver: {arena.failure or 'it takes too long'}")
        time.sleep(0.01)
    return time.monotonic() - began


class LMCacheServer(Cache):
    """LMCache's server, with the client that its own ``lmcache bench server`` has: "engine driven", by shared memory.

    The worker copies between its paged memory and the server's arena. The server hashes the tokens and keeps the index.
    """

    name = "lmcache"
    MODEL = "ttft"
    INSTANCE = 1
    #: Its imports alone take 10 s of a processor.
    WAIT_S = 120.0

    def __init__(self, pool: LayerPool, shape: Shape, home: Path, memory: int) -> None:
        super().__init__(pool)
        self.pool: LayerPool = pool
        self.note = f"lmcache {metadata.version('lmcache')}, its server, engine-driven transfer by shared memory"
        self._numbers = itertools.count()
        self._caches = {f"layer.{number}": tensor for number, tensor in enumerate(pool.tensors)}
        self._client: Any = None
        self._context: Any = None
        self._zmq: Any = None
        home.mkdir()
        port = free_port()
        command = [
            sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port),
            "--http-port", str(free_port()), "--chunk-size", str(pool.block), "--l1-size-gb", f"{memory / 2**30:.3f}",
            "--no-l1-use-lazy", "--shm-name", f"ttft-{port}", "--supported-transfer-mode", "engine_driven",
            "--eviction-policy", "LRU", "--disable-observability",
        ]  # fmt: skip
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
        self._server = Server(command, home, self.name, quiet)
        try:
            self._server.wait_for(("127.0.0.1", port), self.WAIT_S)
            self._connect(f"tcp://127.0.0.1:{port}", shape)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def missing() -> str | None:
        return absent(modules=["lmcache", "zmq"])

    def _connect(self, address: str, shape: Shape) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # it has a line for each transfer
        zmq = importlib.import_module("zmq")
        contexts = importlib.import_module("lmcache.v1.multiprocess.transfer_context")
        types = importlib.import_module("lmcache.v1.multiprocess.group_view")
        factory = importlib.import_module("lmcache.v1.multiprocess.transport.factory").RequestClientFactory
        self._zmq = zmq.Context()
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._client = factory.create(address, context=self._zmq)
        self._key = importlib.import_module("lmcache.v1.multiprocess.custom_types").IPCCacheServerKey
        self._context = contexts.EngineDrivenTransferContext(self.INSTANCE, self._client)
        group = types.EngineGroupInfo(
            engine_group_id=0, layer_indices=tuple(range(shape.layers)), tokens_per_block=self.pool.block
        )
        self._context.register(
            self._caches, self.MODEL, 1, 1, self.WAIT_S, layout_hints={"kv_layout": "NHD"}, engine_group_infos=[group]
        )
        if type(self._context.engine_driven_context) is not contexts.EngineDrivenContextShm:
            raise PeerError("LMCache's server gives no shared memory")

    def _keyed(self, prompt: Sequence[int], start: int, end: int, request: str, worker: int | None) -> Any:
        block = self.pool.block
        return self._key(
            model_name=self.MODEL, world_size=1, num_kv_readers=1, worker_id=worker, request_id=request,
            token_ids=tuple(prompt[: end * block]), start=start * block, end=end * block,
        )  # fmt: skip

    def _blocks(self, start: int, end: int) -> list[list[int]]:
        return [list(range(start + self.pool.SPARE, end + self.pool.SPARE))]

    def load(self, prompt: Sequence[int], most: int) -> int:
        request = f"load-{next(self._numbers)}"
        self._client.lookup(self._keyed(prompt, 0, most, request, None), 1).result(timeout=self.WAIT_S)
        there = None
        while there is None:
            there = self._client.query_prefetch_status(request).result(timeout=self.WAIT_S)
        if there:
            done = self._context.submit_retrieve(
                request, self._keyed(prompt, 0, there, request, 0), self._caches, self._blocks(0, there), None, 1
            )
            there = there if done.result(timeout=self.WAIT_S) else 0
        self._client.end_session(request).result(timeout=self.WAIT_S)
        return int(there)

    def save(self, prompt: Sequence[int], start: int, end: int) -> None:
        request = f"save-{next(self._numbers)}"
        done = self._context.submit_store(
            request, self._keyed(prompt, start, end, request, 0), self._caches, self._blocks(start, end), None, 1
        )
        self._client.end_session(request).result(timeout=self.WAIT_S)
        if not done.result(timeout=self.WAIT_S):
            raise PeerError("LMCache's server did not store a block")

    def clear(self) -> None:
        self._client.clear(True).result(timeout=self.WAIT_S)

    def close(self) -> None:
        context, self._context = self._context, None
        client, self._client = self._client, None
        with contextlib.suppress(Exception):  # a server that is dead already
            if context is not None:
                context.unregister().result(timeout=5.0)
                context.close()
        with contextlib.suppress(Exception):
            if client is not None:
                client.close()
        zmq, self._zmq = self._zmq, None
        if zmq is not None:
            zmq.term()
        self._server.stop()


#: By their names for ``--caches``: the label of a table, and the class of ``peers_stores`` behind it.
STORES = {
    "simm": "SiMM, shared memory", "simm-tcp": "SiMM, TCP", "redis": "Redis", "mooncake-shm": "Mooncake, shared memory",
}  # fmt: skip
#: Those that take GPU memory.
DEVICE_STORES = {"simm", "simm-tcp"}
LAYERS = "simm-layers"
LABELS = {
    "none": "no cache", "in-process": "in-process cache", "simm": STORES["simm"], LAYERS: "SiMM, layer by layer",
    **STORES, "lmcache": "LMCache's server",
}  # fmt: skip


def missing(name: str, device: str) -> str | None:
    """Return the reason why a cache cannot run here, or None."""
    if name in STORES or name == LAYERS:
        return PEERS["simm" if name == LAYERS else name].missing()
    if name == "lmcache" and device != "cpu":
        return "this benchmark drives its server by the CPU only"
    return LMCacheServer.missing() if name == "lmcache" else None


def opened(name: str, shape: Shape, home: Path, pool: Pool, held: int) -> Cache:
    """Start a cache that may hold ``held`` bytes of blocks. ``pool``: what caches share that can use any memory.

    Raises PeerError if a server does not start.
    """
    if name == "none":
        return Cache(pool)
    sizes = (shape, pool.blocks, pool.block, pool.dtype)
    if name == "in-process":
        return InProcess(pool.twin(), pool.block)
    if name == "lmcache":
        return LMCacheServer(LayerPool(*sizes), shape, home / name, held)
    if name == LAYERS:
        (home / name).mkdir()
        stored = opened("simm", shape, home / name, pool, held)
        assert isinstance(stored, Stored)
        return Layered(stored)
    peer = PEERS[name](home / name, held, pool.memory.nbytes)
    try:
        peer.start()
        if pool.device != "cpu":
            return (OnDevice if name in DEVICE_STORES else Staged)(peer, pool, f"ttft/{pool.block}")
        own = peer.array(pool.memory.nbytes)
        return Stored(peer, pool if own is None else Pool(*sizes, memory=own), f"ttft/{pool.block}")
    except BaseException:
        peer.close()
        raise
