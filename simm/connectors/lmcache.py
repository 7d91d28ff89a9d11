"""SiMM as a remote storage of LMCache inside an engine's process: ``plugin://simm`` and ``simm://host:port``.

``simm engine lmcache`` prints the configuration. LMCache makes a :class:`SimmAdapter`, which makes a
:class:`SimmConnector` in each worker, and one in the scheduler, which only asks what is stored. For ``lmcache server``
there is ``lmcache_server.py``. This module and that one are the only ones that import lmcache.

Keys
----
A key is LMCache's own text: model, world size, worker, chunk hash, data type, layer and tags. All of them lie in SiMM's
namespace, and ``simm.schemes.lmcache`` makes the same ones. With the options ``weight_version`` or ``salt``, a digest
of both precedes them. vLLM keeps FP8 and other small numbers as bytes, and LMCache tells the storage no more than that:
then the encoding by vLLM's name of the data type, and how FP8 is encoded on this GPU, are in the digest. Where that is
not as on most GPUs it is there with any data type, as some layers may have other numbers than LMCache says. The layout
of a chunk is in its value (``lmcache_values.py``). A chunk of another layout is a miss, and dropped, so that this
engine's can be stored.

Memory
------
Chunks are read straight into LMCache's arena and put straight out of it. LMCache counts who uses an object. A put does
not release its object, as LMCache's instrumentation does; a get that finds nothing releases what it took.

Failures
--------
No method raises: a failure is a miss or a chunk that is not stored, and is logged once in ten seconds. Calls run in the
client's threads; its deadline (SIMM_DEADLINE_MS) bounds each. A call that LMCache cancels ends when nothing uses its
memory any more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

from lmcache.utils import TORCH_DTYPE_TO_STR_DTYPE, CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from ..client import Client
from ..constants import VALUE_BYTES_MAX
from ..errors import UsageError
from ..schemes.encodings import short_key
from ..sdk.ops.waiting import in_own_thread
from ..wire.status import STATUS_NAMES, Status
from . import vllm_facts
from .complaints import Complaints
from .keyspace import connect, options_of
from .lmcache_values import (
    Arena,
    Layout,
    Slot,
    bytes_of,
    head_of,
    length_of,
    never_whole,
    reachable,
    taken_apart,
    too_large,
)
from .registration.of_lmcache import engine_schemes, hashes_weakly, remembered, vllm_config
from .registration.registrar import Registrar

__all__ = ["SimmAdapter", "SimmConnector"]

log = logging.getLogger("simm.connectors.lmcache")

_T = TypeVar("_T")
#: Options, in ``extra_config`` behind ``remote_storage_plugin.NAME.``, or behind the ``?`` of an address.
_OPTIONS: Final = ("manager_address", "namespace", "deadline_ms", "weight_version", "salt")
#: What LMCache itself has there.
_OF_LMCACHE: Final = ("module_path", "class_name")
_SCHEMA: Final = "simm://"
_PLUGIN: Final = "plugin://"
#: What a plugin's name is, or begins with before a dot.
_TYPE: Final = "simm"
#: Before a plugin's name and one of its options, in ``extra_config``.
_HEAD: Final = "remote_storage_plugin."
#: A warning, for what an engine is started with.
_MISSING: Final = (
    "LMCache's keys have no {0}: requests with other {0} read each other's chunks, and get wrong tokens. Use the flags "
    "of `simm engine vllm`"
)
#: torch's data types by their names in a layout.
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in TORCH_DTYPE_TO_STR_DTYPE}
#: Those in which engines keep numbers of more than one kind: all encodings of FP8, and numbers with scales.
_BYTES: Final = frozenset(("uint8", "int8"))


class SimmAdapter(ConnectorAdapter):  # type: ignore[misc, unused-ignore]
    """Tells LMCache which addresses are SiMM's, and makes their connectors."""

    def __init__(self) -> None:
        super().__init__(_SCHEMA)

    def can_parse(self, url: str) -> bool:
        """Return whether it is ``simm://...``, or ``plugin://simm`` with or without an instance's name."""
        if url.startswith(_PLUGIN):
            return bool(extract_plugin_type(url[len(_PLUGIN) :]) == _TYPE)
        return url.startswith(_SCHEMA)

    def create_connector(self, context: Any) -> SimmConnector:
        """Return a connector. Raises RuntimeError with a sentence for a setting that cannot work."""
        return SimmConnector(
            context.loop, context.local_cpu_backend, context.config, context.metadata, url=context.url,
            plugin_name=context.plugin_name,
        )  # fmt: skip


