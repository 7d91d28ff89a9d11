"""Keep the manager's state stored: when to save, where, and what may be sent meanwhile.

Rules, for which ``manager.py`` gives the reasons:

* Nothing is sent before it is stored, unless the disk fails, or a save takes longer than ``PATIENCE_S``. With a
  coordinator nothing is ever sent before, so that a successor never knows less than the servers.
* A stored state reserves epochs: it names one ``reserve`` further on, and the next manager goes on beyond that one.
* A failed save is logged, counted, and repeated after a while.

A save in a file is made by a thread. An ``fsync`` takes milliseconds on an idle disk, and many seconds on one that is
busy or about to fail; the manager's loop must not wait for it. One save is under way at any time, and what changes
meanwhile is in the next one. All that waits shares the time of the oldest change. There may be no moment at which all
is stored. So who sends keeps what there was to send when a snapshot was made, and may send that as soon as it has
``landed``. A save by a coordinator is made at once, as it is the decision of who leads too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from ..cluster.machine import Cluster
from ..cluster.nodes import Timing
from ..errors import CorruptionError
from ..net.loop import Loop
from .election import Coordinator, NotLeader
from .state_file import StateFile

log = logging.getLogger("simm.manager")

#: Between a failed save and the next, seconds: of a file, and by a coordinator. Also how long other managers may try to
#: lead before one that could not tries again.
RETRY_S: Final = 5.0
ETCD_RETRY_S: Final = 1.0
#: Longest time for which a change waits for its storing in a file.
PATIENCE_S: Final = 0.5


class StateKeeper:
    """Stores the state of one manager, or keeps nothing if there is no store.

    Args:
        reserve: epochs that a state reserves.
        snapshot: returns the newest epoch and the state to store, which nobody changes afterwards.
        stored: called when what waited for a save may be sent.
        deposed: called with the reason when a coordinator does not let this manager save.
        beside: returns what is stored beside that, by name.
    """

    def __init__(
        self, loop: Loop, store: StateFile | Coordinator | None, reserve: int,
        snapshot: Callable[[], tuple[int, Any]], stored: Callable[[], None], deposed: Callable[[str], None],
        beside: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._store = store
        #: What is stored decides over other managers: nothing is sent that is not stored.
        self._binding = store is not None and not isinstance(store, StateFile)
        self._reserve = reserve
        self._snapshot = snapshot
        self._stored = stored
        self._deposed = deposed
        self._beside = beside
        #: What was loaded last.
        self.loaded: Any = None
        #: Epochs below this one are covered by what is stored. The save under way raises it to ``_saving``.
        self._reserved = self._saving = 0
        #: The newest epoch whose map is in the stored state, and in the save under way.
        self._stored_epoch = self._storing = 0
        self._unsaved = False
        self._failed = False
        #: The next attempt after a failure has its time.
        self._pausing = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._ended = -1
        #: When the first change began to wait for its storing that is in the save under way, and the first that is in
        #: the next one; None if none waits.
        self._waiting_since: float | None = None
        self._later_since: float | None = None
        #: Whether the newest snapshot is stored.
        self.landed = False
        #: Changes so far; those in the save under way, in what is stored, and among what has been sent.
        self._changes = self._saving_changes = self._stored_changes = self._sent_changes = 0
        #: When the save under way began.
        self._began = 0.0
        self.writes = 0
        self.failures = 0

    @property
    def used(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def where(self) -> str:
        """The store's name, for messages."""
        return self._store.where if self._store is not None else "memory"

    @property
    def trouble(self) -> str:
        """What is wrong; empty if nothing is. What is sent meanwhile may be stored nowhere."""
        if self._failed:
            return "the state cannot be stored"
        late = self._thread is not None and self._loop.clock() - self._began > PATIENCE_S
        ahead = self._store is not None and self._sent_changes > self._stored_changes
        return "the state is not stored yet" if late or ahead else ""

    @property
    def refuses(self) -> str:
        """Why tenants must make no further epochs; empty if they may.

        What a coordinator has not stored is not sent. So tenants could use up what is reserved, and then no server that
        joins would be answered.
        """
        return self.trouble if self._binding and self._failed else ""

    @property
    def up_to_date(self) -> bool:
        """Whether all is stored, or there is no store."""
        return self._store is None or (not self._unsaved and self._thread is None)

    @property
    def stored(self) -> int:
        """The newest epoch that a successor of this manager knows: any, without a store, as there is none."""
        return self._stored_epoch if self._store is not None else 1 << 64

    # -- before the service ------------------------------------------------------------------------

    def load(self) -> Any:
        """Return the state last saved, or None. Raises CorruptionError, and what the store raises."""
        self._failed = self._pausing = False
        self.loaded = self._store.load() if self._store is not None else None
        return self.loaded

    def begin(self, reserved: int) -> None:
        """Go on from a state that reserves epochs below ``reserved``. It is to be saved before the next answer."""
        self._reserved, self._stored_epoch, self.landed = reserved, 0, False
        self._unsaved = True

    def forget(self) -> None:
        """Nothing is to be saved any more."""
        self._unsaved = self.landed = False
        self._sent_changes = self._stored_changes

    def save_in_background(self) -> None:
        """Save by a thread from now on, if the store is a file. Call :meth:`close` in the end."""
        if isinstance(self._store, StateFile):
            self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.watch(self._ended, lambda _mask: self._background_ended())

    def close(self) -> None:
        """Wait for a save that is under way. Later ones are made at once."""
        if self._ended >= 0:
            if self._thread is not None:
                self.wait()
                self._collect()
            self._loop.unwatch(self._ended)
            os.close(self._ended)
            self._ended = -1

    # -- saving ------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Note that something is to be saved. O(1)."""
        self._unsaved = True
        self._changes += 1
        if self._thread is not None and self._later_since is None:
            self._later_since = self._since_now()

    def _since_now(self) -> float:
        """Return the time from which a change waits, and have it sent when it has waited long enough."""
        now = self._loop.clock()
        self._loop.call_later(PATIENCE_S, self._overdue)
        return now

    @property
    def holds_back(self) -> bool:
        """Whether what has changed must not be sent yet."""
        if self._binding:
            return self._unsaved
        return self._patience_s() > 0.0

    def _patience_s(self) -> float:
        """Return for how long changes still wait for their saves. Several may wait for one in one turn."""
        since = self._waiting_since if self._waiting_since is not None else self._later_since
        if since is None or self._pausing:
            return 0.0
        return since + PATIENCE_S - self._loop.clock()

    def sent(self) -> None:
        """Note that the changes of until now have been sent."""
        self._waiting_since = self._later_since = None
        self._sent_changes = self._changes

    def cover(self, epoch: int) -> bool:
        """Make the stored state cover an epoch. Return True if the epoch may be sent."""
        # A save in the background must have ended before the last epoch is used, so it begins earlier.
        ahead = self._reserve // 2 if self._ended >= 0 else 0
        if epoch + ahead >= self._reserved and not self._pausing:
            self._unsaved = True
            self.save()
        # The save under way may have begun too early to reserve this epoch; the next one does reserve it.
        until = self._loop.clock() + PATIENCE_S
        for _ in range(2):
            # A save that takes longer is waited for no more, whatever changes meanwhile: the loop would stand still.
            under_way_s = self._began + PATIENCE_S - self._loop.clock() if self._thread is not None else 0.0
            left_s = min(self._patience_s(), under_way_s, until - self._loop.clock())
            if left_s > 0.0 and epoch >= self._reserved and self.wait(left_s):
                self._collect()
                self.changed()
                self.save()
        # A failing disk is only reported. But a successor on another machine would not know the epoch.
        return not self._binding or epoch < self._reserved

    def save(self) -> None:
        """Store changes, or begin to: a thread saves in a file (:meth:`save_in_background`)."""
        if self._ended < 0:
            self.save_now()
        elif self._unsaved and self._thread is None and not self._pausing:
            document = self._document(self._reserve)
            if not self._save_in_thread(document):
                self._save(document)

    def save_now(self, *, last: bool = False) -> bool:
        """Store changes before the return, with no save under way. Return True if all is stored.

        Args:
            last: store the exact epoch. No other epoch follows.
        """
        if self._store is None or not (self._unsaved or last):
            return True
        return self._save(self._document(0 if last else self._reserve))

    def _document(self, reserve: int) -> dict[str, Any]:
        """Return what is to be stored. All changes until now are in it."""
        epoch, state = self._snapshot()
        self._saving, self._storing, self._saving_changes = epoch + reserve, epoch, self._changes
        self._unsaved = self.landed = False
        self._waiting_since = self._waiting_since if self._waiting_since is not None else self._later_since
        self._later_since = None
        return {**self._beside(), "cluster": state, "epochs_reserved": self._saving}

    def _save(self, document: dict[str, Any]) -> bool:
        """Store it here and now. Return True if all is stored."""
        assert self._store is not None
        try:
            self._store.save(document)
        except NotLeader as exc:
            self._deposed(str(exc))
            return False
        except OSError as exc:
            return self._take(exc)
        return self._take(None)

    def _save_in_thread(self, document: dict[str, Any]) -> bool:
        """Begin a save. Return False if this process gets no further thread."""
        thread = threading.Thread(target=self._work, args=(document,), name="simm-state", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread, self._began = thread, self._loop.clock()
        if self._waiting_since is None:
            self._waiting_since = self._since_now()
        return True

    def _work(self, document: dict[str, Any]) -> None:
        assert self._store is not None
        self._error = None
        try:
            self._store.save(document)
        except Exception as exc:
            self._error = exc
        os.eventfd_write(self._ended, 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is under way, for so long at most. Return True if none is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _collect(self) -> bool:
        """Take the result of a save that has ended. Return False if there is none."""
        try:
            os.eventfd_read(self._ended)
        except BlockingIOError:
            return False
        self.wait()  # the thread's last act was to report its end
        self._thread = None
        self._take(self._error)
        return True

    def _background_ended(self) -> None:
        if self._collect():
            self._stored()  # first: what is stored may be sent, though the next save begins
            writes = self.writes
            self.save()
            if self.writes > writes:  # here and now, for want of a thread: nobody else tells
                self._stored()

    def _overdue(self) -> None:
        waits = self._waiting_since is not None or self._later_since is not None
        if self._thread is not None and waits and not self.holds_back:
            told = self._sent_changes > self._stored_changes
            level = logging.DEBUG if told else logging.WARNING  # once until it is stored
            log.log(level, "%s is not stored after %.1f s: service goes on", self.where, PATIENCE_S)
            self._stored()

    def _take(self, error: Exception | None) -> bool:
        """Take the result of a save. Return True if the state is stored."""
        if error is None:
            self.writes += 1
            self._reserved, self._stored_epoch, self.landed = self._saving, self._storing, True
            self._stored_changes = self._saving_changes
            self._waiting_since = None  # also if nobody may be told yet: the next change has its own time
            if self._failed:
                self._failed = False
                log.info("the cluster's state is stored again")
            return not self._unsaved
        self._unsaved = self._failed = True
        self.failures += 1
        retry_s = ETCD_RETRY_S if self._binding else RETRY_S
        log.error(
            "cannot store the cluster's state in %s: %s; %s, trying again in %.0f s",
            self.where, getattr(error, "strerror", None) or error,
            "changes wait" if self._binding else "service goes on", retry_s,
        )  # fmt: skip
        if not self._pausing:
            self._pausing = True
            self._loop.call_later(retry_s, self._retry)
        return False

    def _retry(self) -> None:
        if not self._pausing:
            return
        self._pausing = False
        self.save()
        self._stored()


def stored_cluster(state: StateKeeper, now: float, timing: Timing) -> tuple[Cluster | None, int]:
    """Return the stored cluster, None if none is stored, and the epoch up to which epochs are reserved.

    Raises CorruptionError with the remedy, and what the store raises.
    """
    stored = state.load()
    if stored is None:
        return None, 0
    try:
        reserved = int(stored["epochs_reserved"])
        cluster = Cluster.from_state(stored.get("cluster"), now, timing, reserved)
    except (CorruptionError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CorruptionError(
            f"{state.where} cannot be used: {exc}; restore a copy, or, to begin anew, move it away"
        ) from exc
    log.info("%s: epoch %d, %d nodes", state.where, cluster.epoch, len(cluster.nodes))
    return cluster, reserved
