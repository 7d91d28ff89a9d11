"""The workers' half of SiMM's connector for vLLM: blocks go between the engine's memory and the store.

Loads
-----
A load runs in a thread. Without ``layerwise``, vLLM runs other requests meanwhile, and takes this one up when
:meth:`WorkerSide.finished` names it. With it, the request runs at once. Its blocks are pinned and read layer by layer,
and a layer waits for its own part only. A client with checksums reads all layers together, as it would look at values
several times otherwise. Such a load is not given up for being slow: each of its exchanges has a deadline.

Saves
-----
Each layer's new blocks are copied to *staging memory* by a thread when the layer is done, while the next one computes.
A step ends when these copies have. Threads store the values after that, so no block of the engine is in use any more
and no step waits for a server. Blocks that find no room in the staging memory are not stored.

Failures
--------
What was not read whole is named to vLLM, which computes it. With ``layerwise`` a step may have computed on blocks whose
load failed. So nothing of such a step is stored, nor of those behind it, until a plan says that the scheduler knows of
the failure: the steps from there on are without its consequences.

vLLM ends a step also if the model has raised, or a signal's handler has. It counts the step's tokens as computed all
the same, and keeps the blocks in its own cache. So nothing of such a step is stored, nor of any step after it. A step
may also fail before it begins here: plans have numbers, and one that is missing is such a step. What loads have come to
is told by the next step, as vLLM loses what a step says that raises.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from ..client import Client, NoValue, WrongSize
from ..host import fork
from ..host.buffers import Ranges, Span
from ..host.threads import Pool, Waiters
from ..schemes.vllm import connector_keys
from ..wire.status import STATUS_NAMES, Status
from .complaints import Complaints
from .keyspace import Keyspace
from .vllm_plan import Block, Group, Layer, Load, Plan, Report, ValueLayout
from .vllm_rank.jobs import Copy, Loading, Staged, Store

__all__ = ["WorkerSide"]

log = logging.getLogger("simm.connectors.vllm")

_LOAD_THREADS: Final = 4
_SAVE_THREADS: Final = 2
_COPY_THREADS: Final = 2
#: Bytes of staging memory, unless the engine is told otherwise.
STAGING_BYTES: Final = 256 << 20
#: Values of a call that stores.
_BATCH: Final = 64
#: An idle step lasts so long, unless a load ends. Seconds.
IDLE_S: Final = 0.001
_FOREVER: Final = float("inf")


class WorkerSide:
    """Loads and stores blocks of a rank. vLLM's worker calls it in one thread; no method raises.

    Args:
        client, keyspace: the store.
        groups: vLLM's KV cache groups.
        layerwise: see above; with one group only.
        staging_bytes: of the staging memory.
        share: this rank's number and the number of ranks with the same blocks. Each stores a part of them.
        ends: vLLM calls :meth:`end`. It does not on some ranks, where :meth:`finished` ends a step.
    """

    def __init__(
        self, client: Client, keyspace: Keyspace, groups: Sequence[Group], *, layerwise: bool = False,
        staging_bytes: int = STAGING_BYTES, share: tuple[int, int] = (0, 1), ends: bool = True,
    ) -> None:  # fmt: skip
        self._client = client
        self._keyspace = keyspace
        self._groups = list(groups)
        self._layerwise = layerwise
        self._staging_bytes = staging_bytes
        self._share = share
        self._ends = ends
        self._complain = Complaints(log)
        #: Loads that have not ended, as far as is known, and those that this step waits for.
        self._loading: list[Loading] = []
        self._waited: list[Loading] = []
        #: Loads of the step's plan that are in no list yet.
        self._due: Sequence[Load] = ()
        self._loaders = Pool(_LOAD_THREADS, "simm-vllm-load")
        self._savers = Pool(_SAVE_THREADS, "simm-vllm-save")
        self._copiers = Pool(_COPY_THREADS, "simm-vllm-copy")
        self._identity = ""
        self._values: list[ValueLayout] = []
        self._group_of = {name: at for at, group in enumerate(self._groups) for name in group.layers}
        self._spans: list[Span] = []
        self._registered: list[Span] = []
        self._staging: Span | None = None
        self._row_bytes = self._rows = 0
        # What follows is guarded by the lock where threads use it too.
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad: set[int] = set()
        self._report = Report()
        self._counts: dict[str, float] = {}
        self._idle = Waiters(self._lock)
        #: Oldest first. Those that are over are taken out at the next step.
        self._stores: list[Store] = []
        # Of the step that runs.
        self._idle_step = False
        #: Layers that the engine has not waited for; None: no load of this step is waited for.
        self._unseen: set[str] | None = None
        self._step_failed = False
        self._failures = self._known_failures = 0
        self._saves: list[Staged] = []
        self._copied: set[str] = set()
        self._copies: list[Copy] = []
        #: The number of the last step's plan.
        self._number = 0
        #: Whether a step has begun and not ended, and what was being handled when the last one began.
        self._open = False
        self._handled: BaseException | None = None
        #: A step has failed: nothing is stored any more.
        self._broken = False
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Forget the lock's holder and what runs in threads: only the parent has them.

        The staging memory is a copy of the parent's. Nothing is stored of a step in which something was under way.
        """
        self._lock = threading.Lock()
        self._idle = Waiters(self._lock)
        self._step_failed = self._step_failed or self._unseen is not None or bool(self._copies)
        self._unseen, self._saves, self._copies, self._loading, self._waited = None, [], [], [], []
        self._due = ()
        self._free, self._stores = list(range(self._rows)), []

    def register(self, layers: Mapping[str, Layer], memory: Sequence[Span], identity: str) -> None:
        """Take the engine's memory. Raises UsageError if its blocks cannot be values."""
        values = [ValueLayout([(name, layers[name]) for name in group.layers]) for group in self._groups]
        self._row_bytes = max(value.size for value in values)
        self._rows = rows = max(1, self._staging_bytes // self._row_bytes)
        raw = np.empty(rows * self._row_bytes, np.uint8)
        staging = Span(int(raw.__array_interface__["data"][0]), raw.nbytes, keep=raw)
        self._spans = [self._known(span) for span in memory]
        self._staging = self._known(staging)
        self._free = list(range(rows))
        self._values, self._identity = values, identity

    def _known(self, span: Span) -> Span:
        """Return memory as RDMA devices know it, or as it is."""
        try:
            span = self._client.register(span)
            self._registered.append(span)
        except Exception as exc:  # its bytes still go, by copies
            log.info("memory is not registered: %s", exc)
        return span

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Begin a step: get ready for its saves."""
        if self._open or (plan.number and plan.number != self._number + plan.counts):
            self._break()
        self._open, self._handled = True, sys.exc_info()[1]
        self._number = plan.number or self._number
        if self._due:  # of a step that has failed before them: no thread does them
            self._note()
        self._due = plan.loads
        self._known_failures = plan.failures
        if self._failures != plan.failures or (self._broken and plan.saves):  # its report may have gone with a step
            with self._lock:
                self._report.failures, self._report.broken = self._failures, self._broken
        self._idle_step = plan.idle
        self._step_failed = False
        self._await_copies()
        self._unstage()  # of a step that has not ended
        self._copied = set()
        while self._stores and self._release(self._stores[0]):
            del self._stores[0]
        self._stage(plan)

    def load(self, plan: Plan) -> None:
        """Begin the step's loads."""
        self._due = plan.loads
        for loading in self._note():
            loading.job = self._loaders.hand_over(self._load_layers if self._layerwise else self._load, loading)
            if loading.job is None:  # closed, or no thread can be started
                self._end_left()

    def _note(self) -> list[Loading]:
        """Note the loads that are due: from here on each of them ends, even if no thread comes to do it."""
        layers = list(self._values[0].layers) if self._layerwise and self._due else []
        noted = [Loading(load, layers) for load in self._due]
        unseen = set(layers) if layers else self._unseen
        # No call in between: an interrupt loses none.
        self._loading += noted
        self._waited = noted
        self._unseen = unseen
        self._due = ()
        return noted

    def _stage(self, plan: Plan) -> None:
        """Take places in the staging memory for what this rank stores of a step."""
        own, ranks = self._share
        if not self._values or self._failures != self._known_failures or self._broken:
            return
        wanted = [
            (block, generation)
            for generation, blocks in plan.saves.items()
            for block in blocks
            if ranks == 1 or block.hash[-1] % ranks == own
        ]
        with self._lock:
            left = max(0, len(self._free) - len(wanted))
            rows = self._free[left:]
            staged = [Staged(*each, row) for each, row in zip(wanted, reversed(rows))]
            missing = len(wanted) - len(staged)
            # No call in between: an interrupt finds a row in one place.
            del self._free[left:]
            self._saves = staged
            self._count("blocks_dropped", missing)
        if missing:
            self._complain("staging", "%d blocks are not stored: the staging memory (staging_mb) is full", missing)

    def _unstage(self) -> None:
        """Give the step's places back, and forget its copies, which have ended."""
        rows = [each.row for each in self._saves]
        with self._lock:
            # No call in between: see above.
            self._free += rows
            self._saves = []
            self._copies = []
            self._idle.notify_all()

    def _count(self, name: str, number: float = 1) -> None:
        """Count. The lock is held."""
        if number:
            self._counts[name] = self._counts.get(name, 0) + number

    # -- loads ------------------------------------------------------------------------------------

    def _keys(self, blocks: Sequence[Block]) -> list[str]:
        return [connector_keys([block.hash], self._identity, group=block.group)[0] for block in blocks]

    def _span(self, address: int, size: int) -> Span:
        """Return a piece of the engine's memory, with its registration if it has one."""
        for each in self._spans:
            if each.address <= address and address + size <= each.address + each.size:
                return each.part(address - each.address, size)
        return Span(address, size)

    def _sink(self, pieces: Sequence[tuple[int, int, int]]) -> Ranges:
        end = max(offset + length for offset, length, _ in pieces)
        parts = [(offset, length, address, self._span(address, length)) for offset, length, address in pieces]
        return Ranges(parts, end, sum(length for _, length, _ in pieces))

    def _load(self, loading: Loading) -> None:
        """Read a request's blocks, all layers at once."""
        with self._lock:
            if not loading.begin():
                return
        load = loading.load
        bad, gone = list(load.blocks), []
        began = time.monotonic()
        try:
            if load.generation is not None and load.blocks:
                digests = self._keyspace.digests(load.generation, self._keys(load.blocks))
                sinks = [self._sink(self._values[block.group].whole(block.number)) for block in load.blocks]
                results = self._client.get_digests(digests, sinks)
                bad, wrong = [], {}
                gone = [block for block, got in zip(load.blocks, results) if got == NoValue.MISS]
                for block, digest, got in zip(load.blocks, digests, results):
                    length = got.length if type(got) is WrongSize else int(got)
                    if type(got) is WrongSize or length != self._values[block.group].size:
                        bad.append(block)
                        if length > 0:
                            wrong[digest] = length
                self._drop(wrong)
        except Exception as exc:
            self._complain("load", "a load failed, vLLM computes instead: %s", str(exc), trace=True)
            bad = list(load.blocks)
        finally:
            self._ended(loading, bad, began, gone)

    def _load_layers(self, loading: Loading) -> None:
        """Read a request's blocks layer by layer, and tell of each."""
        with self._lock:
            if not loading.begin():
                return
        load, todo, value = loading.load, loading.todo, self._values[0]
        good: dict[int, Block] = {}
        began = time.monotonic()
        try:
            if load.generation is not None and load.blocks:
                with self._client.pin(self._keyspace.names(load.generation, self._keys(load.blocks))) as pins:
                    lengths = pins.lengths
                    good = {at: each for at, each in enumerate(load.blocks) if lengths[at] == value.size}
                    wrong = {at: length for at, length in enumerate(lengths) if length not in (None, value.size)}
                    layers: list[str | None] = [None] if self._client.checksum else [*value.layers]
                    for layer in layers:
                        places = list(good)
                        parts = value.whole if layer is None else partial(value.of_layer, layer)
                        wants = [(at, self._sink(parts(good[at].number))) for at in places]
                        for at, got in zip(places, pins.read_wants(wants) if wants else ()):
                            if got is None:
                                del good[at]
                        if not good:
                            break
                        if layer not in (None, todo[-1]):
                            with self._lock:
                                del todo[0]
                                self._idle.notify_all()
                            if time.monotonic() - began > 2 * self._client.deadline_s:
                                good = {}
                                break
                    if wrong:
                        digests = self._keyspace.digests(load.generation, self._keys([load.blocks[at] for at in wrong]))
                        self._drop(dict(zip(digests, (length or 0 for length in wrong.values()))))
        except Exception as exc:
            self._complain("load", "a load failed, vLLM computes instead: %s", str(exc), trace=True)
            good = {}
        finally:
            # Before the last layer: a step that has all of them knows what failed.
            self._ended(loading, [block for at, block in enumerate(load.blocks) if at not in good], began)

    def _drop(self, wrong: Mapping[bytes, int]) -> None:
        """Delete values of another size than their keys promise, so that this engine's can be stored."""
        if wrong:
            self._complain("size", "%d blocks have another size than their keys promise: dropped", len(wrong))
            self._client.delete_sized(list(wrong), list(wrong.values()))

    def _ended(
        self, loading: Loading, bad: list[Block], began: float, gone: Sequence[Block] = (), *, left: bool = False
    ) -> None:
        """Note that a load has ended: nothing writes to its blocks any more. ``left``: if no thread ends it."""
        load, lost = loading.load, set(bad)
        size = sum(self._values[block.group].size for block in load.blocks if block not in lost) if self._values else 0
        with self._lock:
            if loading.over or (left and not loading.left()):
                return
            self._count("load_seconds", time.monotonic() - began)
            self._count("blocks_loaded", len(load.blocks) - len(bad))
            self._count("bytes_loaded", size)
            self._count("blocks_failed", len(bad))
            self._report.gone += [(block.group, block.hash) for block in gone]
            if not self._layerwise:  # else nobody asks for requests whose loads have ended, and has them forgotten
                self._loaded.add(load.request)
                if bad:
                    self._failed.add(load.request)
            if bad:
                self._bad.update(block.number for block in bad)
                self._report.failed.add(load.request)
                self._step_failed = self._step_failed or self._layerwise
            loading.over = True
            self._idle.notify_all()

    def _end_left(self) -> None:
        """Note the failure of loads that no thread ends."""
        with self._lock:
            left = [each for each in self._loading if each.left()]
        for each in left:
            self._ended(each, list(each.load.blocks), time.monotonic(), left=True)
        self._loading = [each for each in self._loading if not each.over]

    def wait_layer(self, name: str) -> None:
        """Wait until a layer of the step's loads is there. Each ends within its calls' deadlines."""
        if self._unseen is not None:
            self._unseen.discard(name)
            self._idle.wait_for(
                lambda: not [each for each in self._waited if name in each.todo and not (each.over or each.left())],
                _FOREVER,
            )
            self._end_left()

    # -- saves ------------------------------------------------------------------------------------

    def save_layer(self, name: str) -> None:
        """Begin to copy a layer's new blocks, which the engine has computed, to the staging memory."""
        group = self._group_of.get(name)
        if group is None or name in self._copied or not self._saves:
            return
        mine = [each for each in self._saves if each.block.group == group]
        if mine:
            copy = Copy()
            self._copies.append(copy)  # an interrupt from here on leaves one that has failed
            self._copied.add(name)
            copy.job = self._copiers.hand_over(self._copy_all, copy, name, mine)

    def _copy_all(self, copy: Copy, name: str, staged: Sequence[Staged]) -> None:
        """Copy blocks, and tell of the end. Runs in a thread."""
        with self._lock:
            if not copy.begin():
                return
        failed = True
        try:
            self._copy(name, staged)
            failed = False
        finally:
            with self._lock:
                copy.failed, copy.over = failed, True
                self._idle.notify_all()

    def _await_copies(self) -> None:
        """Wait until no thread copies, or will."""

        def over() -> bool:
            for each in self._copies:
                each.over = each.over or each.left()
            return not [each for each in self._copies if not each.over]

        if self._copies:
            self._idle.wait_for(over, _FOREVER)

    def _copy(self, name: str, staged: Sequence[Staged]) -> None:
        assert self._staging is not None
        for each in staged:
            row = self._staging.address + each.row * self._row_bytes
            for offset, length, address in self._values[each.block.group].of_layer(name, each.block.number):
                ctypes.memmove(row + offset, address, length)

    def end(self) -> None:
        """End a step: its loads are done if it waits for them, and its blocks may be overwritten."""
        if self._raised():
            self._break()
        if self._unseen is not None:
            unseen = set(self._unseen)
            for name in self._values[0].layers if self._values else ():
                self.wait_layer(name)
            self._unseen, self._waited = None, []
            if unseen and not self._broken:
                self._step_failed = True
                self._complain("layers", "vLLM ran without waiting for the layers %s: nothing of this step is stored",
                               sorted(unseen)[:3])  # fmt: skip
        for group in {each.block.group for each in self._saves} if not self._broken else ():
            for name in self._groups[group].layers:  # those that vLLM does not name
                self.save_layer(name)
        self._await_copies()
        failed = self._broken or self._step_failed or any(each.failed for each in self._copies)
        if self._step_failed:
            self._failures += 1
            with self._lock:
                self._report.failures = self._failures
        self._open = False  # not before: the failure of a step whose end is interrupted is not counted
        if failed:
            self._unstage()
            return
        stores = [Store(self._saves[at : at + _BATCH]) for at in range(0, len(self._saves), _BATCH)]
        # No call in between: see _stage.
        self._stores += stores
        self._saves = []
        self._copies = []
        for store in stores:
            store.job = self._savers.hand_over(self._save, store)
            if store.job is None:
                count = len(store.staged)
                self._complain("put", "%d blocks were not stored: closed, or no thread can be started", count)
                with self._lock:
                    self._count("blocks_not_stored", count)
                self._release(store)

    def _raised(self) -> bool:
        """Return whether the step has raised, and vLLM calls in a ``finally``.

        What its callers have been handling since the step began says nothing of it.
        """
        error = sys.exc_info()[1]
        return error is not None and error is not self._handled

    def _break(self) -> None:
        """Store nothing any more: what is computed from now on may be on blocks that were not."""
        if not self._broken:
            self._broken = True
            with self._lock:
                self._report.broken = True
            self._complain("broken", "a step of the model has failed: this engine stores nothing until it is restarted")

    def _release(self, store: Store, *, ended: bool = False) -> bool:
        """Give a store's places back if it has ``ended``, or no thread ends it; return whether it is over."""
        rows = [each.row for each in store.staged]
        with self._lock:
            if (ended and not store.over) or store.left():
                # No call in between: see _stage.
                self._free += rows
                store.over = True
                self._idle.notify_all()
            return store.over

    def _save(self, store: Store) -> None:
        """Store what was staged. Runs in a thread."""
        with self._lock:
            if not store.begin():
                return
        staged = store.staged
        began = time.monotonic()
        try:
            assert self._staging is not None
            digests = [
                self._keyspace.digests(each.generation, self._keys([each.block]))[0] for each in staged
            ]  # fmt: skip
            sizes = [self._values[each.block.group].size for each in staged]
            sources = [self._staging.part(each.row * self._row_bytes, size) for each, size in zip(staged, sizes)]
            statuses = self._client.put_digests(digests, sources, True)
            good = [at for at, status in enumerate(statuses) if status == Status.OK]
            with self._lock:
                self._count("save_seconds", time.monotonic() - began)
                self._count("blocks_stored", len(good))
                self._count("bytes_stored", sum(sizes[at] for at in good))
                self._count("blocks_not_stored", len(staged) - len(good))
                self._report.stored += [(staged[at].block.group, staged[at].block.hash) for at in good]
            if len(good) < len(staged):
                first = next(status for status in statuses if status != Status.OK)
                self._complain("put", "%d blocks were not stored: %s", len(staged) - len(good), STATUS_NAMES[first])
        except Exception as exc:
            self._complain("put", "blocks were not stored: %s", str(exc), trace=True)
            with self._lock:
                self._count("blocks_not_stored", len(staged))
        finally:
            self._release(store, ended=True)

    # -- what vLLM asks -----------------------------------------------------------------------------

    def finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that have failed.

        An idle step waits for one, ``IDLE_S`` at most. An engine whose core is in its caller's process else makes the
        next step at once, and so keeps the interpreter from the threads that look up and load.

        A step that has raised is told nothing, here and below: vLLM loses it.
        """
        if self._open and not self._ends:
            self.end()
        if self._raised():
            return set(), set()
        if self._loading:
            self._end_left()
        if self._idle_step:
            self._idle.wait_for(lambda: bool(self._loaded), time.monotonic() + IDLE_S)
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed = self._failed & loaded
            self._failed -= failed
        return loaded, failed

    def bad_blocks(self) -> set[int]:
        """Return the blocks that were not loaded, since the last call."""
        if self._raised():
            return set()
        with self._lock:
            bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> Report | None:
        """Return what the scheduler is to know, None for nothing."""
        if self._raised():
            return None
        with self._lock:
            report, self._report = self._report, Report()
        return report or None

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        if self._raised():
            return {}
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def wait_saved(self, timeout_s: float) -> bool:
        """Wait until all that was to be stored is, or has failed; return whether it is so."""
        until = time.monotonic() + timeout_s
        return self._idle.wait_for(lambda: all(each.over or each.left() for each in self._stores), until)

    def close(self) -> None:
        """End the threads: loads and saves that run have ended then."""
        for pool in (self._loaders, self._copiers, self._savers):
            pool.shutdown(wait=True, cancel_futures=False)
        for span in self._registered:
            with self._complain.ending("a registration"):
                self._client.deregister(span)
        self._registered = []