class SimmConnector(RemoteConnector):  # type: ignore[misc, unused-ignore]
    """Stores LMCache's chunks in SiMM. Any thread may call it; no call but the constructor raises.

    Args:
        loop, local_cpu_backend, config, metadata: as LMCache passes them. The scheduler's backend has no memory.
        url, plugin_name: where the options are: see :data:`_OPTIONS`.
        client: for tests, and for programs that have one. Otherwise a client is made, and closed by :meth:`close`.

    Raises RuntimeError with a sentence for a wrong setting, or if the managers refuse this client.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any, metadata: Any = None, *,
        url: str = "plugin://simm", plugin_name: str | None = None, client: Client | None = None,
    ) -> None:  # fmt: skip
        metadata = metadata if metadata is not None else local_cpu_backend.metadata
        super().__init__(config, metadata)
        self._backend = local_cpu_backend
        self._binary = config.remote_serde not in (None, "naive")
        self._complain = Complaints(log)
        listed = list(getattr(config, "remote_storage_plugins", None) or ())
        address = str(getattr(config, "remote_url", None))
        if address.startswith((_SCHEMA, _PLUGIN)):  # which LMCache connects to beside those
            listed.append(_plugin_of(address))
        options = _options(url, plugin_name, config.extra_config or {}, listed)
        #: torch's type of shapes.
        self._shape: Callable[[Sequence[int]], Any] = type(self.meta_shapes[0])
        self._head = head_of(options, _numbers_of(metadata, options))
        _warn_of_keys(config)
        self._owns = client is None
        self._client = client or connect(str(options.get("manager_address", "")), **options_of(options))
        self._registrar = Registrar(self._client, self._complain)
        self._schemes = functools.partial(
            engine_schemes, config, metadata, TORCH_DTYPE_TO_STR_DTYPE, {"head": self._head} if self._head else {}
        )
        allocator = getattr(local_cpu_backend, "memory_allocator", None)
        try:
            self._arena = Arena(self._client, getattr(allocator, "buffer", None))
        except Exception as exc:  # its chunks still work, by copies
            log.info("LMCache's memory is not registered: %s", str(exc))
            self._arena = Arena(self._client, None)
        #: What LMCache's engine and its GPU connector take a layer's chunk for. The connector asserts it.
        self._layer_form = (
            MemoryFormat.KV_MLA_FMT if metadata.use_mla
            else MemoryFormat.KV_2TD if config.enable_blending else MemoryFormat.KV_T2D
        )  # fmt: skip
        whole = Layout.of(self.meta_fmt, self.meta_dtypes, self.meta_shapes)
        odd = self._binary or never_whole(self.meta_fmt, self.meta_dtypes, self.meta_shapes)
        #: What a chunk's object, and one of a layer, is expected to be; None until one was seen, and where a full one
        #: is more than a value: only parts of one are stored, and room for a full one could cost the engine others.
        self._expected: dict[bool, tuple[Any, Any, Any] | None] = {
            False: None if odd else (self.meta_shapes, self.meta_dtypes, self.meta_fmt), True: None,
        }  # fmt: skip
        log.info("SiMM's remote storage for LMCache: %r, keys behind %r, chunks of %s", self._client, self._head, whole)

    def __repr__(self) -> str:
        return f"<SimmConnector {self._client!r}>"

    def post_init(self) -> None:
        """Do nothing: the memory is registered already."""

    # -- calls ------------------------------------------------------------------------------------

    def _harmless(self, what: str, instead: _T, call: Callable[..., _T], *arguments: Any) -> _T:
        """Return what a call returns, or ``instead`` where it raises."""
        try:
            return call(*arguments)
        except Exception as exc:
            self._complain(what, "%s failed, the engine goes on without it: %s", what, str(exc), trace=True)
            return instead

    async def _threaded(self, what: str, instead: _T, call: Callable[..., _T], *arguments: Any) -> _T:
        """Do :meth:`_harmless` in a thread of the client."""
        try:
            answer: _T = await self._client.in_thread(self._harmless, what, instead, call, *arguments)
        except Exception as exc:  # the client is closed
            self._complain(what, "%s failed, the engine goes on without it: %s", what, str(exc))
            return instead
        return answer

    def _name(self, key: CacheEngineKey) -> str:
        return short_key(self._head + key.to_string())

    def _digests(self, keys: Sequence[CacheEngineKey]) -> list[bytes]:
        return [self._client.digest(self._name(each)) for each in keys]

    # -- what is stored -----------------------------------------------------------------------------

    def _stored(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        return self._client.exists_digests(self._digests(keys)) if keys else []

    def _leading(self, keys: Sequence[CacheEngineKey]) -> int:
        stored = self._stored(keys)
        return stored.index(False) if False in stored else len(stored)

    async def exists(self, key: CacheEngineKey) -> bool:
        """Return whether a chunk is stored; False also in an outage."""
        return (await self._threaded("exists", [False], self._stored, [key]))[0]

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """:meth:`exists`, in the calling thread."""
        return self._harmless("exists", [False], self._stored, [key])[0]

    def support_batched_contains(self) -> bool:
        """Return True: many chunks cost one exchange."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Return how many leading chunks are stored, in the calling thread."""
        return self._harmless("exists", 0, self._leading, keys)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Return how many leading chunks are stored."""
        return await self._threaded("exists", 0, self._leading, keys)

    # -- get ----------------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> Any:
        """Return a chunk, or None for a miss."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Return True: many chunks cost one exchange."""
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[Any]:
        """Return chunks, None for each miss."""
        found: list[Any] = [None] * len(keys)
        try:
            await self._threaded("get", None, self._fetch, keys, found)
        except asyncio.CancelledError:  # delivered when the call has ended
            for obj in filter(None, found):
                obj.ref_count_down()
            raise
        return found

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[Any]:
        """Return the chunks before the first miss."""
        found = await self.batched_get(keys)
        count = found.index(None) if None in found else len(found)
        for obj in filter(None, found[count:]):
            obj.ref_count_down()
        return found[:count]

    def _fetch(self, keys: Sequence[CacheEngineKey], found: list[Any]) -> None:
        """Read chunks to ``found``. Those that are not what their keys promise are read again, as a whole."""
        digests = self._digests(keys)
        slots: dict[int, tuple[Any, Slot]] = {}
        odd: list[int] = []
        try:
            for at, key in enumerate(keys):
                expected = self._expected[isinstance(key, LayerCacheEngineKey)]
                obj = self._backend.allocate(*expected, busy_loop=False) if expected is not None else None
                if obj is not None:
                    try:
                        slots[at] = obj, self._arena.slot(obj)
                    except UsageError:  # it cannot be a value, but a part of it may be stored
                        obj.ref_count_down()
                        odd.append(at)
                elif expected is None:
                    odd.append(at)
                else:
                    self._complain("memory", "LMCache's memory has no room for a chunk: see max_local_cpu_size")
            results = self._client.get_digests(
                [digests[at] for at in slots], [slot.sink for _, slot in slots.values()]
            ) if slots else []  # fmt: skip
            for (at, (obj, slot)), got in zip(list(slots.items()), results):
                if slot.filled(got):
                    found[at] = obj
                    del slots[at]
                elif length_of(got):
                    odd.append(at)
        finally:
            for obj, _ in slots.values():
                obj.ref_count_down()
        if odd:
            self._fetch_odd([keys[at] for at in odd], odd, [digests[at] for at in odd], found)

    def _fetch_odd(
        self, keys: Sequence[CacheEngineKey], places: Sequence[int], digests: Sequence[bytes], found: list[Any]
    ) -> None:
        """Read chunks with fewer tokens, of a layer, or serialized, by a copy: their values say how large they are."""
        foreign: dict[bytes, int] = {}
        values = self._client.get_many(list(map(self._name, keys)))
        for key, at, digest, value in zip(keys, places, digests, values):
            if value is None:
                continue
            parts = taken_apart(value)
            of_layer = isinstance(key, LayerCacheEngineKey)
            if parts is None or not self._fits(parts[1], len(parts[0]), of_layer):
                foreign[digest] = len(value)
                continue
            data, layout = parts
            form, dtypes = MemoryFormat[layout.form], [_dtype(name) for name, _ in layout.groups]
            shapes = [self._shape(shape) for _, shape in layout.groups]
            obj = self._backend.allocate(shapes, dtypes, form, busy_loop=False)
            if obj is None:
                self._complain("memory", "LMCache's memory has no room for a chunk: see max_local_cpu_size")
                continue
            memory = memoryview(obj.byte_array).cast("B")
            if len(memory) != len(data):
                obj.ref_count_down()
                continue
            memory[:] = data
            found[at] = obj
            expected = self._expected[True]
            # A prompt's last chunk may be shorter than the next ones.
            if of_layer and not self._binary and (
                expected is None or math.prod(shapes[0]) > math.prod(expected[0][0])
            ):  # fmt: skip
                self._expected[True] = shapes, dtypes, form
        if foreign:
            self._complain("layout", "%d chunks have another layout than this engine's under its keys: dropped. Give"
                           " engines with one model name and other layouts a namespace each", len(foreign))  # fmt: skip
            self._client.delete_sized(list(foreign), list(foreign.values()))

    def _fits(self, layout: Layout, size: int, of_layer: bool) -> bool:
        """Return whether a value of so many bytes that says this of itself can be a chunk of this engine.

        Memory is taken for what fits, and LMCache evicts other chunks to make room for it.
        """
        if self._binary:  # LMCache's deserializer looks into it
            return layout == Layout(MemoryFormat.BINARY_BUFFER.name, (("none", (size, 0, 0, 0)),))
        mine = Layout.of(self.meta_fmt, self.meta_dtypes, self.meta_shapes)
        if bytes_of(self.meta_dtypes, [shape for _, shape in layout.groups]) != size:
            return False
        if of_layer:
            (dtype, shape), (mine_dtype, mine_shape) = layout.groups[0], mine.groups[0]
            return (
                len(layout.groups) == 1 and layout.form == self._layer_form.name and dtype == mine_dtype
                and self._is_layer(shape, *mine_shape)
            )  # fmt: skip
        return layout.form == mine.form and len(layout.groups) == len(mine.groups) and all(
            dtype == mine_dtype and len(shape) == len(mine_shape)
            and shape[:2] == mine_shape[:2] and shape[3:] == mine_shape[3:] and 0 < shape[2] <= mine_shape[2]
            for (dtype, shape), (mine_dtype, mine_shape) in zip(layout.groups, mine.groups)
        )  # fmt: skip

    def _is_layer(self, shape: Sequence[int], pair: int, layers: int, tokens: int, width: int) -> bool:
        """Return whether a shape is one of a layer: that of a chunk, which is (keys and values, layers, tokens, width),
        without the layers, in the order of this engine's form, of a full chunk or a part of one."""
        if self._layer_form is MemoryFormat.KV_MLA_FMT:
            wanted: tuple[int, ...] = (0, width)
        else:
            wanted = (pair, 0, width) if self._layer_form is MemoryFormat.KV_2TD else (0, pair, width)
        return len(shape) == len(wanted) and all(
            have == want if want else 0 < have <= tokens for have, want in zip(shape, wanted)
        )

    # -- put ----------------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: Any) -> None:
        """Store a chunk, unless it is stored."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Return True: many chunks cost one exchange."""
        return True

    async def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[Any]) -> None:
        """Store the chunks that are not stored."""
        await self._threaded("put", None, self._store, keys, memory_objs)

    def _store(self, keys: Sequence[CacheEngineKey], objs: Sequence[Any]) -> None:
        good = []
        for at, obj in enumerate(objs):
            if too_large(obj):
                self._complain("large", "a chunk of %d bytes, with its layout, is too large for one value (%d bytes): "
                               "make chunk_size smaller", obj.get_size(), VALUE_BYTES_MAX)  # fmt: skip
            else:
                good.append(at)
        if not good:
            return
        self._registrar.tell("", self._schemes)
        sources = [self._arena.source(objs[at]) for at in good]
        statuses = self._client.put_digests(self._digests([keys[at] for at in good]), sources, True)
        failed = [status for status in statuses if status != Status.OK]
        if failed:
            self._complain("put", "%d chunks were not stored: %s", len(failed), STATUS_NAMES[failed[0]])

    # -- the rest -----------------------------------------------------------------------------------

    def support_ping(self) -> bool:
        """Return True."""
        return True

    async def ping(self) -> int:
        """Return 0 if a worker or a manager is reached, else 1."""
        return 0 if self._harmless("ping", False, reachable, self._client) else 1

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a chunk; return whether it was stored."""
        return self._harmless("remove", False, lambda: self._client.delete_digests(self._digests([key])) == [Status.OK])

    async def list(self) -> list[str]:
        """Return nothing: SiMM keeps digests of keys, not the keys."""
        return []

    async def close(self) -> None:
        """Close the connection. Later calls find nothing and store nothing."""
        try:
            await in_own_thread(self._harmless, "close", None, self._end)
        except Exception as exc:  # without memory, say
            self._complain("close", "close failed, the engine goes on without it: %s", str(exc), trace=True)

    def _end(self) -> None:
        with self._complain.ending("a registration"):
            self._arena.close()
        self._registrar.close()
        if self._owns:
            self._client.close()


def _options(
    url: str, plugin_name: str | None, extra: Mapping[Any, Any], listed: Collection[str]
) -> dict[str, Any]:  # fmt: skip
    """Return the options that an address and LMCache's configuration give. Raises RuntimeError for unknown ones.

    ``listed``: the plugins that LMCache has connections to.
    """
    found: dict[str, Any] = {}
    if url.startswith(_SCHEMA):
        parts = urlsplit(url)
        found = dict(parse_qsl(parts.query))
        unknown = set(found) - set(_OPTIONS)
        if unknown:
            raise RuntimeError(f"SiMM: {url} has the options {sorted(unknown)}; there are {', '.join(_OPTIONS)}")
        if parts.netloc:
            found.setdefault("manager_address", parts.netloc)
    name = plugin_name or _plugin_of(url)
    head = f"{_HEAD}{name}."
    _check_names([each for each in map(str, extra) if each.startswith(_HEAD)], name, listed)
    for option in _OPTIONS:
        value = extra.get(head + option)
        if value not in (None, ""):
            found.setdefault(option, value)
    return found


def _plugin_of(url: str) -> str:
    """Return the plugin whose options an address takes."""
    return url[len(_PLUGIN) :] if url.startswith(_PLUGIN) else _TYPE


def _check_names(names: Sequence[str], name: str, listed: Collection[str]) -> None:
    """Raise RuntimeError for settings that are no option of a plugin of this type. Warn of what may be another's.

    A name is a plugin's, a dot, and an option: ``simm.b.salt`` is of the plugin ``simm.b``. Where the plugin is none,
    nobody reads it, and a mistyped ``weight_version`` would have this engine read chunks of other weights.
    """
    parts = {each: each.removeprefix(_HEAD).rpartition(".") for each in names}
    known = {name, *listed, *(plugin for plugin, _, last in parts.values() if last in _OF_LMCACHE)}
    wrong: list[str] = []
    doubtful: list[str] = []
    for each, (plugin, _, last) in sorted(parts.items()):
        ours = extract_plugin_type(plugin).lower() == _TYPE
        if each.startswith(f"{_HEAD}{name}.") and last not in (*_OPTIONS, *_OF_LMCACHE):
            wrong.append(each)
        elif plugin not in known and (ours or last in _OPTIONS):
            (wrong if ours else doubtful).append(each)
    if wrong:
        raise RuntimeError(
            f"SiMM: extra_config has {', '.join(wrong)}; options are {', '.join(_OPTIONS)}, "
            f"of the plugins {', '.join(sorted(known))}"
        )
    if doubtful:
        _warn(f"extra_config has {', '.join(doubtful)}, of no plugin in remote_storage_plugins: SiMM does not read it")


def _numbers_of(metadata: Any, options: dict[str, Any]) -> str:
    """Return how an engine's numbers are kept as far as its keys do not say it; "" for nothing, or if not known."""
    if str(getattr(metadata, "kv_dtype", "")).removeprefix("torch.") not in _BYTES:
        return vllm_facts.uncommon_fp8()
    try:
        return remembered(metadata, lambda: vllm_facts.numbers_of(vllm_config()))
    except AttributeError:  # another engine, or another vLLM
        if not options.get("weight_version"):
            log.warning(
                "the KV cache's numbers are kept as bytes, and it is not known how: engines with another "
                "kv-cache-dtype, or with GPUs of another kind, need a weight_version or a namespace each, else they "
                "read each other's chunks"
            )
        return vllm_facts.uncommon_fp8()


def _warn_of_keys(config: Any) -> None:
    """Warn of what two prompts can have in common that LMCache takes for one."""
    if hashes_weakly(str(getattr(config, "pre_caching_hash_algorithm", ""))):
        _warn(
            "LMCache's hash lets anybody make prompts with equal hashes: a user of a shared engine can replace another "
            "one's chunks. Set LMCACHE_PRE_CACHING_HASH_ALGORITHM=sha256_cbor; without vLLM, use LMCache's server"
        )
    engine = vllm_config()
    if getattr(engine, "lora_config", None) is not None:
        _warn(_MISSING.format("LoRA adapters"))
    if getattr(getattr(engine, "model_config", None), "enable_prompt_embeds", False):
        _warn(_MISSING.format("prompt embeddings"))


@functools.cache
def _warn(text: str) -> None:
    """Log a warning once in a process: LMCache makes connections anew."""
    log.warning(text)


def _dtype(name: str) -> Any:
    """Return torch's data type of a name, None for ``none``. Raises UsageError for what is none."""
    if name != "none" and name not in _DTYPES:
        raise UsageError(f"{name} is no data type")
    return _DTYPES.get(name)
