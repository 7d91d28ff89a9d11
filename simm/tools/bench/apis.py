"""The two interfaces that ``simm bench`` can call: ``simm.client``, and ``simm.kv``, which engines call.

Each takes values and buffers as its callers have them: the client as memoryviews, ``simm.kv`` as views of registered
memory, made once. What a call returned is read after its time was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from ...client import Client
from ...errors import SimmError
from .floor import Area, stride_of
from .report import OPERATIONS


class Api(Protocol):
    """An interface under load."""

    def function(self, op: str) -> Callable[..., Any]:
        """Return what a call of ``op`` runs: with keys, and for put and get with handles."""

    def handles(self, area: Area, first: int, count: int, size: int) -> list[Any]:
        """Return rows of an area as calls take them."""

    def stored(self, results: Sequence[Any]) -> list[bool]:
        """Return for the results of puts whether the values were stored."""

    def lengths(self, results: Sequence[Any]) -> list[int | None]:
        """Return the lengths that gets returned, None for a miss."""

    def close(self) -> None:
        """Close what this made."""


class ClientApi:
    """``simm.client``: bare functions over memoryviews."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def function(self, op: str) -> Callable[..., Any]:
        """Return what a call of ``op`` runs."""
        found: Callable[..., Any] = self._view if op == "view" else getattr(self._client, OPERATIONS[op].method)
        return found

    def _view(self, key: str) -> int:
        with self._client.view(key) as view:
            return len(view.data)

    def handles(self, area: Area, first: int, count: int, size: int) -> list[Any]:
        """Return rows as memoryviews."""
        return list(area.rows(first, count, size))

    def stored(self, results: Sequence[Any]) -> list[bool]:
        """Return which values were stored."""
        return list(map(bool, results))

    def lengths(self, results: Sequence[Any]) -> list[int | None]:
        """Return the lengths, None for a miss."""
        return list(results)

    def close(self) -> None:
        """Leave the client to the caller, who made it."""


class KvApi:
    """``simm.kv``: codes, and views of memory that is registered as a whole, as an engine's KV pool is.

    It takes its settings from the environment. Raises SimmError if they are wrong or a manager refuses the store.
    """

    _METHODS: Final[Mapping[str, str]] = {op: op for op in OPERATIONS if op != "view"}

    def __init__(self) -> None:
        from ...kv import Store  # a benchmark of the client has no need of it

        try:
            self._store = Store()
        except RuntimeError as exc:
            raise SimmError(str(exc)) from exc
        self._registered: dict[int, Any] = {}

    def function(self, op: str) -> Callable[..., Any]:
        """Return what a call of ``op`` runs."""
        found: Callable[..., Any] = getattr(self._store, self._METHODS[op])
        return found

    def handles(self, area: Area, first: int, count: int, size: int) -> list[Any]:
        """Return rows as views of the area, which is registered at the first call."""
        from ...kv import BlockView, register_mr

        if area.address not in self._registered:
            self._registered[area.address] = register_mr(area.address, area.size)
        mr, stride = self._registered[area.address], stride_of(size)
        begin = area.address + first * stride
        return [BlockView.from_buffer(begin + number * stride, size, mr) for number in range(count)]

    def stored(self, results: Sequence[Any]) -> list[bool]:
        """Return which values were stored."""
        return [code == 0 for code in results]

    def lengths(self, results: Sequence[Any]) -> list[int | None]:
        """Return the lengths, None for a miss or an outage."""
        return [code if code > 0 else None for code in results]

    def close(self) -> None:
        """Close the store."""
        self._store.close()
