"""What a store has of a prompt, by the scheme of one deployment: how many tokens an engine of it could load now.

The answer is made of the store's tables alone. Each key that it counts was found during the call, and the generation
of the scheme's scope is the one that holds now. So it holds right after an eviction, a flush and an epoch's advance.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from .groups import GroupKeys, first_needed, restorable
from .registry import Readable, generation_of
from .scheme import Libraries, Request, Scheme, Tokens

#: Keys of one scheme, and of all schemes of a question, that are asked for. Of more the first ones, which say less.
KEYS_MAX: Final = 1 << 20
#: Attempts while values are evicted between two questions.
_ATTEMPTS: Final = 3


class Prefix(Protocol):
    """What a client says of leading keys, see ``Client.prefix``."""

    @property
    def keys(self) -> int: ...

    @property
    def by_host(self) -> Mapping[str, int]: ...

    @property
    def load_ms(self) -> float: ...


class Store(Readable, Protocol):
    """What asking needs of a client."""

    def exists_many(self, keys: Sequence[str]) -> list[bool]: ...

    def prefix(self, keys: Sequence[str], *, group: int = ...) -> Any: ...


class Stored(NamedTuple):
    """The tokens that can be loaded, how many of their keys each host has, and the time that it may take, ms."""

    tokens: int
    by_host: Mapping[str, int]
    load_ms: float


_NOTHING: Final = Stored(0, {}, 0.0)


def stored(
    client: Store, scheme: Scheme, tokens: Tokens, request: Request, *, generations: MutableMapping[str, str],
    libraries: Libraries, keys_max: int = KEYS_MAX,
) -> Stored:  # fmt: skip
    """Return what is stored of a prompt. O(tokens + keys).

    Args:
        generations: of scopes, as one question has read them; those that it lacks are added.
        libraries: see :meth:`Scheme.groups`.
        keys_max: how many keys are asked for at the most.

    Raises UsageError for tokens that are none, and for a registration that contradicts itself.
    """
    behind = int(scheme.options.get("bigram") is True)  # a page of pairs has a part of the token behind it
    pages = min((len(tokens) - behind) // scheme.page, keys_max // scheme.keys_max)
    if pages <= 0:
        return _NOTHING
    generation = _generation(client, scheme, generations)
    if scheme.scope and not generation:
        return _NOTHING
    groups = scheme.groups(tokens[: pages * scheme.page + behind], request, generation=generation, libraries=libraries)
    if len(groups) == 1 and not groups[0].window:
        found: Prefix = client.prefix(groups[0].keys, group=max(1, groups[0].per_block))
        blocks = found.keys // max(1, groups[0].per_block)
        return Stored(blocks * groups[0].block_tokens, found.by_host, found.load_ms)
    most = pages * scheme.page
    for _ in range(_ATTEMPTS):
        most = _restorable(client, groups, most, scheme.page)
        needed = [key for each in groups for key in _needed(each, most)]
        found = client.prefix(needed, group=1)
        if found.keys == len(needed):
            return Stored(most, found.by_host, found.load_ms)
    return _NOTHING


def _generation(client: Store, scheme: Scheme, generations: MutableMapping[str, str]) -> str:
    """Return the generation of a scheme's scope: the later one of those that are stored and registered."""
    if not scheme.scope:
        return ""
    if scheme.scope not in generations:
        generations[scheme.scope] = generation_of(client, scheme.scope)
    return max(generations[scheme.scope], str(scheme.options.get("generation", "")))


def _needed(group: GroupKeys, tokens: int) -> list[str]:
    """Return the keys that an engine loads of a prefix."""
    return group.range(first_needed(group, tokens), tokens // group.block_tokens)


def _restorable(client: Store, groups: Sequence[GroupKeys], most: int, align: int) -> int:
    """Return how many tokens could be restored, by two questions, however many groups there are."""
    whole = [each for each in groups if not each.window]
    counts = [align // each.block_tokens for each in whole]
    per_page = sum(count * each.per_block for each, count in zip(whole, counts))
    if per_page:
        keys = [
            key for page in range(most // align)
            for each, count in zip(whole, counts) for key in each.range(page * count, (page + 1) * count)
        ]  # fmt: skip
        most = client.prefix(keys, group=per_page).keys // per_page * align
    most = most // align * align
    windowed = [key for each in groups if each.window for key in each.range(0, most // each.block_tokens)]
    there = client.exists_many(windowed) if windowed else []
    flags: list[list[bool]] = []
    at = 0
    for each in groups:
        blocks = most // each.block_tokens
        if each.window:
            per = each.per_block
            flags.append([all(there[begin : begin + per]) for begin in range(at, at + blocks * per, per)])
            at += blocks * per
        else:
            flags.append([True] * blocks)
    return restorable(groups, flags, 0, most, align)


__all__ = ["KEYS_MAX", "Stored", "stored"]
