"""Which of this host's workers a command means: those of the cluster whose manager is named.

A folder may have the sockets of several clusters, and the folder that is found without being named may be another
cluster's: that of a unit, beside ``simm local``. A worker's arena says which cluster its values are of, and so does the
manager. What changes something acts on no worker that is known to be another cluster's, and on none that is not known
to be of this one if nobody has chosen the folder. Those are named, and the command fails.

The workers of a data server are of one cluster. So one of them speaks for those that do not answer, or whose arenas
cannot be read.

Without a manager commands go on where it is plain what is meant: the folder that somebody has named, or that
``simm local`` has published, or the only one that there is, as long as all in it is of one cluster. A manager that
refuses, or does not answer, is a manager all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ...config.parsers import Address
from ...config.settings import Settings
from ...errors import SimmError, UsageError, printable
from ...ipc.segments import inspect
from ..connect import PUBLISHED, manager_client, runtime_dir_named
from .workers import Asked, ask_all

#: Why nothing is done to a worker, or a data server.
NOT_KNOWN: Final = "it is not known to be of this cluster, so nothing was done to it"
#: A default manager that has not taken a connection by then is there, and hangs; seconds.
_PROBE_S: Final = 1.0


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

    @property
    def _managers(self) -> str:
        return ",".join(map(str, self._settings.manager))

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
        if not cluster:
            return list(asked)
        left = [each for each, its in zip(asked, clusters_of(asked)) if its in (0, cluster)]
        if asked and not left:
            raise self._none()
        return left

    def to_change(self, asked: Sequence[Asked]) -> list[Asked]:
        """Return the workers that may be changed, and without an answer those of which it is not known, with why.

        Raises UsageError if none may be changed, or if that cannot be told.
        """
        if self._any:
            return list(asked)
        its = clusters_of(asked)
        cluster = self._cluster_to_change(asked, its)
        if not cluster or not any(each.stats for each in asked):
            return list(asked)  # who does not answer is not changed, and says why
        found: list[Asked] = []
        changed = False
        for each, of in zip(asked, its):
            if of == cluster or (self._sure and not of):
                found.append(each)
                changed = True
            elif not of:
                why = f"{each.why}; {NOT_KNOWN}" if each.why else NOT_KNOWN
                found.append(dataclasses.replace(each, stats={}, why=why))
        if asked and not changed:
            raise self._none()
        return found

    def servers_to_change(self, names: Collection[str]) -> tuple[frozenset[str], list[str]]:
        """Return the data servers of these that may be changed, and those of which it is not known, by their workers.

        One alone may be changed if none of its workers says of which cluster it is and nothing speaks against it: its
        admin socket serves while they hang. Raises UsageError if none may be changed, or if that cannot be told.
        """
        if self._any:
            return frozenset(names), []
        settings = self._settings
        found: list[Asked] = []
        with contextlib.suppress(UsageError):  # no worker has a socket, as while all of them are started again
            found = ask_all(settings.runtime_dir, "", settings.server_uid)
        asked = [each for each in found if each.server in names]
        its = clusters_of(asked)
        cluster = self._cluster_to_change(asked, its)
        known: dict[str, set[int]] = {}
        for each, of in zip(asked, its):
            known.setdefault(each.server, set()).update({of} - {0})
        beside = set(clusters_of(found)) - {0}
        alone = len(names) == 1 and (beside <= {cluster} if cluster else len(beside) < 2)
        may, unknown = set(), []
        for name in names:
            if cluster in known.get(name, ()) or (not known.get(name) and (self._sure or alone)):
                may.add(name)
            elif not known.get(name):
                unknown.append(name)
        if not may:
            raise self._none(names)
        return frozenset(may), unknown

    def _cluster_to_change(self, asked: Sequence[Asked], its: Sequence[int]) -> int:
        """Return the cluster that may be changed, 0 if nothing tells workers of these apart. Raises UsageError.

        ``its``: the workers' clusters.
        """
        cluster, why = self._answer
        if cluster:
            return cluster
        known = set(its) - {0}
        folder, why = self._settings.runtime_dir, printable(why)
        if not self._sure and (self._manager_named or any(map(_listens, self._settings.manager))):
            raise UsageError(
                f"nothing was done, as it cannot be told whether the data servers in {folder} are of the cluster of "
                f"the manager {self._managers}: name their folder with --runtime-dir, if so ({why})"
            )
        if len(known) > 1:
            raise UsageError(
                f"nothing was done, as the data servers in {folder} are of {len(known)} clusters, and no manager says "
                f"which is meant: make {self._managers} reachable, or name a data server with --server ({why})"
            )
        if not self._sure and not known and len({each.server for each in asked}) > 1:
            raise UsageError(
                f"nothing was done, as it cannot be told whether the data servers in {folder} are of one cluster: "
                f"name their folder with --runtime-dir, or one with --server ({why})"
            )
        if self._manager_named:
            print(
                f"the data servers in {printable(str(folder))} are meant, as the manager could not be asked ({why})",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return next(iter(known), 0)

    def _none(self, servers: Collection[str] = ()) -> UsageError:
        one = f", or one with --server: {', '.join(sorted(servers))}" if len(servers) > 1 else ""
        return UsageError(
            f"no data server in {self._settings.runtime_dir} is known to be of the cluster of the manager "
            f"{self._managers}: name its folder with --runtime-dir, or its manager with --manager{one}"
        )


def _listens(manager: Address) -> bool:
    """Return True unless nobody listens at an address. A manager that hangs, or is not believed, does."""
    try:
        socket.create_connection((manager.host, manager.port), _PROBE_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def cluster_in(status: Mapping[str, Any]) -> int:
    """Return the cluster that a manager's status is of; 0 if it does not say."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return int(status["cluster"], 16)
    return 0


def cluster_of(asked: Asked) -> int:
    """Return the cluster of what a worker stores; 0 if it has stored nothing yet, or its arena cannot be read."""
    with contextlib.suppress(OSError, SimmError, KeyError):
        return inspect(str(asked.stats["segment"])).cluster if asked.stats else 0
    return 0


def clusters_of(asked: Sequence[Asked]) -> list[int]:
    """Return the cluster of each worker; if it does not say itself, that of its data server's others, else 0."""
    own = [cluster_of(each) for each in asked]
    servers: dict[str, set[int]] = {}
    for each, its in zip(asked, own):
        servers.setdefault(each.server, set()).update({its} - {0})
    return [
        its or (next(iter(servers[each.server])) if len(servers[each.server]) == 1 else 0)
        for each, its in zip(asked, own)
    ]
