"""What simm.connectors.vllm needs of vLLM, for tests without it.

``install`` puts the modules in place; the tier is then imported anew, and gone again with the test.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tests.support.fake_modules import imported_over

#: Bytes of a chunk, and rows of the primary tier.
BYTES = 64
ROWS = 8


class Words(enum.Enum):
    """``Locality``, ``LookupResult`` and ``Medium``."""

    LOCAL = "LOCAL"
    HIT = "HIT"
    MISS = "MISS"
    RETRY = "RETRY"
    STORAGE = "STORAGE"


class Key(NamedTuple):
    """``OffloadKey``."""

    hash: bytes
    group: int = 0


@dataclass
class Context:
    """``ReqContext``."""

    req_id: str


@dataclass
class Job:
    """``TransferJob``."""

    job_id: int
    keys: Collection[Key]
    chunk_ids: Sequence[int]
    is_promotion: bool
    req_context: Context


@dataclass
class Result:
    """``JobResult``."""

    job_id: int
    success: bool
    successful_keys: Collection[Key] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class Event:
    """``OffloadingEvent``."""

    keys: list[Key]
    medium: Any
    removed: bool
    locality: Any = None


class Base:
    """``SecondaryTierManager``."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.block_size_bytes = BYTES


@dataclass
class Probe:
    """``LookupState``: what is known of a key, for all requests that have asked."""

    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """``AsyncLookupManager`` without a thread: it looks up at the end of a step, or while it is ``held`` when told."""

    def __init__(self, tier_type: str) -> None:
        self.probes: dict[Any, Probe] = {}
        self.asked: list[tuple[Any, Any, Probe]] = []
        self.held = False

    def batch_lookup(self, keys: list[Any], context: Any) -> Any:
        raise NotImplementedError

    def lookup(self, key: Any, context: Any) -> bool | None:
        if key not in self.probes:
            self.probes[key] = Probe()
            self.asked.append((key, context, self.probes[key]))
        self.probes[key].requests.add(context.req_id)
        return self.probes[key].found

    def flush(self) -> None:
        if not self.held:
            self.answer()

    def answer(self) -> None:
        """Look up what was asked, each key for whoever was the first."""
        asked, self.asked = self.asked, []
        for key, context, probe in asked:
            (probe.found,) = self.batch_lookup([key], context)
            if not probe.requests:
                del self.probes[key]

    def cleanup(self, number: str) -> None:
        for key, probe in list(self.probes.items()):
            probe.requests.discard(number)
            if not probe.requests and probe.found is not None:
                del self.probes[key]

    def mark_miss(self, keys: Any) -> None:
        for key in keys:
            if key in self.probes:
                self.probes[key].found = False

    def shutdown(self) -> None:
        """Nothing is running."""


class Mapper:
    """``FileMapper``."""

    rank = 0
    fields = {"model_name": "org/model", "dtype": "float16"}

    @classmethod
    def from_offloading_spec(cls, **_: Any) -> Mapper:
        return cls()


def spec() -> Any:
    """Return an ``OffloadingSpec``."""
    return SimpleNamespace(
        config=SimpleNamespace(kv_cache_layout="LBNHC", groups=()), blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )  # fmt: skip


def memory() -> Any:
    """Return the memory of a primary tier."""
    return np.zeros((ROWS, BYTES), np.uint8)


@contextmanager
def install() -> Iterator[Any]:
    """Yield simm.connectors.vllm over the fake."""
    named: dict[str, dict[str, Any]] = {
        "vllm.v1.kv_offload.base": {
            "Locality": Words, "LookupResult": Words, "Medium": Words, "OffloadingEvent": Event,
            "RequestOffloadingContext": SimpleNamespace, "get_offload_block_hash": lambda key: key.hash,
            "get_offload_group_idx": lambda key: key.group,
        },
        "vllm.v1.kv_offload.file_mapper": {"FileMapper": Mapper},
        "vllm.v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": Lookups},
        "vllm.v1.kv_offload.tiering.base": {"JobResult": Result, "SecondaryTierManager": Base},
        "vllm.v1.metrics.cache_hit_source": {
            "CacheHitSource": SimpleNamespace(HOST="host", EXTERNAL_UNSPECIFIED="external")
        },
    }  # fmt: skip
    modules: dict[str, Any] = {}
    for name, content in named.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(modules[name]).update(content)
    with imported_over("simm.connectors.vllm", modules) as imported:
        yield imported
