"""The epoch of a client's namespace: how a client learns of it, and how it advances one (``cluster/epochs.py``).

The manager sends EPOCHS before each map. The first one that names this client's namespace, or a newer epoch, makes
every later call compute its digests anew. Calls that have begun go on with theirs, and find nothing.

Readers of arenas that are mapped must first be told to look at epochs where they otherwise would not
(:func:`~simm.arena.reader.guard`). So a digest with an epoch never meets a reader that has not been told.

A manager that goes on with an old copy of its state may have lost advances. Data servers report newer epochs, but none
may be left. An epoch is that of the map which brought it. So if a map that is as new or newer comes with an older epoch
of the same cluster, or with none, the manager has lost an advance that this client knows. The client does not go back:
values of the older epoch may be left somewhere, which nobody may read. Nor does it have the namespace advance by
itself. That drops all values for all clients, each client would do it, and the operator may be about to restore a
better copy. It says what has happened and what to do, and when it is over.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...arena.hashing import EpochHasher, Hasher, check_namespace
from ...arena.reader import guard
from ...config.client_options import DEADLINE_S_MAX
from ...errors import DeadlineError, PeerError, TransportError, UsageError
from ...net.channel import Channel, Refused
from ...wire import epoch_messages as E
from ...wire.messages import Role, Status
from ..manager_link import ManagerClient

if TYPE_CHECKING:
    from ...arena.reader import ArenaReader
    from ...config.client_options import ClientOptions

log = logging.getLogger("simm.client")

#: Between two attempts to reach a manager that leads, seconds; how much later than the manager the client gives up.
RETRY_S: Final = 0.2
GRACE_S: Final = 2.0
#: What a manager has at most to take a connection, and to answer HELLO, seconds: another one may lead.
CONNECT_S: Final = 3.0
#: Refusals that another attempt may not meet.
_PASSING: Final = frozenset((Status.BUSY, Status.NOT_LEADER, Status.UNAVAILABLE))


class Rehashed(Protocol):
    """A part of a client that computes digests."""

    def rehash(self, hasher: Hasher) -> None: ...


class ClientEpoch:
    """The epoch of one client's namespace. Any thread may call it.

    ``renew``: gets the hasher of a new epoch, and lets go of the old one. It is called under the lock.
    """

    def __init__(self, options: ClientOptions, renew: Callable[[Hasher], None]) -> None:
        self.namespace = options.namespace
        self._tell_owner = renew
        self._hasher = Hasher(options.namespace)
        self._parts: weakref.WeakSet[Rehashed] = weakref.WeakSet()
        #: Has a namespace advance within so many seconds, and returns its epoch.
        self.ask: Callable[[str, float], int] = functools.partial(advance, options)
        #: The epoch, 0 for none; and of which cluster.
        self.epoch = 0
        self._cluster = 0
        #: The map before which EPOCHS came last, and the epoch in it; 0 for none.
        self._told = 0, 0
        #: The newest epoch that the manager is known to have lost, 0 for none.
        self.lost = 0
        self._readers: weakref.WeakSet[ArenaReader] = weakref.WeakSet()
        self._lock = threading.Lock()

    def take(self, msg: E.Epochs) -> None:
        """Take what the manager says."""
        named = next((each.epoch for each in msg.namespaces if each.name == self.namespace), 0)
        self.of_cluster(msg.cluster)
        self._told = msg.epoch, named
        if named:
            self.advanced(named)

    def heed(self, epoch: int) -> None:
        """Warn if the map of ``epoch``, with the EPOCHS before it, shows a lost advance; once for each. O(1)."""
        (of, named), known = self._told, self.epoch
        named = named if of >= epoch else 0
        if named < known <= epoch and self.lost != known:
            self.lost = known
            log.warning(
                "the manager has lost an advance of namespace %r, as with an old copy of its state: it knows %s, and "
                "values have had epoch %d. Puts fail and gets miss until the namespace advances once more. A data "
                "server that knows the epoch has that done within seconds; a line says so here. Else call "
                "Client.advance()",
                self.namespace, f"epoch {named}" if named else "no epoch", known,
            )  # fmt: skip

    def follow(self, part: Rehashed) -> None:
        """Tell a part of the client the hasher, now and whenever it changes."""
        with self._lock:
            self._parts.add(part)
            part.rehash(self._hasher)

    def _renew(self, hasher: Hasher) -> None:
        self._hasher = hasher
        for part in list(self._parts):
            part.rehash(hasher)
        self._tell_owner(hasher)

    def of_cluster(self, cluster: int) -> None:
        """Note the cluster of a map that comes: epochs of another one mean nothing there."""
        with self._lock:
            if self._cluster != cluster:
                self._cluster, self._told = cluster, (0, 0)
                if self.epoch:
                    self.epoch = 0
                    self._renew(Hasher(self.namespace))

    def advanced(self, epoch: int) -> None:
        """Use a new epoch from now on, unless it is an old one."""
        with self._lock:
            if epoch <= self.epoch:
                return
            for reader in list(self._readers):
                guard(reader)
            back = 0 < self.lost == self.epoch
            self.epoch = epoch
            self._renew(EpochHasher(self.namespace, epoch))
        if back:
            log.warning("namespace %r has advanced to epoch %d, which the manager knows", self.namespace, epoch)

    def advance(self, namespace: str, timeout_s: float) -> int:
        """Do :meth:`simm.client.Client.advance`."""
        if not 0 < timeout_s <= DEADLINE_S_MAX:
            raise UsageError(f"timeout_s is above 0 and at most {DEADLINE_S_MAX:.0f} seconds, not {timeout_s}")
        check_namespace(namespace)
        epoch = self.ask(namespace, timeout_s)
        if namespace == self.namespace:
            self.advanced(epoch)
        return epoch

    def watch(self, reader: ArenaReader) -> None:
        """Note a reader before it is used."""
        with self._lock:
            self._readers.add(reader)
            if self.epoch:
                guard(reader)

    def after_fork(self) -> None:
        """Make a lock that no thread of the parent holds."""
        self._lock = threading.Lock()


def advance(options: ClientOptions, namespace: str, timeout_s: float) -> int:
    """Have the manager advance a namespace. Return the epoch. Raises TransportError if it is not over in time."""

    def call(until: float) -> int:
        with _Caller(options.managers, token=options.token, tls=options.tls, trusted=options.server_uids) as manager:
            return manager.advance(namespace, until)

    return confirmed(call, namespace, timeout_s)


def confirmed(
    call: Callable[[float], int], namespace: str, timeout_s: float,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
) -> int:  # fmt: skip
    """Do :func:`advance`. ``call``: sends a request to the manager, which it reaches before a time by ``clock``, and
    returns the epoch in the answer."""
    until = clock() + timeout_s
    while True:
        try:
            return call(until)
        except Refused as exc:
            if exc.status == Status.BAD_REQUEST:
                raise UsageError(str(exc)) from None
            if exc.status not in _PASSING or clock() + RETRY_S >= until:
                raise
        except PeerError as exc:
            if clock() + RETRY_S >= until:
                raise TransportError(f"the advance of namespace {namespace!r} is not confirmed: {exc}") from exc
        sleep(RETRY_S)


def request(namespace: str, left_s: float) -> E.Advance:
    """Return what is sent to a manager when so many seconds are left."""
    return E.Advance(namespace, max(1, round(left_s * 1000)))


class _Caller(ManagerClient):
    role = Role.CLIENT
    #: When it turns to no further manager, monotonic seconds.
    _until = math.inf

    def advance(self, namespace: str, until: float) -> int:
        """Have the manager that leads advance a namespace by ``until``, monotonic seconds; return the epoch."""
        self._until = until
        self.connect()  # first: what that takes, the manager does not have
        return self.call(request(namespace, until - time.monotonic()), E.Advanced).epoch

    def _connect(self, host: str, port: int) -> Channel:
        self.deadline_s = min(CONNECT_S, self._until - time.monotonic())
        if self.deadline_s <= 0:
            raise DeadlineError("there was no time left for this one")
        channel = super()._connect(host, port)
        channel.deadline_s = max(0.0, self._until - time.monotonic()) + GRACE_S  # of ADVANCE
        return channel


class SharedEpochs:
    """The epochs of clients that share a store of ``simm.testing``, in place of a manager."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._clients: weakref.WeakSet[ClientEpoch] = weakref.WeakSet()

    def join(self, client: ClientEpoch, part: Rehashed, lock: AbstractContextManager[Any]) -> None:
        """Tell a client, and a part of it, the epoch of its namespace, now and later. ``lock``: guards all stores."""

        def ask(namespace: str, _timeout_s: float) -> int:
            with lock:
                self._epochs[namespace] = epoch = self._epochs.get(namespace, 0) + 1
                for each in list(self._clients):
                    if each.namespace == namespace:
                        each.advanced(epoch)
                return epoch

        client.ask = ask
        client.follow(part)
        with lock:
            self._clients.add(client)
            client.advanced(self._epochs.get(client.namespace, 0))


def hasher_into(owner: Any) -> Callable[[Hasher], None]:
    """Return a function that gives a client its hasher, as long as the client lives."""
    mine = weakref.ref(owner)

    def store(hasher: Hasher) -> None:
        found = mine()
        if found is not None:
            found._hasher = hasher
            found._digest = hasher.__call__

    return store


__all__: Sequence[str] = ("ClientEpoch", "SharedEpochs", "advance", "hasher_into")
