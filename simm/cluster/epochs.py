"""Epochs of namespaces: how all values of one become unreadable at once, on every host. Pure: no I/O, no clock.

``advance(namespace)`` makes everything that was stored in the namespace before unreadable. It returns when nobody can
read an old value any more. It costs the same for ten values and for ten million.

    client   ADVANCE -> manager: a new map epoch E, which becomes the namespace's; stored like any other map
    manager  EPOCHS, map -> servers and clients
    worker   stores E in the namespace's line of its arena; acknowledged with the map, by HEARTBEAT
    manager  all servers have acknowledged E, or can show nobody anything any more: ADVANCED -> client

**The epoch is part of a value's name.** From the first advance on, the last four bytes of each digest of the namespace
are its epoch (``arena/hashing.py``). A put computes its digest when it begins. So a put that began before an advance
stores an old value whenever it commits, by whatever path, retry, copy or move; and nobody who knows the new epoch asks
for it. No message of the data path has another field, and a namespace that never advances costs nothing.

**Old values are refused where they lie.** Clients may be stopped, cut off, or not have heard. So a reader believes no
value with an epoch before it has compared its digest with the epoch in the namespace's line of the same arena, after
the copy: clients in shared memory, streams for those who come by TCP, the worker before it pins. Values with an epoch
have the entry flag ENTRY_EPOCH, by which readers notice that they must. RDMA readers leave them to the stream. Nobody
waits for a client: one that holds an old digest, and wakes up when it likes, finds a line that says otherwise.

**Leases.** A server that is cut off, or stopped, does not store E in its lines, and clients on its host go on reading
there. So the line also says until when it may be believed. A server has a *lease* of ``lease_s`` from the moment at
which it *sent* a heartbeat, if its answer (LEASE_ACK) says that no namespace has advanced since the map whose epochs
all its workers had stored. Changes of the map that advance nothing end no lease, however fast they come. The manager
waits that long, from a moment after it has made E, for servers that do not acknowledge. Every lease that was given by
an older map has ended then. Time is CLOCK_BOOTTIME, which all processes of a host share and which runs while they are
stopped. The price: values with an epoch are misses while no manager has answered for ``lease_s``. Values of other
namespaces stay readable for as long as it takes, as ever.

**Stored comes before acknowledged.** A worker may drop entries for a first advance for longer than a lease lasts (see
below), and acknowledges no map meanwhile. Its lines have E all that time, which its counters say, and a lease is about
lines only: what is dropped has no epoch. So the lease goes on, and no other namespace loses its values, unless each
heartbeat within ``lease_s`` meets an advance that is a few milliseconds old: counters are asked for with each map, and
come while entries are dropped. They may be later, which is harmless: no line goes back to an older epoch. Those of
another cluster count for nothing.

**The order of a reader's looks**: value, lease, epoch. If the lease was valid at some moment, and the line had the old
epoch still at a later one, then no advance had returned at the first. The other way round a reader could be stopped
between its looks: it finds the old epoch in a line whose lease has ended, and then the lease that came with the new.
A value that is held by its version alone (``sdk/ops/pins.py``) is looked at so when it is pinned, later only for its
version. A worker that pins looks at both in one turn.

**The first advance of a namespace.** Its values have no epoch yet, and readers of such values look at no line: they
must not pay for what they do not use. So the worker drops these entries before it acknowledges E, which takes time in
proportion to them. And no lease ends them. So the first advance must be acknowledged by every server that is not known
to have left; it fails while one is away. When it has succeeded, the namespace is *settled*: every server knows that it
has epochs, and servers that come later learn it before they get a shard. Whoever wants advances to return within
``lease_s`` whatever happens advances once at the beginning, when there is nothing to lose.

**The epoch is that of a map**, so it has what those have: no two advances ever get the same one, and a lost state is
noticed when a server names a newer epoch. A server that joins reports the epochs of its namespaces. If one is newer
than ours, or ours is none, and they are of our cluster, then advances were lost. The same may be if it is equal, and
neither a stored state nor an earlier heartbeat of that server shows that it is the same advance. Which values were
good, nobody can tell then, so the namespace advances once more. A manager begins with no word of the leases that its
predecessor gave, and of servers that were replaced. So no advance returns earlier than ``lease_s`` after the manager
began to lead, or after a new instance has taken a server's name; nor before a server has joined. That holds for one
without any state, too: all who could say that there was a predecessor may be cut off. Servers acknowledge only maps of
this manager: what a JOIN names proves nothing, nor does a map before those that it has skipped because a server named a
later one.

**Who has left.** Only a cold goodbye ends all reads: workers give their shards up before it. An arena that waits for a
warm start stays mapped where clients are, with its lease, and so does that of a server that was given up, also when its
shards have gone to others and when a new instance has its name.

**ADVANCED follows the storing of E.** A manager that was killed and does not know E would send the epoch before, also
to a server whose lease has ended. That one would be believed again, with its old values.

**Servers of an older version** take maps without EPOCHS, and their readers look at no lease. By MAP_GET a server says
that it wants EPOCHS. One that does not cannot acknowledge an advance, and no time makes up for that. Upgrade it first.

What can go wrong, and what we chose
------------------------------------
* *The manager has lost an advance, and all servers that knew it.* A copy of its state was restored. Clients that know
  the newer epoch do not go back to the old one. Their puts fail and their gets miss until somebody has the namespace
  advance; a warning says so (``sdk/ops/epochs.py``).
* *The manager dies during an advance.* The client asks the next one, and gets a later epoch. Nothing is lost but what
  was stored in between.
* *A client has not heard of the advance yet.* Its gets miss. Its puts are refused (OLD_EPOCH): the worker would keep
  what nobody can read. It asks for the map and knows more.
* *A server's worker dies.* The lines lie in the vault (``arena/vault.py``). The successor accepts nothing before the
  supervisor has sent it EPOCHS and the map.
* *Old values move with their shard.* The new owner refuses to store them.
* *Old values take up room.* The worker drops them in turns. When it needs room, a step of them goes before anything
  else, and for a batch as many steps as make room for it, sixteen at most (`Space.allocate_many`).

LIMITATIONS. A manager that has lost its state does not know of servers that are cut off from it. Its advances wait for
their leases, if those are no longer than its own, but a namespace's first advance cannot know of their values without
an epoch. The same holds for a server that was away for so long that it is forgotten, or whose name another one has. A
host whose clock stands still while it is suspended together with its lease (a virtual machine that is paused) may show
old values until its first heartbeat. A process in a time namespace of its own, with another CLOCK_BOOTTIME, must not
share an arena. Four bytes hold the epoch's lower half: a value of 2^32 maps ago would be taken for a new one, if it was
neither dropped nor evicted since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ..constants import NAMESPACE_BYTES_MAX, OTHERS_NAMESPACE, OTHERS_REFUSED
from ..errors import CorruptionError
from ..wire.epoch_messages import EPOCH_NAMESPACES_MAX, Epochs, NamespaceEpoch

#: Of a lease, for clocks that do not run alike, and what a timer is late by, seconds.
DRIFT: Final = 0.02
LATE_S: Final = 0.05
#: A lease that does not end, as a line has it; as an epoch, one that no map has.
FOR_EVER: Final = (1 << 64) - 1
#: A text names so many servers, and counts the others.
_NAMED: Final = 8


class Acknowledging(Protocol):
    """What must be known of a node."""

    name: str
    #: Of the newest map of this manager that all its workers have; 0 for none.
    told_epoch: int
    #: Whether it asks for EPOCHS with its maps; None if it has asked for no map yet.
    follows: bool | None

    @property
    def left(self) -> bool:
        """Whether it has said goodbye. One that was only given up may still serve."""


class Acknowledged:
    """Which maps the servers have acknowledged: one look, for all advances that wait. O(nodes log nodes)."""

    def __init__(self, nodes: Iterable[Acknowledging]) -> None:
        known = list(nodes)
        serving = [node for node in known if not node.left]
        #: No data server has joined.
        self.empty = not known
        # Those that are most behind first. One that asks for no EPOCHS acknowledges no map.
        self._acked = sorted((node.told_epoch if node.follows else -1, node.name) for node in serving)
        #: The servers of a version without epochs, as a text.
        deaf = [node.name for node in serving if node.follows is False]
        self.deaf = _named(deaf, len(deaf))

    def missing(self, epoch: int) -> str:
        """Return which servers have not acknowledged the map of ``epoch``, as a text. O(log nodes)."""
        count = bisect_left(self._acked, (epoch, ""))
        return _named([name for _, name in self._acked[: min(count, _NAMED)]], count)

    def behind(self, epoch: int) -> str | None:
        """Return a server that must speak before all have acknowledged ``epoch`` or a later map; None if all have."""
        return self._acked[0][1] if self._acked and self._acked[0][0] < epoch else None


def _named(names: list[str], count: int) -> str:
    """Return some names as a text, which counts the others of ``count``."""
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (f" and {count - len(shown)} others" if count > len(shown) else "")


class Epoch(NamedTuple):
    """The epoch of a namespace, and whether all servers know that it has epochs."""

    epoch: int
    settled: bool


class NamespaceEpochs:
    """The manager's table. ``cluster/machine.py`` owns it, and gives epochs their numbers."""

    def __init__(self) -> None:
        self._known: dict[str, Epoch] = {}
        #: No stored state: a predecessor may have given the same numbers to other advances.
        self.blank = True
        #: Names that servers have newer epochs of, or that are not known here: they advance with the next map.
        self.lost: set[str] = set()
        #: While a lost map is collected, which decides over the cluster: what each server has reported, by its name.
        self.heard: dict[str, Epochs] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def fault(self, name: str) -> str:
        """Return why a namespace cannot have epochs; empty if it can."""
        if not 0 < len(name.encode()) <= NAMESPACE_BYTES_MAX:
            return f"a namespace has 1 to {NAMESPACE_BYTES_MAX} bytes of UTF-8"
        if name == OTHERS_NAMESPACE:
            return OTHERS_REFUSED
        if name not in self._known and len(self._known) >= EPOCH_NAMESPACES_MAX:
            return f"at most {EPOCH_NAMESPACES_MAX} namespaces of a cluster have epochs"
        return ""

    def advance(self, name: str, epoch: int) -> None:
        """Note that the map of ``epoch`` brings a new epoch for this namespace."""
        known = self._known.get(name)
        self._known[name] = Epoch(epoch, known is not None and known.settled)

    def report(self, msg: Epochs, nodes: Sequence[Acknowledging], cluster: int) -> int:
        """Take what servers know. Return how many advances were lost: then a new map is due, and :meth:`renew`.

        ``cluster``: ours; others' epochs mean nothing. 0: a lost map is collected, which decides about that.
        """
        if not cluster:
            self.heard.update((node.name, msg) for node in nodes)
            return 0
        told = min((node.told_epoch for node in nodes), default=0)
        for name, epoch in msg.namespaces if msg.cluster == cluster else ():
            known = self._known.get(name)
            other = known is None or epoch > known.epoch or (epoch == known.epoch and self.blank and told < epoch)
            if other and not self.fault(name):
                self.lost.add(name)
        return len(self.lost)

    def collected(self, cluster: int) -> None:
        """Take what servers of this cluster have reported while its map was collected.

        What was advanced before it was collected has an epoch of no map of this cluster, and advances again.
        """
        self.lost.update(self._known)
        for msg in self.heard.values():
            self.report(msg, (), cluster)
        self.heard.clear()

    def renew(self, epoch: int) -> None:
        """Advance the lost ones with the map of ``epoch``."""
        for name in self.lost:
            if not self.fault(name):
                self.advance(name, epoch)
        self.lost.clear()

    @property
    def newest(self) -> int:
        """Return the newest epoch of any namespace, 0 if none has one."""
        return max((known.epoch for known in self._known.values()), default=0)

    @property
    def settled(self) -> int:
        """Return how many namespaces are settled."""
        return sum(known.settled for known in self._known.values())

    def table(self) -> list[NamespaceEpoch]:
        """Return all for EPOCHS."""
        return [NamespaceEpoch(name, known.epoch) for name, known in sorted(self._known.items())]

    def awaited(
        self, name: str, epoch: int, nodes: Acknowledged, now: float, since: float, unsure: float, lease_s: float
    ) -> str:
        """Return what the advance to ``epoch`` still waits for, in words; empty if nobody can read an old value.

        ``epoch``: or a later one, if maps of an earlier life have been found since (``Cluster.first_epoch``).
        ``since``: a time when it had been made. ``unsure``: since when no server has leases that this manager does not
        know of. ``now`` by the same clock, seconds. ``lease_s`` 0: leases do not end. O(log nodes).
        """
        wait_s = lease_s * (1 + DRIFT) + LATE_S if lease_s else 0.0
        known = self._known.get(name)
        if known is None:
            return "the manager has lost it"
        if nodes.empty:
            return "no data server has joined this manager"
        missing = nodes.missing(epoch)
        if missing and not known.settled:
            return f"{missing} must answer before the first advance of a namespace is over"
        if nodes.deaf:
            return f"{nodes.deaf} must be upgraded: of a version without epochs, whose clients look at no lease"
        if missing and not lease_s:
            return f"{missing} must answer, as there are no leases"
        if missing and now <= since + wait_s:
            return f"{missing} must answer, or lose its lease"
        if now <= unsure + wait_s:
            return "servers that this manager does not know may have a lease"
        if not known.settled:
            self._known[name] = known._replace(settled=True)
        return ""

    # -- storing -------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, list[int]]:
        """Return what must survive a restart, JSON-able."""
        return {name: [known.epoch, int(known.settled)] for name, known in sorted(self._known.items())}

    @classmethod
    def from_state(cls, state: Any) -> NamespaceEpochs:
        """Undo :meth:`to_state`. Raises CorruptionError for what it cannot have made."""
        made = cls()
        if not isinstance(state, Mapping):
            raise CorruptionError("the epochs of namespaces must be an object")
        for name, row in state.items():
            if name == OTHERS_NAMESPACE:
                continue  # a manager of an earlier build let clients advance it, and no client has it now
            right = isinstance(row, list) and len(row) == 2 and all(type(each) is int for each in row)
            if not isinstance(name, str) or made.fault(name) or not right or not 0 < row[0] < 1 << 62:
                raise CorruptionError(f"the epoch of namespace {name!r} is malformed")
            made._known[name] = Epoch(row[0], row[1] == 1)
        made.blank = False
        return made


