"""Clients of a cluster or of a fake store, and the registries of promises and of fakes that break them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from simm.client import Client
from simm.testing import FakeClient, FakeStore
from tests.support.client_values import WAIT_S


class World:
    """Clients of one cluster, or of one store. They are closed at the end.

    ``down`` takes all servers away and ``up`` brings a new one. Both need a cluster of the test's own.
    """

    def __init__(
        self, connect: Callable[..., Client], namespace: str, down: Callable[[], None], up: Callable[[], None]
    ) -> None:
        self._connect = connect
        self.namespace = namespace
        self.down = down
        self.up = up
        self._stack = contextlib.ExitStack()

    def client(self, **arguments: Any) -> Client:
        """Return a client that has reached its servers."""
        client = self._stack.enter_context(self._connect(**{"namespace": self.namespace, **arguments}))
        assert client.wait_ready(WAIT_S) is True
        return client

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def real(cluster: Any, path: str, namespace: str) -> World:
    """Return clients of a cluster."""

    def connect(**arguments: Any) -> Client:
        return Client(**{"manager": cluster.manager, "path": path, "deadline_s": WAIT_S, **arguments})

    return World(connect, namespace, lambda: cluster.kill("dataserver"), cluster.start_server)


def fake(kind: type[FakeClient] = FakeClient, capacity: str | None = None) -> World:
    """Return fake clients of one store."""
    store = FakeStore(capacity)

    def connect(**arguments: Any) -> Client:
        return kind(**{"store": store, **arguments})

    def down() -> None:
        store.unavailable = True

    def up() -> None:
        store.unavailable = False

    return World(connect, "fakes", down, up)


Promise = Callable[[World], None]
_P = TypeVar("_P", bound=Promise)
_F = TypeVar("_F", bound=type[FakeClient])

#: Promises that a shared cluster can show.
PROMISES: dict[str, Promise] = {}
#: Promises that need a cluster of their own, of 64 MiB.
APART: dict[str, Promise] = {}
#: (name of a promise, fake that breaks it).
BROKEN: list[tuple[str, type[FakeClient]]] = []


def promise(check: _P) -> _P:
    """Register a promise."""
    PROMISES[check.__name__] = check
    return check


def ordered(checks: Mapping[str, Promise], *modules: ModuleType) -> list[str]:
    """Return the names of promises, of these modules or of all, in an order that depends on no import."""
    wanted = {module.__name__ for module in modules} or {check.__module__ for check in checks.values()}
    return sorted(name for name, check in checks.items() if check.__module__ in wanted)


def apart(check: _P) -> _P:
    """Register a promise that needs a cluster of its own."""
    APART[check.__name__] = check
    return check


def breaks(check: Promise) -> Callable[[_F], _F]:
    """Register a fake that breaks a promise."""

    def note(kind: _F) -> _F:
        BROKEN.append((check.__name__, kind))
        return kind

    return note
