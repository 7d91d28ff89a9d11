"""Calls on groups: keys that are of no use without each other (docs/groups.md)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from ...arena.hashing import hash_tag
from ...constants import GROUP_KEYS_MAX
from ...errors import UsageError
from ...wire.status import Status
from ..batch import awaitable, source_of

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ...config.client_options import ClientOptions
    from ..writes import Puts


class GroupCalls:
    """A part of :class:`simm.client.Client`."""

    _hasher: Hasher
    _options: ClientOptions
    _puts: Puts
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

    def put_digests(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        """Store values; return a Status for each."""
        raise NotImplementedError

    def exists_digests(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each whether it is stored."""
        raise NotImplementedError

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; return a Status for each."""
        raise NotImplementedError

    def put_group(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        """Store values that are of no use without each other: all of them, or none. They are evicted together, too.

        The keys need one hash tag, as ``"page{1f3a}/k"`` and ``"page{1f3a}/v"`` have, and are 64 at most. If it returns
        False, none of the keys has a value, unless a server did not answer. Raises UsageError.
        """
        return self.put_groups([keys], [values])[0]

    def put_groups(self, groups: Sequence[Sequence[str]], values: Sequence[Sequence[Any]]) -> list[bool]:
        """:meth:`put_group` for many groups, each with a list of values. No key may be in two of them."""
        if self._options.replicas == 2:
            raise UsageError("groups need a client with replicas=1: second copies of members are on different servers")
        if len(groups) != len(values):
            raise UsageError(f"{len(groups)} groups and {len(values)} lists of values")
        for keys, each in zip(groups, values):
            if len(keys) != len(each):
                raise UsageError(f"{len(keys)} keys of a group and {len(each)} values")
        digests = [self._hasher.many(keys) for keys in groups]
        for keys in groups:
            check_group(keys)
        flat = list(chain.from_iterable(digests))
        if len(set(flat)) < len(flat):
            raise UsageError("a key is in two groups of one call")
        if not flat:
            return []
        statuses = self.put_digests(flat, [source_of(value) for value in chain.from_iterable(values)])
        done = _all_of(list(map(len, digests)), [status == Status.OK for status in statuses])
        marked = [at for at, each in enumerate(digests) if done[at] and len(each) > 1]
        if marked:
            for at, status in zip(marked, self._puts.group([digests[at] for at in marked])):
                done[at] = status == Status.OK
        # What a failed put has left in place would be mixed with what was stored.
        spare = [digest for each, whole in zip(digests, done) if not whole for digest in each]
        if spare:
            self.delete_digests(spare)
        return done

    def exists_groups(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """Return for each group whether all its keys are stored; False also if a server cannot be reached."""
        for text in (keys for keys in groups if isinstance(keys, str)):
            self._hasher.many(text)  # which says what is wrong
        sizes = list(map(len, groups))
        if not all(sizes):
            raise UsageError("a group has at least 1 key; one is empty")
        return _all_of(sizes, self.exists_digests(self._hasher.many([*chain.from_iterable(groups)])))

    put_group_async = awaitable(put_group)
    put_groups_async = awaitable(put_groups)
    exists_groups_async = awaitable(exists_groups)


def _all_of(sizes: Sequence[int], answers: Sequence[bool]) -> list[bool]:
    """Return for each group of so many keys whether the answers are true for all of them. The answers are one list."""
    if False not in answers:
        return [True] * len(sizes)
    return [False not in answers[end - size : end] for size, end in zip(sizes, accumulate(sizes))]


def check_group(keys: Sequence[str]) -> None:
    """Raise UsageError unless these keys can be a group. Each is a good key."""
    if not 0 < len(keys) <= GROUP_KEYS_MAX:
        raise UsageError(f"a group has 1 to {GROUP_KEYS_MAX} keys, not {len(keys)}")
    if len(set(keys)) < len(keys):
        raise UsageError("a key is in its group twice")
    tags = {hash_tag(key) for key in keys}
    if len(keys) > 1 and (len(tags) > 1 or "" in tags):
        raise UsageError(
            'the keys of a group need one hash tag in braces, as "page{1f3a}/k" and "page{1f3a}/v" have: '
            f"these are {keys[0][:80]!r} and others"
        )
