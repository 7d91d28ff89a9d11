"""The calls of a client that traces, and the switch.

A client that does not trace must not pay for the possibility: not an attribute, not a branch. So nothing in its calls
knows of tracing. :func:`switch_on` gives the client and its parts another class, a subclass without state of the one
that they have, and :func:`switch_off` gives the first one back. Both are a few assignments, each of which takes effect
at once for the calls that begin after it. A call that is in progress goes on as it began.

While a client traces, each call that nobody records costs the decision: two context variables and a random number.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from ...ipc.put import ShmPut
from ...tracing.slow import SLOW
from ...tracing.spans import CURRENT, DIGEST_BYTES, Decision, Operation
from ..reads import Gets
from ..remote_reads import RemoteReads
from ..writes import Puts
from .parts import TracedGets, TracedPuts, TracedRemoteReads, TracedShmPut, plain_tcp

#: Method -> the operation, and how its result tells what was done: ``true`` values, lengths above 0, or statuses 0.
CALLS: Final = {
    "put": ("put", "true"), "put_digest": ("put", "status"),
    "put_many": ("put", "true"), "put_digests": ("put", "status"), "put_mixed": ("put", "status"),
    "put_gather": ("put", "true"), "put_gather_many": ("put", "true"),
    "get": ("get", "true"), "get_into": ("get", "true"), "get_digest": ("get", "length"), "view": ("get", "true"),
    "get_many": ("get", "true"), "get_into_many": ("get", "true"), "get_digests": ("get", "length"),
    "get_digest_at_owner": ("get", "length"), "get_into_many_at_owner": ("get", "true"),
    "get_mixed": ("get", "length"), "get_ranges": ("get", "true"), "get_ranges_many": ("get", "true"),
    "exists": ("exists", "true"), "exists_digest": ("exists", "true"), "exists_many": ("exists", "true"),
    "exists_digests": ("exists", "true"),
    "delete": ("delete", "true"), "delete_many": ("delete", "true"), "delete_digests": ("delete", "status"),
    "delete_sized": ("delete", "status"),
}  # fmt: skip
_DONE: Final[dict[str, Callable[[Any], bool]]] = {
    "true": bool, "length": lambda got: int(got) > 0, "status": lambda status: int(status) == 0,
}  # fmt: skip
#: What a part of a client becomes while it traces.
PARTS: Final[dict[type, type]] = {
    Gets: TracedGets, Puts: TracedPuts, ShmPut: TracedShmPut, RemoteReads: TracedRemoteReads,
}  # fmt: skip
_PLAIN: Final = {traced: plain for plain, traced in PARTS.items()}


def _describe(client: Any, operation: Operation, first: Any, result: Any, done: Callable[[Any], bool]) -> None:
    """Say how many keys an operation was about, how many of them it did, and which one the only one was."""
    about = operation.about
    if isinstance(result, list):
        about["keys"] = len(result)
        about["done"] = sum(map(done, result))
        return
    about["keys"], about["done"] = 1, int(done(result))
    if isinstance(first, (str, bytes)):
        digest = first if isinstance(first, bytes) else client.digest(first)
        about["key"] = digest[:DIGEST_BYTES].hex()
        if operation.name == "exists" and "path" not in about:
            # No part was asked: the client has looked into an arena itself, or has none.
            target = client._routes.target(digest)
            if target is not None and target.reader is not None:
                operation.by("shm")
                operation.segment("locate", operation.began, time.monotonic_ns())


def _traced(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the traced form of a client's method."""
    label, kind = CALLS[name]
    done = _DONE[kind]

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        decision: Decision = self._decision
        operation = decision.begin(label) if CURRENT.get() is None else None
        if operation is None:
            return method(self, *arguments, **named)
        token = CURRENT.set(operation)
        try:
            result = method(self, *arguments, **named)
        except BaseException as exc:
            operation.about["error"] = type(exc).__name__[:40]
            raise
        else:
            first = arguments[0] if arguments else named.get("key", named.get("digest"))
            _describe(self, operation, first, result, done)
            return result
        finally:
            CURRENT.reset(token)
            if decision.end(operation):
                SLOW.write(operation)

    return call


async def _in_thread(self: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Do :meth:`Client.in_thread`, with the caller's trace."""
    method: Callable[..., Coroutine[Any, Any, Any]] = self._plain.in_thread
    return await method(self, contextvars.copy_context().run, call, *arguments)


_CLASSES: Final[dict[type, type]] = {}


def traced_class(plain: type) -> type:
    """Return the class of a client that traces. It adds no state, so an instance of ``plain`` can become one."""
    if (known := _CLASSES.get(plain)) is not None:
        return known
    methods: dict[str, Any] = {name: _traced(name, getattr(plain, name)) for name in CALLS if hasattr(plain, name)}
    about = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    made = type(plain.__name__, (plain,), {**methods, **about, "in_thread": _in_thread, "_plain": plain})
    return _CLASSES.setdefault(plain, made)  # the first of two threads


def _parts_of(client: Any) -> Sequence[Any]:
    gets = client._gets
    found = [gets, gets._remote, client._puts, client._shm]
    near = getattr(client, "_near", None)
    if near is None:
        return found
    from . import near as of_near  # few clients have near copies

    if not of_near.PARTS.items() <= PARTS.items():
        PARTS.update(of_near.PARTS)
        _PLAIN.update((traced, plain) for plain, traced in of_near.PARTS.items())
    return [*found, *of_near.parts_of(near)]


def switch_on(client: Any, decision: Decision) -> None:
    """Let a client trace from its next call on, or trace otherwise than it does."""
    client._decision = decision
    if getattr(client, "_near", None) is not None:
        client._near._decision = decision
    for part in _parts_of(client):
        if (traced := PARTS.get(type(part))) is not None:
            part.__class__ = traced
    if not traces(client):
        client.__class__ = traced_class(type(client))


def switch_off(client: Any) -> None:
    """Give a client and its parts the classes back that they had. Twice is harmless."""
    if traces(client):
        client.__class__ = type(client)._plain
    for part in _parts_of(client):
        if (plain := _PLAIN.get(type(part))) is not None:
            part.__class__ = plain
    router = client._router
    for target in list(router.targets.values()) if router is not None else ():
        plain_tcp(target)


def traces(client: Any) -> bool:
    """Return whether a client traces."""
    return "_plain" in type(client).__dict__
