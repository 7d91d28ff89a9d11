"""Groups as ``simm.kv`` has them: codes in place of exceptions, and no group that affects another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ...constants import VALUE_BYTES_MAX
from ...errors import Code, UsageError
from ..batch import awaitable
from ..ops.kv_memory import BlockView, no_source
from .groups import check_group
from .kv_part import StorePart

_INVALID: Final = int(Code.INVALID_ARGUMENT)
_PUT_FAILED: Final = int(Code.PUT_FAILED)


class KvGroups(StorePart):
    """A part of :class:`simm.kv.Store`."""

    def put_group(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> int:
        """Store the views' bytes under keys with one hash tag, all or none; return 0 or a negative code."""
        return self.mput_groups([keys], [blocks])[0]

    def mput_groups(self, groups: Sequence[Sequence[str]], blocks: Sequence[Sequence[BlockView]]) -> list[int]:
        """:meth:`put_group` for many groups, each with a list of views; return a code for each."""
        codes = [_INVALID] * len(groups)
        client = self._client
        if client is None or len(groups) != len(blocks):
            self._refuse(len(groups), "%d groups and %d lists of views, or a closed store", len(groups), len(blocks))
            return codes
        good: list[int] = []
        taken: set[str] = set()
        for at, (keys, views) in enumerate(zip(groups, blocks)):
            if problem := self._problem(client, keys, views, taken):
                self._refuse(1, "%s", problem)
                continue
            taken.update(keys)
            good.append(at)
        try:
            done = client.put_groups(
                [groups[at] for at in good], [[view._piece for view in blocks[at]] for at in good]
            )
        except UsageError as exc:  # another thread has just closed it, or it stores two copies
            self._refuse(len(good), "%s", exc)
            return codes
        for at, stored in zip(good, done):
            codes[at] = 0 if stored else _PUT_FAILED
        return codes

    @staticmethod
    def _problem(client: Any, keys: Sequence[str], views: Sequence[BlockView], taken: set[str]) -> str:
        """Return what is wrong with a group; empty if nothing is."""
        try:
            client._hasher.many(keys)
            check_group(keys)
            if len(keys) != len(views):
                return f"{len(keys)} keys of a group and {len(views)} views"
            if not taken.isdisjoint(keys):
                return "a key is in two groups of one call"
            return next(filter(None, map(_no_member, views)), "")
        except (UsageError, TypeError) as exc:
            return str(exc)

    def exists_group(self, keys: Sequence[str]) -> bool:
        """Return whether all keys of a group are stored; False also if that cannot be found out."""
        return self.mexists_groups([keys])[0]

    def mexists_groups(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """:meth:`exists_group` for many groups."""
        client = self._client
        if client is None:
            self._refuse(len(groups), "the store is closed")
            return [False] * len(groups)
        try:
            found: list[bool] = client.exists_groups(groups)
            return found
        except (UsageError, TypeError) as exc:
            if len(groups) == 1:
                self._refuse(1, "%s", exc)
                return [False]
        return [self.mexists_groups([keys])[0] for keys in groups]

    put_group_async = awaitable(put_group)
    mput_groups_async = awaitable(mput_groups)
    exists_group_async = awaitable(exists_group)
    mexists_groups_async = awaitable(mexists_groups)


def _no_member(view: BlockView) -> str:
    """Return why a view cannot be put as a value of a group, or an empty string."""
    problem = no_source(view)
    if not problem and len(view) > VALUE_BYTES_MAX:  # the client would refuse all groups, not only the one with it
        return f"a value of a group has 1 to {VALUE_BYTES_MAX} bytes, unlike {view!r}"
    return problem
