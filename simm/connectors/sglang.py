"""SiMM as a storage backend of SGLang's HiCache, for ``--hicache-storage-backend dynamic``.

``simm engine sglang`` prints the flags. SGLang makes a :class:`HiCacheSimm` in each scheduler process, registers its
host pools, and calls it from threads of its own. This module is the only one that imports sglang.

What a value is
---------------
One page of one pool, whole: its keys and values, or all buffers of a Mamba state, are the pieces of one value. So a
page is never half there. With heads that are split for other TP widths (``tp_lcm_size``), it is one such page for each
group of heads. A value is read straight into the host pool, and put straight out of it.

Who reads whose pages
---------------------
A page's key begins with the *identity* of its pool (``keyspace.py``): model, revision, data type, layout, geometry,
page size, the layers and heads that this rank has, weight version, salt, and all settings that decide what a page holds
(``hicache/facts.py``). Pools that have layers of a draft model have that model in it, too. Two pools that differ in any
of it share nothing. A pool that all tensor-parallel ranks have alike (MLA, its indexers) has no rank in its identity,
so that any width shares it. The log has the facts of each identity, to compare two engines that should share but do
not.

Weight versions
---------------
An update of the weights changes SGLang's ``weight_version``, and after that SGLang flushes its own caches, which
replaces its storage threads. Pages that a thread of before still has in hand are of the old weights. So a thread keeps
to the version that it began with: as soon as the engine has another one, it stores nothing and finds nothing
(``hicache/weight_versions.py``).

Failures
--------
No method raises: a failure is a miss or a page that was not stored, and is logged once in ten seconds. Only the
constructor raises, for settings that cannot work. The client's deadline (SIMM_DEADLINE_MS) bounds each exchange.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransferResult,
)

from ..client import Client, WrongSize
from ..constants import RANGES_MAX, VALUE_BYTES_MAX
from ..errors import UsageError
from ..host.buffers import Span
from ..schemes.scheme import Scheme
from ..wire.status import Status
from .complaints import Complaints
from .hicache import facts, hit_policies
from .hicache.host_pools import HostPool, Piece, buffers, geometry_of, head_of, of_pages, sinks_of, source, whole
from .hicache.weight_versions import WeightVersions
from .keyspace import NOT_FLUSHED, Keyspace, connect, identity, options_of
from .registration.of_sglang import paging_of
from .registration.registrar import Registrar, under_names

__all__ = ["HiCacheSimm"]

log = logging.getLogger("simm.connectors.sglang")

_T = TypeVar("_T")
_P = ParamSpec("_P")
#: Samples that get_stats() hands over at most.
_SAMPLES_MAX: Final = 4096
#: Raised when a page's form changes, as keys and values in another order.
_FORM: Final = 1
#: What follows from the number of heads, which differs between TP widths that share groups of heads.
_OF_HEADS: Final = frozenset(("head_num", "element_dim", "size_per_token"))
#: What a pool of an MLA model has of its own on each tensor-parallel rank.
_SHARDED: Final = frozenset(("mamba",))
#: Options of ``--hicache-storage-backend-extra-config`` that are ours; the others are SGLang's.
_OPTIONS: Final = ("manager_address", "namespace", "model", "salt", "weight_version", "deadline_ms")
_OF_SGLANG: Final = frozenset((
    "backend_name", "module_path", "class_name", "interface_v1", "file_storage_path", "tp_lcm_size",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "allocator",
))  # fmt: skip


class _Batch(NamedTuple):
    """A call's values: of which pool, under which digests, of which weights and generation."""

    digests: list[bytes]
    of: tuple[str, str]
    #: For each transfer its pool, and its first and last position in ``digests``.
    extents: list[tuple[HostPool, int, int]]


#: What a call is to move: pages of a pool, by their hashes, with the pieces of memory of each of their values.
_Wanted = tuple[HostPool, Sequence[str], Sequence[list[Piece]]]


