"""What connectors register in the store, so that others can make the keys of their pages.

A registration is one deployment's :class:`~.scheme.Scheme`: the model, the scheme's name, tokens of a page, ranks,
pools, namespace, epoch and the scheme's own options. All deployments of a model and scheme are one small value under
:func:`value_key`, in a namespace that connectors and askers agree on. Connectors register at their start and again now
and then:

* The value may be evicted, as any other.
* A process that registers something else drops what it had registered, and what processes had that have ended.
* Two connectors that register at the same moment read the same value, and one of them is lost until it looks again.

What comes out of the store is another process's word. :func:`parse` bounds it, and a scheme checks each field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol

from ..errors import UsageError
from .encodings import short_key
from .scheme import SCHEMES, Scheme, adapters, scheme_of

#: Bounds of a value, and of the deployments in it.
VALUE_BYTES_MAX: Final = 64 << 10
DEPLOYMENTS_MAX: Final = 64
#: Attempts to register while others do.
_ATTEMPTS: Final = 3
#: Processes that a registration names, and characters of a name.
OWNERS_MAX, OWNER_MAX = 32, 128
#: The value of a scope's generation.
GENERATION: Final = Struct("<Q")


class Readable(Protocol):
    """What reading needs of a client: what is read here changes, so a near copy of it would be an old one."""

    def get_into_many_at_owner(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]: ...


class Values(Readable, Protocol):
    """What registering needs of a client."""

    def put(self, key: str, value: Any) -> bool: ...


def value_key(model: str, scheme: str) -> str:
    """Return the key under which the deployments of a model and scheme are."""
    return f"simm.scheme/{scheme}/{blake2b(model.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


class Registered(NamedTuple):
    """A registration, and the processes that have made it, the last ones last."""

    scheme: Scheme
    by: tuple[str, ...] = ()


def parse(value: bytes) -> list[Registered]:
    """Return the registrations of a value, without those that are wrong. O(bytes)."""
    if len(value) > VALUE_BYTES_MAX:
        return []
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return []
    found = []
    for item in items[:DEPLOYMENTS_MAX] if isinstance(items, list) else ():
        by = item.pop("by", None) if isinstance(item, dict) else None
        try:
            scheme = scheme_of(item)
        except UsageError:
            continue  # of a newer version, or nonsense
        owners = by[-OWNERS_MAX:] if isinstance(by, list) else []
        found.append(Registered(scheme, tuple(o for o in owners if isinstance(o, str) and len(o) <= OWNER_MAX)))
    return found


def read(client: Readable, keys: Sequence[str], most: int) -> list[bytes]:
    """Return values of up to ``most`` bytes: empty for a miss, and for a longer one, as anybody may have put."""
    buffers = [bytearray(most) for _ in keys]
    try:
        lengths = client.get_into_many_at_owner(keys, buffers)
    except UsageError:
        if len(keys) == 1:
            return [b""]
        return [value for key in keys for value in read(client, [key], most)]
    return [bytes(buffer[: length or 0]) for buffer, length in zip(buffers, lengths)]


def generation_key(scope: str) -> str:
    """Return the key of what holds a scope's generation: :data:`GENERATION`."""
    return short_key(f"{scope}/generation")


def generation_of(client: Readable, scope: str) -> str:
    """Return the generation of a scope that is stored, as keys have it; empty for none. One round trip."""
    (value,) = read(client, [generation_key(scope)], GENERATION.size)
    number = GENERATION.unpack(value)[0] if len(value) == GENERATION.size else 0
    return f"{number:016x}" if number else ""


def as_value(known: Sequence[Registered], owners: int = OWNERS_MAX) -> bytes:
    """Return the value of these registrations, each with so many names of processes, the last ones."""
    return json.dumps([{**asdict(one), **({"by": by[-owners:]} if by else {})} for one, by in known]).encode()


def register(
    client: Values, scheme: Scheme, by: str = "", *, also: Sequence[Scheme] = (),
    over: Callable[[str], bool] = lambda _: False,
) -> bool:  # fmt: skip
    """Add a deployment to those in the store, and look whether it is there. Return False if it is not.

    Of more than ``DEPLOYMENTS_MAX`` the oldest are dropped; of a value that would be too long, names of processes are,
    then the oldest. One round trip if it is there as the newest one, else three, and more while others register.

    ``by``: the process that registers. What it registered before is dropped, but for ``also``, as far as no other one
    has registered it, too; and that of processes that have ended, as ``over`` knows by their names.
    """
    key = value_key(scheme.model, scheme.scheme)
    for attempt in range(_ATTEMPTS):
        known, owners = parse(*read(client, [key], VALUE_BYTES_MAX)), OWNERS_MAX
        if any(each.scheme == scheme and (not by or by in each.by) for each in known[0 if attempt else -1 :]):
            return True
        known = _with(known, scheme, by, also, over)[-DEPLOYMENTS_MAX:]
        while len(raw := as_value(known, owners)) > VALUE_BYTES_MAX and owners + len(known) > 2:
            owners, known = (owners // 2, known) if owners > 1 else (1, known[1:])
        if len(raw) > VALUE_BYTES_MAX or not client.put(key, raw):  # nobody would read it, nor the others' in it
            return False
    return any(each.scheme == scheme for each in parse(*read(client, [key], VALUE_BYTES_MAX)))


def _with(
    known: Sequence[Registered], scheme: Scheme, by: str, also: Sequence[Scheme], over: Callable[[str], bool]
) -> list[Registered]:
    """Return registrations with another one, which is the newest, and without those that it replaces."""
    kept, owners = [], []
    for each in known:
        if each.scheme == scheme:
            owners = [owner for owner in each.by if owner != by and not over(owner)]
        elif not _replaced(each.scheme, scheme):
            left = tuple(owner for owner in each.by if (owner != by or each.scheme in also) and not over(owner))
            if left or not each.by:  # of a process without a name nobody knows whether it lives
                kept.append(each._replace(by=left))
    return [*kept, Registered(scheme, (*owners, by)[-OWNERS_MAX:] if by else tuple(owners))]


def _replaced(old: Scheme, new: Scheme) -> bool:
    """Return whether a registration says no more: of a generation before a flush, or with fewer adapters."""
    scope = new.options.get("scope")
    before, now = (str(each.options.get("generation", "")) for each in (old, new))
    if scope and old.options.get("scope") == scope and before < now:
        return True
    if _withoutadapters(old) != _withoutadapters(new):
        return False
    return set(adapters(old).items()) <= set(adapters(new).items())


def _withoutadapters(scheme: Scheme) -> dict[str, Any]:
    """Return a registration's fields but for adapters, and for the epoch, of which only the last one is read."""
    fields = asdict(scheme)
    return {**fields, "epoch": 0, "options": {**fields["options"], "loras": ""}}


def registered(client: Readable, model: str) -> list[Scheme]:
    """Return the deployments of a model, of all schemes. One round trip."""
    values = read(client, [value_key(model, scheme) for scheme in SCHEMES], VALUE_BYTES_MAX)
    return [each for value in values if value for each, _ in parse(value) if each.model == model]

