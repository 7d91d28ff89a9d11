"""SiMM as a secondary tier of vLLM's KV offloading, for ``TieringOffloadingSpec``.

``simm engine vllm`` prints the flag. vLLM keeps offloaded chunks in a primary tier in host memory, passes on what comes
there to :class:`SimmTier`, and asks it for what is not there. All methods run in vLLM's scheduler and return at once.
Jobs run in threads here; lookups run in a thread of vLLM's own ``AsyncLookupManager``, a batch for each step.

Who reads whose chunks
----------------------
The identity of a chunk is what vLLM's own file tier keeps apart (model, data type, tokens of a block, groups of layers,
parallel sizes and rank), the model's revision, all settings that decide what a chunk holds (``vllm_facts.py``), the
bytes of a chunk, ``weight_version`` and ``salt``. Where vLLM says that chunks are the same at any TP width, they are
shared by all widths. A chunk's key has this identity, the group and vLLM's block hash.

vLLM does not tell a tier its configuration: it is found at the caller, vLLM's offloading connector. A tier that
something else has made does without revision and settings, and says so.

vLLM's reset of its caches, as after an update of the weights, waits for this tier's jobs (``drain_jobs``) but leaves
what is stored. Here it begins a new generation (``keyspace.py``), so that nothing of the old weights comes back. vLLM
then offers the chunks of requests that still run once more, from the first one on. They may be of the old weights, so
nothing is stored for a request that began before the reset.

Failures
--------
No method raises: a failure is a miss, or a job without success, and is logged once in ten seconds. So is a lookup that
takes longer than the deadline. vLLM recomputes the chunks whose load failed. Only the constructor raises, for settings
that cannot work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..client import Client, NoValue
from ..constants import VALUE_BYTES_MAX
from ..errors import UsageError
from ..host import fork
from ..host.buffers import Span
from ..host.threads import Pool, Waiters
from ..schemes.scheme import Scheme
from ..schemes.vllm import tier_keys
from ..wire.status import STATUS_NAMES, Status
from . import vllm_facts
from .complaints import Complaints
from .keyspace import NOT_FLUSHED, Keyspace, connect, identity, options_of, threads_of
from .registration.callers import local_values
from .registration.of_vllm import Groups, hashing_of, names_of, window_of
from .registration.registrar import Registrar, under_names

__all__ = ["SimmTier"]

log = logging.getLogger("simm.connectors.vllm")

_THREADS: Final = 4
_OPTIONS: Final = ("manager_address", "namespace", "deadline_ms", "weight_version", "salt")


class _Lookups(AsyncLookupManager):  # type: ignore[misc, unused-ignore]
    """Asks SiMM which chunks are stored, in vLLM's thread for that."""

    def __init__(self, tier: SimmTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Return for each chunk whether it is stored.

        Also for a request that waits no longer: all requests that have asked for a chunk since share this answer.
        """
        return self._tier.stored(keys)


class _Job:
    """A job that has no result yet. The tier's lock guards ``begun``."""

    __slots__ = ("begun", "gone", "handle", "keys", "load", "number")

    def __init__(self, number: int, keys: list[Any], load: bool) -> None:
        self.number, self.keys, self.load = number, keys, load
        self.begun = False
        #: Those of a load's chunks that are not stored.
        self.gone: list[Any] = []
        #: None: no thread has taken it yet.
        self.handle: Future[None] | None = None

    def over(self) -> bool:
        """Return whether its thread has ended: without its call, or in the middle, where there is no memory."""
        return self.handle is not None and self.handle.done()


class SimmTier(SecondaryTierManager):  # type: ignore[misc, unused-ignore]
    """Keeps vLLM's offloaded chunks in SiMM.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: as vLLM passes them.
        enable_kv_events: report chunks that are stored, and those that are found gone, as vLLM's KV events.
        locality: ``LOCAL`` or ``REMOTE``, for these events.
        threads: how many jobs run at the same time, 1 to 64.
        client: for tests, and for programs that have one. Otherwise a client is made, and closed by :meth:`shutdown`.
        options: ``manager_address`` (``"host:port"``, several separated by commas; default SIMM_MANAGER),
            ``namespace`` (default SIMM_NAMESPACE), ``deadline_ms``, ``weight_version``, ``salt``.

    Raises RuntimeError with a sentence for a wrong setting, or if the managers refuse this client.
    """

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
        enable_kv_events: bool = False, locality: str | None = None, threads: int = _THREADS,
        client: Client | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        unknown = sorted(set(options) - set(_OPTIONS))
        size = self.block_size_bytes
        if unknown:
            raise RuntimeError(f"SiMM: there are no options {unknown}; there are {', '.join(_OPTIONS)}")
        if not 0 < size <= VALUE_BYTES_MAX:
            raise RuntimeError(
                f"SiMM: a chunk has {size} bytes, a value {VALUE_BYTES_MAX} at most: make block_size smaller"
            )
        if type(enable_kv_events) is not bool:
            raise RuntimeError(f"SiMM: enable_kv_events is true or false, not {enable_kv_events!r}")
        threads = threads_of(threads)
        try:
            self.locality = Locality(locality) if locality is not None else None
        except ValueError:
            named = " or ".join(each.value for each in Locality)
            raise RuntimeError(f"SiMM: locality is {named}, not {locality!r}") from None
        self._complain = Complaints(log)
        #: What a tier is not told: vLLM's configuration, and that of its KV cache.
        self._engine = local_values(("vllm_config", "kv_cache_config"))
        self._owns = client is None
        self._client = client or connect(str(options.get("manager_address", "")), **options_of(options))
        mapper = FileMapper.from_offloading_spec(
            root_dir="", offloading_spec=offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )  # fmt: skip
        facts = {
            **mapper.fields, "rank": mapper.rank, "chunk_bytes": size, "salt": options.get("salt", ""),
            "weight_version": options.get("weight_version", ""),
            # vLLM's own names have it for its canonical layout only. The workers' blocks as they are differ by it, too.
            "kv_cache_layout": getattr(offloading_spec.config, "kv_cache_layout", None),
            **_settings_of(self._engine),
        }  # fmt: skip
        self._keyspace = Keyspace(self._client, f"vllm/{identity(facts)}")
        self._registrar = Registrar(self._client, self._complain)
        self._spec = offloading_spec
        # Not kept: vLLM releases the view, which nothing may refer to then. Jobs end before.
        memory = np.asarray(primary_kv_view)
        self._span = Span(memory.__array_interface__["data"][0], memory.shape[0] * size)
        try:
            self._span = self._client.register(self._span)
        except Exception as exc:  # its chunks still go, by copies
            log.info("vLLM's memory is not registered: %s", str(exc))
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._done: list[tuple[JobResult, OffloadingEvent | None, Collection[Any]]] = []
        self._running: set[_Job] = set()
        self._lock = threading.Lock()
        self._changed = Waiters(self._lock)
        self._threads = Pool(threads, "simm-vllm")
        self._lookups = _Lookups(self, tier_type)
        #: Requests that have not ended, and those of them that began before the last reset. One thread has both.
        self._requests: set[str] = set()
        self._stale: set[str] = set()
        #: When those that wait are late, monotonic seconds, and which of them have asked in this step.
        self._late_at: dict[str, float] = {}
        self._asking: set[str] = set()
        fork.in_child(self._after_fork)
        log.info("SiMM's tier for vLLM: scope %s of %s", self._keyspace.scope, facts)

    def _after_fork(self) -> None:
        """Forget the lock's holder and the jobs that run: only the parent has the threads."""
        self._lock = threading.Lock()
        self._changed = Waiters(self._lock)
        self._running = set()

    # -- lookups ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return that new chunks of a request are offloaded, and no others."""
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether a chunk is stored; RETRY until the step's batch was looked up, for a deadline at most."""
        found = self._lookups.lookup(key, req_context)
        if found is not None:
            return LookupResult.HIT if found else LookupResult.MISS
        number, now = req_context.req_id, time.monotonic()
        self._asking.add(number)
        if now < self._late_at.setdefault(number, now + self._client.deadline_s):
            return LookupResult.RETRY
        self._complain("late", "a lookup took longer than %.1f s: a miss", self._client.deadline_s)
        return LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Look up what the step asked for."""
        self._lookups.flush()
        if self._late_at:  # who asks no more has its answers
            self._late_at = {number: at for number, at in self._late_at.items() if number in self._asking}
            self._asking.clear()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request and its lookups."""
        self._requests.discard(req_context.req_id)
        self._stale.discard(req_context.req_id)
        self._late_at.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def stored(self, keys: Sequence[Any]) -> list[bool]:
        """Return for each chunk whether it is stored."""
        try:
            digests = self._digests(keys)
            return self._client.exists_digests(digests) if digests else [False] * len(keys)
        except Exception as exc:
            self._complain("lookup", "lookup failed, vLLM goes on without it: %s", str(exc), trace=True)
            return [False] * len(keys)

    def _digests(self, keys: Sequence[Any]) -> list[bytes]:
        """Return the digests of chunks; none at all if the generation is not known, as nothing can be found then."""
        generation = self._keyspace.generation() if keys else None
        if generation is None:
            return []
        self._registrar.tell(generation, lambda: self._schemes(generation))
        names = [tier_keys([get_offload_block_hash(key)], group=get_offload_group_idx(key))[0] for key in keys]
        return self._keyspace.digests(generation, names)

    def _schemes(self, generation: str) -> list[Scheme]:
        """Return how keys are made, for routers. Raises UsageError where that is not known."""
        if self._engine is None:
            raise UsageError("the tier was made by something else than vLLM's offloading connector")
        vllm_config, kv_cache_config = self._engine
        config, listed = self._spec.config, []
        for group in config.groups:
            tokens = group.tokens_per_block * self._spec.blocks_per_chunk
            window = window_of(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec)
            # vLLM rounds a window up to chunks.
            listed.append((group.group_id, tokens, -(-window // tokens) * tokens + 1 if window else 0))
        groups = Groups(listed, config.cache.tokens_per_hash)
        options = {
            **hashing_of(vllm_config).options, **groups.options, "scope": self._keyspace.scope,
            "generation": generation,
        }  # fmt: skip
        names = names_of(vllm_config)
        return under_names(Scheme("any", "vllm-tier", groups.page, options=options), names)

    # -- jobs -------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks of the primary tier; those of a request that began before a reset are not stored."""
        stale = job_metadata.req_context.req_id in self._stale
        self._submit(job_metadata, self._leave if stale else self._store)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read chunks into the primary tier."""
        self._submit(job_metadata, self._load)

    def _submit(self, job: Any, act: Callable[[_Job, list[Span]], list[bool]]) -> None:
        """Run a job in a thread, and note its result."""
        keys, size = list(job.keys), self.block_size_bytes
        spans = [self._span.part(int(row) * size, size) for row in job.chunk_ids]
        load = bool(job.is_promotion)
        own = _Job(job.job_id, keys, load)

        def run() -> None:
            began = time.monotonic()
            good = [False] * len(keys)
            with self._lock:
                if own not in self._running:  # taken back
                    return
                own.begun = True
            try:
                good = act(own, spans)
            except Exception as exc:
                what = "load" if load else "store"
                self._complain(what, "%s failed, vLLM goes on without it: %s", what, str(exc), trace=True)
            self._finish(own, good, time.monotonic() - began)

        try:
            self._running.add(own)
            own.handle = self._threads.hand_over(run)
        except BaseException:  # who has interrupted it expects no result, and drain_jobs waits for those that run
            with self._lock:
                if not own.begun:
                    self._running.discard(own)
            raise
        if own.handle is None:  # shut down, or no thread can be started
            self._finish(own, [False] * len(keys), 0.0)

    def _finish(self, job: _Job, good: list[bool], seconds: float) -> None:
        """Note a job's result, unless it has one."""
        load = job.load
        done = [key for key, ok in zip(job.keys, good) if ok]
        failed = [key for key, ok in zip(job.keys, good) if not ok]
        result = JobResult(
            job.number, not failed, successful_keys=tuple(done) if load and failed and done else None,
            transfer_time=seconds, transfer_bytes=len(done) * self.block_size_bytes,
        )  # fmt: skip
        about = job.gone if load else done
        event = OffloadingEvent(keys=about, medium=self.medium, removed=load, locality=self.locality) if about else None
        with self._lock:
            if job in self._running:
                self._done.append((result, event, failed if load else ()))
                self._running.discard(job)
            self._changed.notify_all()

    def _finish_left(self) -> None:
        """Note the failure of jobs whose threads have ended without a result."""
        for job in list(self._running):
            if job.over():
                self._finish(job, [False] * len(job.keys), 0.0)

    def _store(self, job: _Job, spans: list[Span]) -> list[bool]:
        """Store the chunks that are not stored; return which are now."""
        digests = self._digests(job.keys)
        if not digests:
            return [False] * len(job.keys)
        statuses = self._client.put_digests(digests, spans, True)
        failed = [status for status in statuses if status != Status.OK]
        if failed:
            self._complain("put", "%d chunks were not stored: %s", len(failed), STATUS_NAMES[failed[0]])
        return [status == Status.OK for status in statuses]

    def _leave(self, job: _Job, spans: list[Span]) -> list[bool]:
        """Store nothing."""
        return [False] * len(job.keys)

    def _load(self, job: _Job, spans: list[Span]) -> list[bool]:
        """Copy chunks to their rows; return which came whole. Those of servers that are away are not gone."""
        digests = self._digests(job.keys)
        if not digests:
            return [False] * len(job.keys)
        for span in spans:
            span.least = span.size
        results = self._client.get_digests(digests, spans)
        job.gone = [key for key, got in zip(job.keys, results) if got == NoValue.MISS]
        return [got == self.block_size_bytes for got in results]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of jobs that have ended since the last call."""
        self._finish_left()
        done = list(self._done)
        count = len(done)
        for _, _, failed in done:
            if failed:
                self._lookups.mark_miss(failed)
        results = [result for result, _, _ in done]
        events = [event for _, event, _ in done if event is not None]
        # No call from here on: what an interrupt keeps from the caller comes with the next call, and only once.
        if self._events is not None:
            self._events += events
        del self._done[:count]  # threads only append
        return results

    def has_pending_work(self) -> bool:
        """Return whether jobs have not been reported yet."""
        with self._lock:
            return bool(self._running or self._done)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which chunks were stored, and which were found gone, since the last call."""
        events, self._events = self._events, [] if self._events is not None else None
        return events or ()

    def drain_jobs(self) -> None:
        """Wait for all jobs, and make what is stored unreadable: vLLM resets its caches."""
        self._changed.wait_for(lambda: all(job.over() for job in self._running), float("inf"))
        self._finish_left()
        self._stale |= self._requests
        try:
            if not self._keyspace.flush_until_seen():
                log.warning("the reset has not reached other engines: %s", NOT_FLUSHED)
        except Exception as exc:
            self._complain("reset", "reset failed: %s", str(exc), trace=True)

    def shutdown(self) -> None:
        """End the jobs, close the connection."""
        self._lookups.shutdown()
        self._keyspace.close()
        self._threads.shutdown(wait=True, cancel_futures=False)
        with self._complain.ending("a registration"):
            self._client.deregister(self._span)
        self._registrar.close()
        if self._owns:
            with self._complain.ending("a client"):
                self._client.close()


def _settings_of(engine: Sequence[Any] | None) -> dict[str, Any]:
    """Return what vLLM's configuration adds to a chunk's identity; nothing, and a warning, where it is not known."""
    try:
        if engine is not None:
            return {"revision": engine[0].model_config.revision, **vllm_facts.of_memory(engine[0])}
        why = "the tier was made by something else than vLLM's offloading connector"
    except AttributeError as exc:  # of another vLLM, or of a program that has given these names to something else
        why = str(exc)
    log.warning(
        "vLLM's configuration is not known (%s): engines that differ in the model's revision, its quantization or its "
        "overrides need a weight_version or a salt each, else they read each other's chunks", why,
    )  # fmt: skip
    return {}