def _harmless(
    instead: Callable[..., _T],
) -> Callable[[Callable[Concatenate[HiCacheSimm, _P], _T]], Callable[Concatenate[HiCacheSimm, _P], _T]]:
    """Make a method return ``instead(its arguments)`` where it would raise, and log why."""

    def decorate(method: Callable[Concatenate[HiCacheSimm, _P], _T]) -> Callable[Concatenate[HiCacheSimm, _P], _T]:
        @functools.wraps(method)
        def run(backend: HiCacheSimm, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return method(backend, *arguments, **named)
            except Exception as exc:
                name = method.__name__
                backend.complain(name, "%s failed, the engine goes on without it: %s", name, exc, trace=True)
                return instead(*arguments, **named)

        return run

    return decorate


def _no_pages(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {each.name: [False] * len(each.keys or ()) for each in transfers}


def _nothing(*_: Any, **__: Any) -> None:
    return None


class HiCacheSimm(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """Stores the pages of SGLang's host pools in SiMM. Any thread may call it; no call but the constructor raises.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``. Of its ``extra_config``: ``manager_address``
            (``"host:port"``, several separated by commas; default SIMM_MANAGER), ``namespace`` (default
            SIMM_NAMESPACE), ``model`` (stands for the model's name, path and revision in keys, and for nothing else),
            ``salt`` (part of all keys), ``weight_version`` (of the weights on disk), ``deadline_ms``.
        client: for tests, and for programs that have one. Otherwise a client is made, and closed by :meth:`close`.

    Raises RuntimeError with a sentence for a wrong setting, or if the managers refuse this client.
    """

    def __init__(self, storage_config: Any = None, *_: Any, client: Client | None = None) -> None:
        extra = dict(getattr(storage_config, "extra_config", None) or {})
        self._config = storage_config
        self._options = {name: extra[name] for name in _OPTIONS if extra.get(name) not in (None, "")}
        if unknown := sorted(map(str, set(extra) - {*_OPTIONS, *_OF_SGLANG})):  # of another SGLang, or mistyped
            log.warning("the extra config has %s, which has no effect in SiMM: see its options %s", unknown, _OPTIONS)
        self.complain = Complaints(log)
        self._owns = client is None
        self._client = client or self._connect()
        self._model = self._model_facts()
        self._keyspace = Keyspace(self._client, f"sglang/{identity(self._model)}")
        self._pools: dict[str, HostPool] = {}
        self._versions = WeightVersions(functools.partial(_version, str(self._options.get("weight_version", ""))))
        self._registrar = Registrar(self._client, self.complain)
        self._samples = {name: deque[float](maxlen=_SAMPLES_MAX) for name in _STATISTICS}
        log.info("SiMM's backend for SGLang: scope %s of %s", self._keyspace.scope, self._model)

    def _connect(self) -> Client:
        return connect(str(self._options.get("manager_address", "")), **options_of(self._options))

    # -- who shares what --------------------------------------------------------------------------

    def _model_facts(self) -> dict[str, Any]:
        """Return what a flush of the storage covers: all pages of this model, whatever the rank."""
        known = {"form": _FORM, "salt": self._options.get("salt", ""), **facts.of_weights(_served)}
        if "model" in self._options:
            return {**known, "model": self._options["model"]}
        named = _served("model_path", "revision")
        return {**known, "model": getattr(self._config, "model_name", None), **named}

    def _rank_facts(self, replicated: bool, main: bool, rank: int | None = None) -> list[dict[str, Any]]:
        """Return for each value of a page which part of the model's heads and tokens it has; ``rank`` None: ours."""
        config = self._config
        known = {
            name: getattr(config, name, default)
            for name, default in (("pp_rank", 0), ("pp_size", 1), ("attn_cp_rank", 0), ("attn_cp_size", 1),
                                  ("dcp_rank", 0), ("dcp_size", 1), ("logical_page_size", None))
        }  # fmt: skip
        if replicated:
            return [known]
        rank, width = getattr(config, "tp_rank", 0) if rank is None else rank, getattr(config, "tp_size", 1)
        groups = 1
        if main and getattr(config, "should_split_heads", False):
            groups = max(1, (getattr(config, "tp_lcm_size", None) or width) // width)
        return [{**known, "tp_rank": rank * groups + i, "tp_size": width * groups} for i in range(groups)]

    def _replicated(self, name: str, host: Any) -> bool:
        """Return whether all tensor-parallel ranks have the same pages in this pool.

        Where that is not certain the answer is no: then each rank has its own keys, and none reads another one's heads.
        """
        if not getattr(self._config, "is_mla_model", False) or name in _SHARDED:
            return False
        return name == str(PoolName.KV) or not hasattr(host, "head_num")

    def _pool_facts(self, name: str, host: Any, rank: int | None = None) -> list[dict[str, Any]]:
        geometry = geometry_of(host)
        known = {
            **self._model, "pool": name, "class": type(host).__name__, **facts.of_numbers(_served),
            **{each: value for each, value in geometry.items() if value is not None},
        }  # fmt: skip
        # Only a pool that says so has no layers of the draft model.
        layers, of_target = geometry["layer_num"], geometry["target_layer_num"]
        if name.startswith("draft") or of_target is None or of_target != layers:
            known |= facts.of_draft(_served)
        ranks = self._rank_facts(self._replicated(name, host), name == str(PoolName.KV), rank)
        if len(ranks) > 1:
            heads, rest = divmod(int(getattr(host, "head_num", 0)), len(ranks))
            if rest or not heads:
                raise UsageError(f"{len(ranks)} groups do not divide the heads of pool {name}")
        # Bytes of a group of heads are the same in a pool of one group, whose own width is that of the widest engine.
        widest = getattr(self._config, "tp_lcm_size", None)
        if widest and known.get("layout") == "page_head":
            known = {each: known[each] for each in known if each not in _OF_HEADS} | {"tp_lcm_size": widest}
            known["heads"] = int(getattr(host, "head_num", 0)) // len(ranks)
        return [{**known, **rank} for rank in ranks]

    def _weights(self) -> str | None:
        """Return the weight version for the calling thread; None if it works for weights that are gone."""
        seen, now = self._versions.of_caller(), self._versions.now()
        if seen == now:
            return now
        self.complain("weights", "the weights changed from version %s to %s without a flush of the engine's caches: "
                      "nothing is stored or found until SGLang's /flush_cache", seen, now)  # fmt: skip
        return None

    # -- registration -----------------------------------------------------------------------------

    @_harmless(_nothing)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the main pool."""
        self.mem_pool_host = mem_pool_host
        self._register(str(PoolName.KV), mem_pool_host)

    @_harmless(_nothing)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another pool. The main one may come a second time."""
        if str(host_pool_name) != str(PoolName.KV):
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host: Any) -> None:
        pool = HostPool(name, host, self._pool_facts(name, host))
        for buffer in buffers(host):
            try:
                pool.spans.append(self._client.register(buffer))
            except Exception as exc:  # its pages still work, by copies
                log.info("a buffer of pool %s is not registered: %s", name, exc)
        self._pools[name] = pool

    def _pool(self, name: Any) -> HostPool:
        pool = self._pools.get(str(name))
        if pool is None:
            raise UsageError(f"pool {name} was not registered")
        return pool

    def _schemes(self, weights: str, generation: str) -> list[Scheme]:
        """Return how the keys of a prompt's pages are made, of all ranks; nothing where this rank cannot tell.

        The first rank tells it of all others, whose pools are like its own. Stages of a pipeline have other layers, and
        pages that are split by tokens other tokens: nothing is told of these. Raises UsageError for an engine with
        several pools: what a prefix needs of the others depends on the engine's policies.
        """
        config, pool = self._config, self._pools.get(str(PoolName.KV))
        names = [self._options.get("model"), getattr(config, "model_name", None)]
        parts = [getattr(config, name, 1) or 1 for name in ("pp_size", "attn_cp_size", "dcp_size")]
        if pool is None or pool.logical or not any(names) or max(parts) > 1 or getattr(config, "tp_rank", 0):
            return []
        if set(self._pools) - {pool.name}:
            raise UsageError("it is not known what a prefix needs of a hybrid model's or a draft model's pools")
        ranks = 1 if self._replicated(pool.name, pool.host) else getattr(config, "tp_size", 1) or 1
        heads = [
            head_of(pool.name, known, weights)
            for rank in range(ranks) for known in self._pool_facts(pool.name, pool.host, rank)
        ]  # fmt: skip
        options: dict[str, Any] = {
            "scope": self._keyspace.scope, "generation": generation, "heads": ",".join(heads), **paging_of(),
        }  # fmt: skip
        return under_names(Scheme("any", "sglang-pages", pool.page_tokens, ranks, options=options), names)

    def _tell(self, weights: str, generation: str) -> None:
        """Register the scheme of the keys for routers. Nothing depends on it."""
        self._registrar.tell((weights, generation), lambda: self._schemes(weights, generation))

    # -- the batches --------------------------------------------------------------------------------

    def _batch(self, wanted: Sequence[tuple[HostPool, Sequence[str]]]) -> _Batch | None:
        """Return the digests of pages; None if the calling thread may not use them, or nothing is known of any."""
        weights = self._weights()
        generation = self._keyspace.generation() if weights is not None else None
        if weights is None or generation is None:
            return None
        keys: list[str] = []
        extents = []
        for pool, hashes in wanted:
            start = len(keys)
            keys += pool.keys(hashes, weights)
            extents.append((pool, start, len(keys)))
        return _Batch(self._keyspace.digests(generation, keys), (weights, generation), extents)

    def _stored(self, wanted: Sequence[tuple[HostPool, Sequence[str]]]) -> list[list[bool]]:
        """Return for each pool which of its pages are stored, all of their values."""
        batch = self._batch(wanted)
        if batch is None:
            return [[False] * len(hashes) for _, hashes in wanted]
        found = self._client.exists_digests(batch.digests) if batch.digests else []
        return _of_pools(batch, found)

    def _read(self, wanted: Sequence[_Wanted]) -> list[list[bool]]:
        """Copy pages to their pools; return for each which of its pages are there now."""
        batch = self._batch([(pool, hashes) for pool, hashes, _ in wanted])
        if batch is None:
            return [[False] * len(hashes) for _, hashes, _ in wanted]
        values = [(pool, each) for pool, _, pieces in wanted for each in pieces]
        began = time.perf_counter()
        good = self._get(batch.digests, sinks_of(values))
        done = sum(size for (_, pieces), ok in zip(values, good) if ok for _, size in pieces)
        found = _of_pools(batch, good)
        self._note("prefetch", sum(map(sum, found)), done, began)
        return found

    def _get(self, digests: list[bytes], sinks: list[Span]) -> list[bool]:
        """Copy values to their memory; return which came whole. One of another size is dropped: it is none of ours."""
        results = self._client.get_digests(digests, sinks) if digests else []
        good = []
        wrong: dict[bytes, int] = {}
        for digest, sink, got in zip(digests, sinks, results):
            length = got.length if type(got) is WrongSize else int(got)
            good.append(length == sink.least)
            if length > 0 and length != sink.least:
                wrong[digest] = length
        if wrong:
            self.complain("size", "%d pages have another size than their keys promise: dropped", len(wrong))
            self._client.delete_sized(list(wrong), list(wrong.values()))
        return good

    def _write(self, wanted: Sequence[_Wanted]) -> list[list[bool]]:
        """Store the pages that are not stored yet; return for each pool which are now."""
        batch = self._batch([(pool, hashes) for pool, hashes, _ in wanted])
        if batch is None:
            return [[False] * len(hashes) for _, hashes, _ in wanted]
        values = [(pool, each) for pool, _, pieces in wanted for each in pieces]
        good = self._client.exists_digests(batch.digests) if batch.digests else []
        before = _of_pools(batch, good)
        missing = [at for at, there in enumerate(good) if not there]
        began = time.perf_counter()
        fits = []
        for at in missing:
            pieces = values[at][1]
            size = sum(each for _, each in pieces)
            if size <= VALUE_BYTES_MAX and len(pieces) <= RANGES_MAX:
                fits.append(at)
            else:
                self.complain("large", "a page of %d bytes in %d pieces is too large for one value (%d bytes): make "
                              "--page-size smaller", size, len(pieces), VALUE_BYTES_MAX)  # fmt: skip
        self._put(batch.digests, fits, [source(*values[at]) for at in fits], good)
        self._tell(*batch.of)
        done = sum(size for at in fits if good[at] for _, size in values[at][1])
        now = _of_pools(batch, good)
        self._note("backup", sum(map(sum, now)) - sum(map(sum, before)), done, began)
        return now

    def _put(self, digests: list[bytes], positions: list[int], sources: list[Span], good: list[bool]) -> None:
        """Store values at these positions, and set ``good`` there for those that are."""
        if not positions:
            return
        statuses = self._client.put_digests([digests[at] for at in positions], sources)
        failed = 0
        for at, status in zip(positions, statuses):
            good[at] = status == Status.OK
            failed += status != Status.OK
        if failed:
            self.complain("put", "%d of %d pages were not stored: %s", failed, len(positions),
                          self._client.stats()["last_put_failure"])  # fmt: skip

    # -- the main pool (interface v1) -----------------------------------------------------------------

    @_harmless(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages are stored before the first that is not."""
        pool = self._pool(PoolName.KV)
        return 0 if pool.logical else hit_policies.leading(self._stored([(pool, keys)])[0])

    @_harmless(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether the page is stored."""
        return self._stored([(self._pool(PoolName.KV), [key])])[0][0]

    @_harmless(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the main pool; return for each whether it is there."""
        pool = self._pool(PoolName.KV)
        if pool.logical:
            return [True] * len(keys)
        return self._read([(pool, keys, pool.pieces(host_indices, len(keys)))])[0]

    @_harmless(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the main pool; return for each whether it is stored."""
        pool = self._pool(PoolName.KV)
        if pool.logical:
            return [True] * len(keys)
        return self._write([(pool, keys, pool.pieces(host_indices, len(keys)))])[0]

    # -- all pools (interface v2) ---------------------------------------------------------------------

    @_harmless(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return which prefixes of the pages can be restored, by each pool's hit policy."""
        main = self._pool(PoolName.KV)
        transfers = list(pool_transfers or ())
        wanted = [(main, [] if main.logical else keys)]
        wanted += [(self._pool(each.name), _asked(each, keys)) for each in transfers]
        found = self._stored(wanted)
        pages = len(keys) if main.logical and transfers else hit_policies.leading(found[0])
        hits = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer, stored in zip(transfers, found[1:]):
            policy = _policy(transfer)
            if policy == "block_groups":  # a second form of the same pages: it has a say of its own only
                groups = hit_policies.block_groups(stored, transfer.group_pages, transfer.block_pages)
                if groups:
                    hits[transfer.name] = groups
                continue
            if policy == "trailing_pages":
                own = hit_policies.trailing_pages(stored, pages, max(1, len(transfer.keys or ())))
            elif policy == "all_pages":
                own = hit_policies.all_pages(stored, pages)
            else:
                raise UsageError(f"the hit policy {policy} of pool {transfer.name} is not known")
            if own:
                hits[transfer.name] = max(own)
            restorable &= own
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    @_harmless(_no_transfers)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read pages into several pools; return for each pool and page whether it is there."""
        return self._each(transfers, self._read)

    @_harmless(_no_transfers)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools; return for each pool and page whether it is stored."""
        return self._each(transfers, self._write)

    def _each(
        self, transfers: list[Any], act: Callable[[Sequence[_Wanted]], list[list[bool]]]
    ) -> dict[Any, list[bool]]:  # fmt: skip
        """Do what is to be done to transfers in one batch. One that makes no sense fails alone."""
        results = _no_transfers(transfers)
        good, wanted = [], []
        for each in transfers:
            try:
                pool, keys = self._pool(each.name), list(each.keys or ())
                if each.host_indices is None or len(each.host_indices) != len(keys) * pool.page_tokens:
                    raise UsageError(f"the indices of pool {each.name} are not those of {len(keys)} pages")
                pieces = pool.pieces(each.host_indices, len(keys)) if keys else []
            except Exception as exc:  # the engine's pool may raise anything
                self.complain("transfer", "%s", exc, trace=not isinstance(exc, UsageError))
                continue
            if keys:
                good.append(each.name)
                wanted.append((pool, keys, pieces))
        if wanted:
            results.update(zip(good, act(wanted)))
        return results

    # -- pages in memory of the caller's, without "interface_v1" ----------------------------------------

    @_harmless(_nothing)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a tensor, or to an address with a size; return what was given, or None for a miss."""
        return self.batch_get([key], [target_location], [target_sizes])[0]

    @_harmless(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """:meth:`get` for several pages."""
        sinks = [whole(*each) for each in zip(target_locations, target_sizes or [None] * len(keys))]
        digests = self._flat(keys)
        good = self._get(digests, sinks) if digests else [False] * len(keys)
        return [each if ok else None for each, ok in zip(target_locations, good)]

    @_harmless(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page out of a tensor, or of memory by address and size; return whether it is stored."""
        return self.batch_set([key], [value], [target_location], [target_sizes])

    @_harmless(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """:meth:`set` for several pages; return whether all are stored."""
        places = [value if value is not None else place for value, place in zip(
            values or [None] * len(keys), target_locations or [None] * len(keys)
        )]  # fmt: skip
        sources = [whole(*each) for each in zip(places, target_sizes or [None] * len(keys))]
        digests = self._flat(keys)
        good = self._client.exists_digests(digests) if digests else [False] * len(keys)
        missing = [at for at, there in enumerate(good) if not there] if digests else []
        self._put(digests, missing, [sources[at] for at in missing], good)
        return bool(good) and all(good)

    def _flat(self, keys: Sequence[str]) -> list[bytes]:
        """Return the digests of pages as tensors, whose bytes may be in another order than in the pool."""
        pool = self._pool(PoolName.KV)
        weights = self._weights()
        generation = self._keyspace.generation() if weights is not None else None
        if weights is None or generation is None:
            return []
        head = "flat/" + "+".join(pool.heads(weights))
        return self._keyspace.digests(generation, [head + key for key in keys])

    # -- the rest -----------------------------------------------------------------------------------

    @_harmless(_nothing)
    def clear(self) -> None:
        """Make all that was stored of this model unreadable, for all its ranks and engines."""
        if not self._keyspace.flush_until_seen():
            log.warning("the flush has not reached other engines: %s", NOT_FLUSHED)
        generation = self._keyspace.generation()
        if generation is not None:
            self._tell(self._versions.now(), generation)  # routers count on none of the old pages

    @_harmless(_nothing)
    def close(self) -> None:
        """Close the connection. Later calls find nothing and store nothing."""
        self._keyspace.close()
        self._registrar.close()
        if self._owns:
            self._client.close()

    @_harmless(_nothing)
    def get_stats(self) -> Any:
        """Return what was transferred since the last call, for SGLang's metrics."""
        if not getattr(self._config, "enable_storage_metrics", False):
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for name, samples in self._samples.items():
            while samples:
                getattr(metrics, name).append(samples.popleft())
        return metrics

    def _note(self, kind: str, pages: int, size: int, began: float) -> None:
        """Count a transfer for :meth:`get_stats`: its pages, and GiB per second."""
        if size:
            self._samples[f"{kind}_pgs"].append(pages)
            self._samples[f"{kind}_bandwidth"].append(size / (1 << 30) / max(time.perf_counter() - began, 1e-9))


#: Lists of SGLang's StorageMetrics.
_STATISTICS: Final = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")


def _of_pools(batch: _Batch, values: list[bool]) -> list[list[bool]]:
    """Return for each pool and page whether all of its values are true."""
    return [of_pages(values[start:end], pool.values) for pool, start, end in batch.extents]


def _served(*names: str) -> dict[str, Any]:
    """Return what the engine was started with, as far as this process knows it; the weight version as it is now."""
    try:
        from sglang.srt import runtime_context as context

        source = context.get_serving() if names == ("weight_version",) else context.get_server_args()
        if names == facts.RESOLVED and hasattr(context, "get_exec"):
            source = context.get_exec().features
    except (ImportError, AttributeError, ValueError):
        return {}  # not published: a program that embeds parts of SGLang
    return {f"served_{name}": getattr(source, name, None) for name in names}


def _version(own: str) -> str:
    """Return the version of the weights that the engine has now. ``own``: that of the weights on disk."""
    return f"{own}:{_served('weight_version').get('served_weight_version', '')}"


def _policy(transfer: Any) -> str:
    return str(getattr(transfer.hit_policy, "value", transfer.hit_policy))


def _asked(transfer: Any, keys: list[str]) -> list[str]:
    """Return the pages of a pool that a query has to look for."""
    if _policy(transfer) != "block_groups":
        return keys
    if transfer.keys:
        return list(transfer.keys)
    at = hit_policies.block_positions(len(keys), transfer.group_pages, transfer.block_pages)
    return [keys[position] for position in at]
