"""Clients that reach one data server by shared memory only, as if each of the others were on a host of its own."""

from __future__ import annotations

from typing import Any

import pytest

from simm.client import Client
from simm.sdk.routing import Routes
from simm.sdk.worker_path import Target


class HostClient(Client):
    """A client on the host of the data server ``home``. It needs :func:`separate`."""

    def __init__(self, home: str, *arguments: Any, **named: Any) -> None:
        self._home = home
        super().__init__(*arguments, **named)

    def _connect(self, options: Any) -> Routes:
        self._epoch.home = self._home  # type: ignore[attr-defined]  # what all of its targets know
        return super()._connect(options)


def separate(patch: pytest.MonkeyPatch) -> None:
    """Let the targets of a :class:`HostClient` be reached by shared memory at its home only."""
    connect_shm = Target._connect_shm

    def only_at_home(target: Target) -> Any:
        home = getattr(target._context.epoch, "home", None)
        if home not in (None, target.info.node):
            return None, "it is on another host", False
        return connect_shm(target)

    patch.setattr(Target, "_connect_shm", only_at_home)
