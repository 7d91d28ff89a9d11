"""What SiMM's two adapters for LMCache need of LMCache, for tests without it: names, keys, memory objects, a backend.

``engine`` and ``server`` put the modules in place; an adapter is then imported anew, and gone again with the test.
"""

from __future__ import annotations

import enum
import math
import os
import select
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_modules import imported_over
from tests.support.waiting import WAIT_S

CHUNK = 16
LAYERS = 3
HEADS = 2
HEAD = 4
WIDTH = HEADS * HEAD


class MemoryFormat(enum.Enum):
    KV_2LTD = 1
    KV_T2D = 2
    KV_2TD = 3
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA_FMT = 6
    EC_TD = 7


class Dtype:
    """A data type of torch's; all have two bytes here."""

    itemsize = 2

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16, FLOAT16 = Dtype("bfloat16"), Dtype("float16")


@dataclass(frozen=True)
class CacheEngineKey:
    chunk_hash: int
    model_name: str = "org/model"

    def to_string(self) -> str:
        return f"{self.model_name}@1@0@{self.chunk_hash:x}@bfloat16"


@dataclass(frozen=True)
class LayerCacheEngineKey(CacheEngineKey):
    layer_id: int = 0

    def to_string(self) -> str:
        return f"{super().to_string()}@{self.layer_id}"


class MemoryObj:
    """A memory object, which counts who uses it."""

    def __init__(self, shapes: Any, dtypes: Any, form: MemoryFormat) -> None:
        self.metadata = types.SimpleNamespace(shapes=list(shapes), dtypes=list(dtypes), fmt=form)
        # Of a buffer LMCache's allocator looks at the first dimension alone.
        size = shapes[0][0] if form is MemoryFormat.BINARY_BUFFER else sum(2 * math.prod(shape) for shape in shapes)
        self.byte_array = memoryview(bytearray(size))
        self.references = 1

    def get_memory_format(self) -> MemoryFormat:
        form: MemoryFormat = self.metadata.fmt
        return form

    def get_shape(self) -> Any:
        return self.metadata.shapes[0]

    def get_dtype(self) -> Any:
        return self.metadata.dtypes[0]

    def get_size(self) -> int:
        return len(self.byte_array)

    def ref_count_down(self) -> None:
        self.references -= 1


class Backend:
    """LMCache's memory: what was allocated is in ``made``."""

    def __init__(self) -> None:
        self.made: list[MemoryObj] = []

    def allocate(self, shapes: Any, dtypes: Any, form: MemoryFormat, busy_loop: bool = True) -> MemoryObj:
        assert not busy_loop, "it would wait for memory that its caller holds"
        self.made.append(MemoryObj(shapes, dtypes, form))
        return self.made[-1]

    def used(self) -> int:
        return sum(each.references for each in self.made)


@dataclass
class Config:
    use_layerwise: bool = True
    enable_blending: bool = False
    remote_serde: str = "naive"
    chunk_size: int = CHUNK
    pre_caching_hash_algorithm: str = "builtin"
    extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Metadata:
    use_mla: bool = False
    model_name: str = "org/model"
    world_size: int = 1
    worker_id: int = 0
    kv_dtype: Dtype = BFLOAT16
    chunk_size: int = CHUNK

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        return (LAYERS, 1, CHUNK, 1, WIDTH) if self.use_mla else (LAYERS, 2, CHUNK, HEADS, HEAD)

    def get_shapes(self) -> list[tuple[int, ...]]:
        return [(self.kv_shape[1], LAYERS, CHUNK, WIDTH)]

    def get_dtypes(self) -> list[Dtype]:
        return [self.kv_dtype]


class RemoteConnector:
    def __init__(self, config: Config, metadata: Metadata) -> None:
        self.meta_shapes = metadata.get_shapes()
        self.meta_dtypes = metadata.get_dtypes()
        self.meta_fmt = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD


class ConnectorAdapter:
    def __init__(self, schema: str) -> None:
        self.schema = schema


# -- of the server ---------------------------------------------------------------------------------------------


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, at: int) -> None:
        self._bits[at] = True

    def test(self, at: int) -> bool:
        return self._bits[at]

    def places(self) -> list[int]:
        """Return the numbers of the bits that are set."""
        return [at for at, bit in enumerate(self._bits) if bit]


class L2StoreResult(int):
    def __new__(cls, success: bool, size: int) -> L2StoreResult:
        return super().__new__(cls, size if success else -1)


class L2AdapterInterface:
    """Notes nothing of what it is told."""

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        pass

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        pass

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        pass


class Notifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "org/model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


def object_of(data: bytes) -> MemoryObj:
    """Return an object of the server's, of so many bytes, which are two for each element."""
    made = MemoryObj([(2, 1, 1, len(data) // 4)], [BFLOAT16], MemoryFormat.KV_2LTD)
    made.byte_array[:] = data
    return made


def ended(descriptor: int) -> None:
    """Wait until a task has ended."""
    ready, _, _ = select.select([descriptor], [], [], WAIT_S)
    assert ready
    os.eventfd_read(descriptor)


# -- the modules -----------------------------------------------------------------------------------------------


def _modules(**contents: dict[str, Any]) -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {}
    for name, content in contents.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            made.setdefault(whole, types.ModuleType(whole))
        vars(made[".".join(parts)]).update(content)
    return made


@contextmanager
def engine() -> Iterator[Any]:
    """Yield simm.connectors.lmcache over the fake."""
    modules = _modules(
        lmcache__utils={"TORCH_DTYPE_TO_STR_DTYPE": {BFLOAT16: "bfloat16", FLOAT16: "float16"},
                        "CacheEngineKey": CacheEngineKey, "LayerCacheEngineKey": LayerCacheEngineKey},
        lmcache__v1__memory_management={"MemoryFormat": MemoryFormat},
        lmcache__v1__storage_backend__connector={
            "ConnectorAdapter": ConnectorAdapter, "extract_plugin_type": lambda name: name.split(".")[0]},
        lmcache__v1__storage_backend__connector__base_connector={"RemoteConnector": RemoteConnector},
    )  # fmt: skip
    with imported_over("simm.connectors.lmcache", modules) as imported:
        yield imported


@contextmanager
def server() -> Iterator[Any]:
    """Yield simm.connectors.lmcache_server over the fake."""
    modules = _modules(
        lmcache__lmcache_native={"Bitmap": Bitmap},
        lmcache__v1__distributed__internal_api={"L2StoreResult": L2StoreResult},
        lmcache__v1__distributed__l2_adapters__base={"L2AdapterInterface": L2AdapterInterface},
        lmcache__v1__platform={"create_event_notifier": Notifier},
    )
    with imported_over("simm.connectors.lmcache_server", modules) as imported:
        yield imported


def connector_of(module: Any, client: Any, *, mla: bool = False, **config: Any) -> Any:
    """Return a connector of an engine with these settings, and a backend of its own."""
    return module.SimmConnector(None, Backend(), Config(**config), Metadata(use_mla=mla), client=client)
