"""The requests by which a worker learns of its shards, and by which they move: SHARDS, epochs, FREEZE, ADOPT, FINISH.

``arena/shard_words.py`` has the rules. A SHARDS that gives the worker a shard whose old entries are still there is
answered when they have been dropped, in turns of DROP_S between which the worker serves.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from ...arena.store import Store
from ...errors import RemoteProtocolError, UsageError
from ...net.loop import Loop
from ...net.peer import Peer
from ...rpc import reply
from ...wire import epoch_messages as E
from ...wire import messages as M
from ...wire.messages import Status
from ...wire.shard_set import EPOCH_MASK, bitmap_of, shards_in

log = logging.getLogger("simm.server.worker")

#: The worker drops entries of lost shards for so long, and serves for as long before it goes on.
DROP_S: Final = 0.002


class Owner(Protocol):
    """The worker whose shards these are."""

    store: Store
    loop: Loop
    #: The highest map epoch that it has acted on.
    epoch: int
    #: By session id.
    peers: dict[int, Peer]
    #: The epoch of the map by which a mover copies, by its pid.
    movers: dict[int, int]


class Mover(Protocol):
    """The connection that sent ADOPT or FINISH."""

    pid: int
    role: int


class ShardRequests:
    """Carries them out for one worker."""

    def __init__(self, worker: Owner) -> None:
        self._worker = worker
        #: SHARDS to answer once the entries of lost shards are dropped; a turn that drops some is due.
        self._ordered: list[tuple[Peer, int]] = []
        self._drop_due = False
        self._table: E.Epochs | None = None  # the epochs that came last
        #: The epoch of the map whose epochs of namespaces this process has stored; their old entries may be there.
        self.stored = 0

    def take_map(self, peer: Peer, request_id: int, msg: M.Shards) -> bytes:
        """Take a map. The answer waits if it gives the worker a shard whose old entries are still being dropped."""
        if not msg.since and not msg.roles:
            self._worker.store.shard_words.fence()
            log.warning("the manager does not know this server: no mutation is accepted until the next map")
            return reply(M.Done(0), request_id)
        try:
            if msg.cluster != self._worker.store.cluster:
                self.stored = 0  # of no other cluster, whatever fails from here on
                self._leave_cluster(msg.cluster)
            self._worker.store.begin_shards(msg.epoch, msg.since, msg.roles, msg.cluster)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        store, table = self._worker.store, self._table
        if table is not None and table.cluster == store.cluster:
            store.stale.take({each.name: each.epoch for each in table.namespaces})
        self._worker.epoch = self.stored = msg.epoch
        if not self._drop_due:
            self._drop_lost()
        words = store.shard_words
        log.info("epoch %d: owner of %d shards", msg.epoch, words.count)
        if not (store.stale.first or words.awaited):
            return reply(M.Done(words.count), request_id)
        self._ordered.append((peer, request_id))
        return b""

    def _drop_lost(self) -> None:
        """Drop entries of lost shards and old epochs for DROP_S, and go on later. Answer SHARDS that waited."""
        clock, store = self._worker.loop.clock, self._worker.store
        until = clock() + DROP_S
        self._drop_due = False
        store.apply_pending()
        while self._drop_step():
            if store.groups.orphans:  # of this step, and within this turn's time
                store.apply_pending()
            if clock() >= until:
                if self._ordered and not (store.stale.first or store.shard_words.awaited):
                    self._answer_ordered()
                self._drop_due = True
                self._worker.loop.call_later(DROP_S, self._drop_lost)
                return
        if store.groups.orphans:
            store.apply_pending()
        self._answer_ordered()

    def _drop_step(self) -> bool:
        """Drop some entries of both kinds, as neither may wait until there are none of the other. False: none is left.

        Shards may be taken away, and namespaces may advance, for as long as it takes.
        """
        store = self._worker.store
        more = store.drop_some()
        return (store.stale.due and store.stale.step()) or more

    def _answer_ordered(self) -> None:
        ordered, self._ordered = self._ordered, []
        for peer, request_id in ordered:
            peer.send_message(M.Done(self._worker.store.shard_words.count), request_id)

    def take_epochs(self, request_id: int, msg: E.Epochs | E.EpochLease) -> bytes:
        """Take a lease at once, and epochs with the next map: it says whose they are."""
        if isinstance(msg, E.Epochs):
            self._table = msg
        else:
            self._worker.store.ledger.namespaces.extend_lease(msg.until_ns)
        return reply(M.Done(1), request_id)

    def _leave_cluster(self, cluster: int) -> None:
        """End the sessions of clients that came by a map of another cluster than the new one.

        Clients of the new cluster would find what they store now, and the epochs of their movers mean nothing there.
        """
        before = self._worker.store.cluster
        if before:
            log.warning("the map is of cluster %016x: the entries of cluster %016x are dropped", cluster, before)
        self._worker.movers.clear()
        for peer in list(self._worker.peers.values()):
            if before or peer.context.cluster not in (0, cluster):
                peer.close("it came by a map of another cluster")

    def freeze(self, request_id: int, msg: M.Freeze) -> bytes:
        try:
            shards = shards_in(msg.shards)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        if not 0 < msg.epoch <= EPOCH_MASK:
            raise RemoteProtocolError(f"no map has epoch {msg.epoch}")
        try:
            frozen = self._worker.store.freeze(msg.epoch, shards)
        except UsageError as exc:  # of a stream's peer, not of the stream, whose session stays
            return reply(M.Error(str(exc)), request_id, Status.BAD_REQUEST)
        if frozen is None:
            return reply(
                M.Error(f"this worker owns a shard by a map that is as new as that of epoch {msg.epoch}"),
                request_id, Status.WRONG_OWNER,
            )  # fmt: skip
        log.info("epoch %d: %d shards frozen for their new owner", msg.epoch, len(frozen))
        return reply(M.Frozen(bitmap_of(frozen)), request_id)

    def adopt(self, state: Mover, request_id: int, msg: M.Adopt | M.Finish) -> bytes:
        """Carry out ADOPT or FINISH. A mover may have several sessions; its epoch holds for all of them."""
        store = self._worker.store
        try:
            shards = shards_in(msg.shards)
            if isinstance(msg, M.Finish):
                return reply(M.Done(store.shard_words.finish(shards, msg.epoch)), request_id)
            count = store.shard_words.adopt(msg.epoch, shards, shards_in(msg.fallback))
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        if state.role == M.Role.MOVER:
            self._worker.movers[state.pid] = msg.epoch
            for session in store.sessions.by_id.values():
                if session.pid == state.pid and not session.closed:
                    session.copies = msg.epoch
        log.info("epoch %d: %d of %d shards adopted", msg.epoch, count, len(shards))
        return reply(M.Done(count), request_id)
