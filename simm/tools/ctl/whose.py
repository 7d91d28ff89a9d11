"""Which of this host's workers a command means: those of the cluster whose manager is named.

A folder may have the sockets of several clusters, and the folder that is found without being named may be another
cluster's: that of a unit, beside ``simm local``. A worker's arena says which cluster its values are of, and so does the
manager. What changes something acts on no worker that is known to be another cluster's, and on none that is not known
to be of this one if nobody has chosen the folder.

Without a manager commands go on with the folder that somebody has named, or that ``simm local`` has published.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ...config.settings import Settings
from ...errors import SimmError, UsageError, printable
from ...ipc.segments import inspect
from ..connect import PUBLISHED, manager_client, runtime_dir_named
from .workers import Asked, ask_all


class Meant:
    """The cluster that some settings mean, which :func:`~simm.tools.connect.on_host` has made. It is asked for once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._manager_named = not settings.origin("manager").startswith("default")
        #: Whether the folder can be relied on: somebody has named it, or the manager's process has.
        self._sure = runtime_dir_named(settings)

    @property
    def _any(self) -> bool:
        """Whether the folder alone says what is meant: it is named, and no manager."""
        return not self._manager_named and self._sure and self._settings.origin("runtime_dir") != PUBLISHED

    @functools.cached_property
    def _answer(self) -> tuple[int, str]:
        """The manager's cluster, 0 if it does not tell; and why it may not."""
        try:
            with manager_client(self._settings) as link:
                return cluster_in(link.status()), "it does not say which cluster it is of"
        except SimmError as exc:
            return 0, str(exc)

    def to_look_at(self, asked: Sequence[Asked], cluster: int | None = None) -> list[Asked]:
        """Return the workers without those of other clusters. Raises UsageError if none is left.

        ``cluster``: the manager's, if the caller knows it. Else a manager on loopback is asked, if one is named. All
        are returned if it does not answer.
        """
        if self._any:
            return list(asked)
        if cluster is None:
            near = self._manager_named and any(each.loopback for each in self._settings.manager)
            cluster = self._answer[0] if near else 0
        left = [each for each in asked if not cluster or cluster_of(each) in (0, cluster)]
        return self._some(left, asked)

    def to_change(self, asked: Sequence[Asked]) -> list[Asked]:
        """Return the workers that may be changed. Raises UsageError if none is, or if that cannot be told."""
        if self._any:
            return list(asked)
        cluster, why = self._answer
        folder = self._settings.runtime_dir
        if not cluster and self._manager_named and not self._sure:
            raise UsageError(
                f"nothing was done, as it cannot be told whether the data servers in {folder} are of the cluster that "
                f"--manager names: name their folder with --runtime-dir, if so ({printable(why)})"
            )
        if not cluster:
            return list(asked)
        its = (0, cluster) if self._sure else (cluster,)
        return self._some([each for each in asked if cluster_of(each) in its], asked)

    def servers_to_change(self, server: str = "") -> frozenset[str] | None:
        """Return the names of data servers that may be changed, by their workers; None: all. Raises UsageError."""
        if self._any:
            return None
        asked = ask_all(self._settings.runtime_dir, server, self._settings.server_uid)
        return frozenset(each.server for each in self.to_change(asked))

    def _some(self, left: list[Asked], asked: Sequence[Asked]) -> list[Asked]:
        if asked and not left:
            managers = ",".join(map(str, self._settings.manager))
            raise UsageError(
                f"no data server in {self._settings.runtime_dir} is known to be of the cluster of the manager "
                f"{managers}: name its folder with --runtime-dir, or its manager with --manager"
            )
        return left


def cluster_in(status: Mapping[str, Any]) -> int:
    """Return the cluster that a manager's status is of; 0 if it does not say."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return int(status["cluster"], 16)
    return 0


def cluster_of(asked: Asked) -> int:
    """Return the cluster of what a worker stores; 0 if it has stored nothing yet, or its arena cannot be read."""
    with contextlib.suppress(OSError, SimmError):
        return inspect(str(asked.stats["segment"])).cluster if asked.stats else 0
    return 0
