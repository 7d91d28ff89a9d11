"""What the parts of ``simm.kv.Store`` need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


class StorePart:
    """The base of a part of :class:`simm.kv.Store`, which defines these."""

    #: The store's Client, None once closed.
    _client: Any

    def _checked(self, keys: Sequence[str]) -> tuple[Any, ...]:
        raise NotImplementedError

    def _refuse(self, count: int, problem: str, *arguments: Any) -> None:
        raise NotImplementedError

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Run a call of this store in a thread. A cancellation is delivered when its views are no longer in use."""
        raise NotImplementedError