class Lease:
    """A server's lease. ``now`` is CLOCK_BOOTTIME in ns."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}
        self._count = 0
        #: When the last heartbeat was sent that has extended the lease; 0 for none.
        self._from_ns = 0

    def sent(self, now: int, stored: int) -> int:
        """Note that a heartbeat leaves, when workers have the epochs of the map ``stored``. Return its number."""
        self._count += 1
        self._sent[self._count] = now, stored
        return self._count

    def answered(self, number: int, advanced: int, *, exactly: bool = False) -> bool:
        """Take the answer to a heartbeat: no namespace has advanced since the map of epoch ``advanced``.

        Return True if it extends the lease. ``exactly``: the manager is older, and names the epoch of its map.
        """
        now, stored = self._sent.pop(number, (0, 0))
        for older in [each for each in self._sent if each < number]:
            del self._sent[older]  # answers come in order: these never will
        if stored < advanced or (exactly and stored > advanced) or now <= self._from_ns:
            return False
        self._from_ns = now
        return True

    def end(self) -> None:
        """Begin anew: no heartbeat so far has extended anything."""
        self._sent.clear()
        self._from_ns = 0

    def until(self, lease_ms: int) -> int:
        """Return until when values with an epoch may be read, for a worker; 0 for not at all."""
        if not lease_ms:
            return FOR_EVER
        return self._from_ns + lease_ms * 1_000_000 if self._from_ns else 0
