"""An engine's host pools: memory in which pages lie, each in one or more pieces.

A pool is an object of the engine. What is asked of it: ``get_page_buffer_meta(indices)``, which returns the addresses
and the sizes of all pieces of some pages, page after page; ``page_size``, in tokens; and what ``GEOMETRY`` names, as
far as it has it. One page is one value, or one for each group of heads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ...errors import UsageError
from ...host.buffers import Pieces, Ranges, Span
from ...sdk.batch import span_of
from ..keyspace import identity

log = logging.getLogger("simm.connectors")

#: (address, bytes) of a piece of a page.
Piece = tuple[int, int]

#: What a host pool says of the form of its pages, as far as it has it.
GEOMETRY: Final = (
    "dtype", "layout", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "head_group_num", "element_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
    "dsa_kv_cache_store_fp8", "size_per_token", "item_bytes", "slot_page_size", "page_aligned_only", "index_head_dim",
    "indexer_dtype", "indexer_page_stride_size", "num_mamba_layers", "temporal_dtype", "temporal_state_elem_size",
    "conv_dtype", "conv_state_elem_sizes", "conv_state_shapes", "dcp_size", "storage_format_tag",
)  # fmt: skip
#: What a device's pool says of the order of its numbers, as far as it has it.
_ORDERS: Final = ("kv_cache_layout", "kv_layout")


def geometry_of(host: Any) -> dict[str, Any]:
    """Return what a host pool says of the form of its pages, and in which order the device's numbers lie in them.

    Pages are copies of the device's memory: ``layout`` is that of the host's alone.
    """
    known = {name: getattr(host, name, None) for name in GEOMETRY}
    orders = [str(getattr(getattr(each, "buffers", None), "layout", None))
              for each in getattr(host, "_buffer_infos", None) or ()]  # fmt: skip
    device = getattr(host, "device_pool", None)
    orders += [str(order) for order in (getattr(device, name, None) for name in _ORDERS) if order is not None]
    return {**known, "device_layout": orders or None}


def head_of(pool: str, facts: dict[str, Any], weights: str) -> str:
    """Return the head of the keys of values of these facts, with these weights."""
    return f"{pool}/{identity({**facts, 'weight_version': weights})}/"


class HostPool:
    """A registered host pool: where its pages are, and the identities of what they hold."""

    def __init__(self, name: str, host: Any, facts: list[dict[str, Any]]) -> None:
        self.name = name
        self.host = host
        #: For each value of a page, without the weight version.
        self.facts = facts
        self.page_tokens = max(1, int(getattr(host, "page_size", 1) or 1))
        #: A pool without memory only numbers the pages of the others.
        self.logical = getattr(host, "kv_buffer", self) is None
        self.spans: list[Span] = []
        self._heads: dict[str, list[str]] = {}

    @property
    def values(self) -> int:
        """How many values a page consists of."""
        return len(self.facts)

    def heads(self, weights: str) -> list[str]:
        """Return the heads of the keys of a page's values, with these weights; log each identity once."""
        found = self._heads.get(weights)
        if found is None:
            found = []
            for facts in self.facts:
                head = head_of(self.name, facts, weights)
                log.info("pool %s is stored as %s: %s", self.name, head, {**facts, "weight_version": weights})
                found.append(head)
            self._heads[weights] = found
        return found

    def keys(self, hashes: Iterable[str], weights: str) -> list[str]:
        """Return the keys of pages, those of a page's values together."""
        heads = self.heads(weights)
        return [head + page for page in hashes for head in heads]

    def pieces(self, indices: Any, pages: int) -> list[list[Piece]]:
        """Return the pieces of memory of each value of pages. Raises what the pool raises, UsageError."""
        if len(indices) != pages * self.page_tokens:
            raise UsageError(f"{len(indices)} indices are not {pages} pages of {self.page_tokens} tokens")
        if self.values > 1:
            addresses, sizes = self.host.get_split_heads_page_buffer_meta(indices, self.values)
        else:
            addresses, sizes = self.host.get_page_buffer_meta(indices)
        values = pages * self.values
        per, rest = divmod(len(addresses), values)
        if rest or not per or len(sizes) != len(addresses):
            raise UsageError(f"pool {self.name} has {len(addresses)} pieces of memory for {values} values")
        flat = list(zip(map(int, addresses), map(int, sizes)))
        return [flat[at : at + per] for at in range(0, len(flat), per)]

    def span(self, address: int, size: int) -> Span:
        """Return a piece of memory, with its registration if it has one."""
        for each in self.spans:
            if each.address <= address and address + size <= each.address + each.size:
                return each.part(address - each.address, size)
        return Span(address, size)


def buffers(host: Any) -> list[Any]:
    """Return the tensors of a host pool, without empty ones."""
    get = getattr(host, "get_hybrid_pool_buffer", None)
    found = get() if get is not None else getattr(host, "kv_buffer", None)
    listed = found if isinstance(found, (list, tuple)) else [found]
    return [each for each in listed if each is not None and each.numel()]


def of_pages(values: list[bool], per: int) -> list[bool]:
    """Return for each page whether all of its values are true."""
    return values if per == 1 else [all(values[at : at + per]) for at in range(0, len(values), per)]


def sinks_of(values: Sequence[tuple[HostPool, list[Piece]]]) -> list[Span]:
    """Return values' memory as get takes it. ``least`` of each is the size that its value must have. O(pieces).

    All of a batch are ranges if one is, as the client reads either kind in one way.
    """
    if all(len(pieces) == 1 for _, pieces in values):
        spans = [pool.span(*pieces[0]) for pool, pieces in values]
        for span in spans:
            span.least = span.size
        return spans
    sinks: list[Span] = []
    for pool, pieces in values:
        parts = []
        offset = 0
        for address, size in pieces:
            parts.append((offset, size, address, pool.span(address, size)))
            offset += size
        sinks.append(Ranges(parts, offset, offset))
    return sinks


def source(pool: HostPool, pieces: list[Piece]) -> Span:
    """Return a value's memory as put takes it."""
    spans = [pool.span(*each) for each in pieces]
    return spans[0] if len(spans) == 1 else Pieces(list(spans))


def whole(place: Any, size: Any) -> Span:
    """Return a tensor's memory, or memory by address and size, as a span of just that size. Raises UsageError."""
    if isinstance(place, int):
        span = Span(place, int(size))
    else:
        span = span_of(place)
        span = span.part(0, span.size)
    span.least = span.size
    return span
