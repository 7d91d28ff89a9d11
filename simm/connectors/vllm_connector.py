"""SiMM as a KV connector of vLLM, for ``--kv-transfer-config '{"kv_connector": "SimmConnector", ...}'``.

``simm engine vllm-connector`` prints the flag. vLLM makes one connector in its scheduler, which looks for prompts and
decides what goes where (``vllm_scheduler.py``), and one in each worker, which moves the blocks (``vllm_worker.py``).
The connector works on KV caches in host memory, as vLLM has them on a CPU. For a GPU there is the tier of ``vllm.py``.

Who reads whose blocks
----------------------
A block's key has vLLM's hash of its tokens, which covers adapter, images and ``cache_salt``; the group of layers; and
the *identity* of what the rank has: model, data types, layers, the form of the memory, parallel sizes and rank. The
workers tell the scheduler their identities. Ranks of a model with latent attention (MLA) have the same blocks, and one
identity. The scope is the model as a whole, with ``weight_version`` and ``salt``; a reset begins a new generation of it
(``keyspace.py``).

Failures
--------
No method raises: a failure is a miss, or a block that is not stored, and is logged once in ten seconds. Blocks that
were not loaded are named to vLLM, which computes them. Only the constructor raises, for settings that cannot work.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..client import Client
from ..errors import UsageError
from ..host.buffers import Span
from ..schemes.scheme import Scheme
from . import vllm_facts
from .complaints import Complaints
from .keyspace import Keyspace, connect, identity, options_of
from .registration.of_vllm import KINDS, Groups, adapters, hashing_of, names_of
from .registration.registrar import Registrar, under_names
from .vllm_plan import Group, Layer, Plan, Report, block_layout, tainted
from .vllm_scheduler import SchedulerSide
from .vllm_worker import STAGING_BYTES, WorkerSide

__all__ = ["SimmConnector"]

log = logging.getLogger("simm.connectors.vllm")

#: Raised when a block's form changes.
_FORM: Final = 1
_OPTIONS: Final = (
    "manager_address", "namespace", "deadline_ms", "model", "weight_version", "salt", "layerwise", "staging_mb",
)  # fmt: skip
#: Adapters whose paths are registered.
_ADAPTERS_MAX: Final = 64
#: Those whose blocks all tensor-parallel ranks have alike.
_ALIKE: Final = frozenset(("mla_attention", "sliding_window_mla"))
#: What is counted, with what a Prometheus metric says of it.
_COUNTS: Final[Mapping[str, str]] = {
    "lookups": "Lookups of prompts in SiMM.",
    "lookups_late": "Lookups that took longer than the deadline: misses.",
    "tokens_found": "Tokens that were found in SiMM.",
    "blocks_loaded": "Blocks read from SiMM.",
    "bytes_loaded": "Bytes read from SiMM.",
    "blocks_failed": "Blocks that were found but not read: vLLM computes them.",
    "load_seconds": "Time of loads, added up.",
    "blocks_stored": "Blocks stored in SiMM.",
    "bytes_stored": "Bytes stored in SiMM.",
    "blocks_not_stored": "Blocks that SiMM did not take.",
    "blocks_dropped": "Blocks that were not stored as the staging memory was full.",
    "save_seconds": "Time of puts, added up.",
}


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """What the scheduler tells the workers of a step."""

    plan: Plan = field(default_factory=Plan)


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """What the workers tell the scheduler of a step."""

    report: Report

    def aggregate(self, other: Any) -> _WorkerMetadata:
        """Return this with what another worker tells."""
        return _WorkerMetadata(self.report.add(other.report))


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc, unused-ignore]
    """What a worker tells the scheduler of its memory."""

    identity: str


class SimmStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """What a connector has counted."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data

    def aggregate(self, other: Any) -> SimmStats:
        """Add what another connector has counted."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums, for vLLM's log."""
        return {f"SiMM {name}": round(number, 3) for name, number in self.data.items()}


class SimmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """The counters among vLLM's metrics: ``vllm:simm_<name>_total``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:simm_{name}_total", documentation=text, labelnames=labelnames)
            for name, text in _COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, number in (transfer_stats_data or {}).items():
            if name in self._counters and number > 0:
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(number)


class SimmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """Keeps vLLM's KV cache blocks in SiMM.

    Args:
        vllm_config, role, kv_cache_config: as vLLM passes them. Of ``kv_connector_extra_config``:
            ``manager_address`` (``"host:port"``, several separated by commas; default SIMM_MANAGER), ``namespace``
            (default SIMM_NAMESPACE), ``deadline_ms``, ``model`` (stands for the model's name and revision in keys),
            ``weight_version``, ``salt``, ``layerwise`` (true: a request runs while it loads), ``staging_mb``
            (memory for blocks on their way to the store, MiB).
        client: for tests, and for programs that have one. Otherwise a client is made, and closed by :meth:`shutdown`.

    Raises RuntimeError with a sentence for a wrong setting, or if the managers refuse this client.
    """

    def __init__(
        self, vllm_config: Any, role: Any, kv_cache_config: Any = None, *, client: Client | None = None
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = dict(transfer.kv_connector_extra_config or {})
        unknown = sorted(map(str, set(options) - set(_OPTIONS)))
        if unknown:
            raise RuntimeError(f"SiMM: there are no options {unknown}; there are {', '.join(_OPTIONS)}")
        if transfer.kv_load_failure_policy != "recompute":
            raise RuntimeError('SiMM: add "kv_load_failure_policy": "recompute" to --kv-transfer-config: else vLLM '
                               "fails requests whose blocks were evicted")  # fmt: skip
        self._groups, kinds = _groups_of(kv_cache_config)
        self._kinds = kinds
        parallel = vllm_config.parallel_config
        self._layerwise = _wanted_layerwise(options.get("layerwise", False), len(self._groups), vllm_config)
        self._facts = _facts_of(vllm_config, options)
        self._memory_facts = {
            **vllm_facts.of_memory(vllm_config), "kinds": kinds, "groups": [tuple(each) for each in self._groups],
        }  # fmt: skip
        self._alike = all(kind in _ALIKE for kind in kinds)
        staging_bytes = _staging_of(options.get("staging_mb"))
        self._owns = client is None
        self._complain = Complaints(log)
        self._client = client or connect(str(options.get("manager_address", "")), **options_of(options))
        self._keyspace = Keyspace(self._client, f"vllm-connector/{identity(self._facts)}")
        self._registrar = Registrar(self._client, self._complain)
        #: Adapters that requests had: where each is. Replaced with each one that is added, as any thread may read it.
        self._adapters: dict[str, str] = {}
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._identity = ""
        if role == KVConnectorRole.SCHEDULER:
            align, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            self._hash_tokens = hash_tokens
            self._scheduler = SchedulerSide(
                self._client, self._keyspace, self._groups, hash_tokens, align, layerwise=self._layerwise,
                loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer, events=_wants_events(vllm_config),
                extras=_extras_of, tell=self._tell,
            )  # fmt: skip
            log.info("SiMM's connector for vLLM: scope %s of %s", self._keyspace.scope, self._facts)
            return
        rank, ranks = get_tp_group().rank_in_group, parallel.tensor_parallel_size
        stage, stages = get_pp_group().rank_in_group, parallel.pipeline_parallel_size
        self._memory_facts |= {"pp_rank": stage, "pp_size": stages}
        if not self._alike:
            self._memory_facts |= {"tp_rank": rank, "tp_size": ranks}
        self._worker = WorkerSide(
            self._client, self._keyspace, self._groups, layerwise=self._layerwise, staging_bytes=staging_bytes,
            share=(rank, ranks) if self._alike else (0, 1),
            # vLLM waits for the saves of a model that speculates when its draft has run, on the last stage alone.
            ends=vllm_config.speculative_config is None or stage == stages - 1,
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether what is stored must reach someone: no, it is a cache."""
        return False

    # -- in a worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the memory of the KV caches. Raises RuntimeError for one in another memory than the host's."""
        assert self._worker is not None
        blocks = self._kv_cache_config.num_blocks
        layers = {}
        forms: dict[str, Any] = {}
        storages: dict[int, int] = {}
        try:
            for group in self._groups:
                for name in group.layers:
                    cache = kv_caches[name]
                    if cache.device.type != "cpu":
                        raise UsageError(
                            f"its KV cache is in the memory of {cache.device}, and SimmConnector works on the host's: "
                            "use SimmTier, whose flags `simm engine vllm` prints"
                        )
                    layout = block_layout(tuple(cache.shape), cache.stride(), cache.element_size(), blocks)
                    layers[name] = Layer(int(cache.data_ptr()), layout)
                    # Of tokens before heads and heads before tokens the pieces are the same: the strides tell.
                    forms[name] = (
                        str(cache.dtype), tuple(cache.shape[1:]), tuple(cache.stride())[1:], layout.pieces,
                        *vllm_facts.of_kernels(self._vllm_config, name),
                    )  # fmt: skip
                    storage = cache.untyped_storage()
                    storages[int(storage.data_ptr())] = int(storage.nbytes())
            facts = {**self._memory_facts, "forms": forms}
            self._identity = identity(facts)
            self._worker.register(layers, [Span(*each) for each in storages.items()], self._identity)
        except (UsageError, KeyError) as exc:
            raise RuntimeError(f"SiMM cannot store the blocks of this engine: {exc}") from exc
        log.info("blocks are stored as %s: %s", self._identity, facts)

    def get_handshake_metadata(self) -> Any:
        """Return what the scheduler has to know of this worker's memory."""
        return _Handshake(self._identity) if self._identity else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is loaded."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Begin to store a layer."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the step."""
        if self._worker is not None:
            self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended."""
        loaded, failed = self._worker.finished() if self._worker is not None else (set[str](), set[str]())
        # With several groups vLLM takes no blocks that failed, but whole requests.
        return KVConnectorTransferResults(
            finished_recving=loaded, failed_recving=failed if len(self._groups) > 1 else set()
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        bad = self._worker.bad_blocks() if self._worker is not None else set()
        return bad if len(self._groups) == 1 else set()

    def build_connector_worker_meta(self) -> Any:
        """Return what the scheduler has to know of the step."""
        report = self._worker.take_report() if self._worker is not None else None
        return _WorkerMetadata(report) if report is not None else None

    def get_kv_connector_stats(self) -> Any:
        """Return what was counted since the last call."""
        counts: dict[str, float] = {}
        for side in (self._worker, self._scheduler):
            if side is not None:
                counts |= side.take_counts()
        return SimmStats(data=counts) if counts else None

    # -- in the scheduler -------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Take what the workers say of their memory."""
        if self._scheduler is not None:
            self._scheduler.use([each.identity for _, each in sorted(metadata.items())])

    def _tell(self, generation: str) -> None:
        """Register how keys are made, for routers."""
        assert self._scheduler is not None
        told = generation, tuple(self._scheduler.identities), tuple(self._adapters.items())
        self._registrar.tell(told, lambda: self._schemes(*told))

    def _schemes(
        self, generation: str, identities: Sequence[str], paths: Sequence[tuple[str, str]]
    ) -> list[Scheme]:  # fmt: skip
        """Return how keys are made, by each name of the model. Raises UsageError where nobody else can make them."""
        config = self._vllm_config
        listed = [(at, group.block_tokens, group.window) for at, group in enumerate(self._groups)]
        groups = Groups(listed, self._hash_tokens)
        options = {
            **hashing_of(config).options, **groups.options, "scope": self._keyspace.scope, "generation": generation,
            "identities": ",".join(identities), **adapters(dict(paths)),
        }  # fmt: skip
        names = names_of(config, self._facts["model"])
        scheme = Scheme("any", "vllm-blocks", groups.page, len(identities), options=options)
        return under_names(scheme, names)

    def on_new_request(self, request: Any) -> None:
        """Begin with a request."""
        if self._scheduler is not None:
            self._scheduler.added(request)
            lora = getattr(request, "lora_request", None)
            if lora is not None and (lora.lora_name in self._adapters or len(self._adapters) < _ADAPTERS_MAX):
                self._adapters = {**self._adapters, str(lora.lora_name): str(lora.lora_path)}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those computed; None until that is known."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return how many of a request's tokens come out of this host's memory, and how many from elsewhere."""
        here = self._scheduler.found_here(request, num_external_tokens) if self._scheduler is not None else 0
        found = {CacheHitSource.HOST: here, CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens - here}
        return {source: tokens for source, tokens in found.items() if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks into which a request's tokens go."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return what the workers do in a step."""
        return _Metadata(self._scheduler.plan(scheduler_output) if self._scheduler is not None else Plan())

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers say."""
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is None or not isinstance(told, _WorkerMetadata):
            return
        self._scheduler.heard(told.report)
        if self._layerwise and told.report.failed:
            self._forget(self._scheduler.running(), set(connector_output.invalid_block_ids or ()))

    def _forget(self, requests: Iterable[str], bad: set[int]) -> None:
        """Take blocks out of vLLM's own cache that were not loaded, and those that were computed on them.

        vLLM computes them again, but leaves them in its cache meanwhile, where another request might find them.
        """
        try:
            manager = self._kv_cache_manager
            tables = [manager.get_block_ids(number)[0] for number in requests]
            manager.evict_blocks(tainted(tables, bad))
        except Exception:
            log.exception("blocks that were not loaded may be in vLLM's cache")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks are free: what is stored of them was copied."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """:meth:`request_finished` of a model with several groups."""
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[Any]:
        """Return which blocks were stored, and which were found gone, since the last call.

        They say what vLLM's own events do: of a block with an image or a salt its tokens alone would be another block.
        """
        if self._scheduler is None:
            return []
        stored, gone = self._scheduler.take_events()
        events: list[Any] = [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(each.hash)], token_ids=each.tokens, medium=MEDIUM_STORAGE,
                parent_block_hash=maybe_convert_block_hash(each.parent) if each.parent is not None else None,
                block_size=self._groups[each.group].block_tokens, lora_id=each.lora[0] if each.lora else None,
                lora_name=each.lora[1] if each.lora else None, extra_keys=each.extras, group_idx=each.group,
                kv_cache_spec_kind=self._kinds[each.group],
                kv_cache_spec_sliding_window=self._groups[each.group].window or None,
            )
            for each in stored
        ]  # fmt: skip
        events += [
            BlockRemoved(block_hashes=[maybe_convert_block_hash(block)], medium=MEDIUM_STORAGE, group_idx=group)
            for group, block in gone
        ]
        return events

    def reset_cache(self) -> bool | None:
        """Make all that is stored of this model a miss, for all engines of the scope.

        True also where the store cannot be reached, as vLLM ends its engine otherwise. This engine keeps to the reset,
        and a thread stores it for the others when the store is back. The log has a line on both.
        """
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """End the threads, close the connection."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._registrar.close()
        if self._owns:
            with self._complain.ending("a client"):
                self._client.close()

    # -- of the class -----------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are waited for: a graph would leave that out."""
        return bool(extra_config.get("layerwise", False))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Return statistics of their data."""
        return SimmStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """Return the counters for vLLM's metrics."""
        return SimmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _groups_of(kv_cache_config: Any) -> tuple[list[Group], list[str]]:
    """Return vLLM's KV cache groups and their kinds. Raises RuntimeError for those whose blocks are not stored."""
    groups, kinds = [], []
    stored = set(kv_cache_config.prefix_cacheable_group_ids)
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = str(get_kv_cache_spec_kind(spec).value)
        if kind not in KINDS or number not in stored:
            raise RuntimeError(f"SiMM: this model has layers of the kind {kind}, whose state is not stored")
        window = get_kv_cache_spec_sliding_window(spec) or 0
        if not window and kind.startswith("sliding_window"):
            raise RuntimeError("SiMM: this model has layers with several windows in one group")
        groups.append(Group(tuple(group.layer_names), int(spec.block_size), int(window)))
        kinds.append(kind)
    if not groups:
        raise RuntimeError("SiMM: this model has no KV cache")
    return groups, kinds


def _wanted_layerwise(wanted: Any, groups: int, vllm_config: Any) -> bool:
    """Return whether to load layer by layer. Raises RuntimeError where vLLM does not allow it."""
    parallel = vllm_config.parallel_config
    if type(wanted) is not bool:
        raise RuntimeError(f"SiMM: layerwise is true or false, not {wanted!r}")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise RuntimeError("SiMM: SimmConnector does not work with context parallelism")
    if wanted and (groups > 1 or parallel.world_size > 1):
        raise RuntimeError('SiMM: "layerwise" is for models with one KV cache group, on one rank')
    if wanted and vllm_config.scheduler_config.async_scheduling:
        # Another request may be scheduled on blocks before vLLM knows that they were not loaded.
        raise RuntimeError('SiMM: "layerwise" needs vLLM\'s option --no-async-scheduling')
    return wanted


def _staging_of(wanted: Any) -> int:
    """Return the bytes of staging memory. Raises RuntimeError."""
    if wanted is None:
        return STAGING_BYTES
    if type(wanted) is not int or not 1 <= wanted <= 1 << 20:
        raise RuntimeError(f"SiMM: staging_mb is a number of MiB, not {wanted!r}")
    return wanted << 20


def _facts_of(vllm_config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reset covers."""
    model = vllm_config.model_config
    facts = {name: str(options.get(name, "")) for name in ("salt", "weight_version")}
    if options.get("model"):
        return {"form": _FORM, **facts, "model": options["model"]}
    return {"form": _FORM, **facts, "model": model.model, "revision": model.revision}


def _extras_of(request: Any, first: int, end: int) -> list[Any] | None:
    """Return what vLLM's events say of a block of these tokens beside them: adapter, images, salt, embeddings."""
    # vLLM looks at each image from a given one on. Those that end before this block are none of it.
    images = getattr(request, "mm_features", None) or ()
    passed = bisect_right(images, first, key=lambda each: each.mm_position.offset + each.mm_position.length)
    keys, _ = generate_block_hash_extra_keys(request, first, end, passed)
    extras: list[Any] | None = to_event_extra_keys([keys])
    return extras


def _wants_events(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False))
