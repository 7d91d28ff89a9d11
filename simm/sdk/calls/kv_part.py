"""What the parts of ``simm.kv.Store`` need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from ...errors import Code, UsageError
from ...wire.status import Status

_T = TypeVar("_T")

_NO_ROUTE: Final = int(Code.NO_ROUTE)
_PUT_FAILED: Final = int(Code.PUT_FAILED)
_KEY_NOT_FOUND: Final = int(Code.KEY_NOT_FOUND)
_UNAVAILABLE: Final = int(Code.UNAVAILABLE)


def outage(client: Any, digest: bytes) -> int:
    """Return NO_ROUTE if the shard map names no owner, else UNAVAILABLE."""
    try:
        return _UNAVAILABLE if client.owned(digest) else _NO_ROUTE
    except UsageError:  # another thread has just closed it
        return _UNAVAILABLE


def put_code(client: Any, digest: bytes, status: int) -> int:
    """Return the code for a put's Status."""
    if status == Status.UNAVAILABLE:
        return outage(client, digest)
    return _PUT_FAILED if status > 0 else status


def delete_codes(client: Any, digests: list[bytes], _: list[Any], statuses: list[int]) -> list[int]:
    """Replace each Status of a delete by its code, and return them. O(digests)."""
    for at, status in enumerate(statuses):
        if status == Status.NOT_FOUND:
            statuses[at] = _KEY_NOT_FOUND
        elif status > 0:
            statuses[at] = outage(client, digests[at])
    return statuses


def spread(answers: Sequence[_T], positions: Sequence[int], results: list[_T]) -> list[_T]:
    """Write the answers to their positions in the whole batch, and return it."""
    for position, answer in zip(positions, answers):
        results[position] = answer
    return results


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
