"""The server's end of a lane: its links, its grants, and the order in which they end.

The whole of the fencing is here, and what it stands on are two sentences of ``fabric.py``: after ``Link.invalidate``
no WRITE by those keys is begun or under way, and after ``Link.close`` nothing that the peer sends arrives. Hence

* :meth:`LaneEnd.fence` comes before a chunk is published or given back. It is all that is needed while the client
  lives and its links work. Without windows it does nothing, and a client that commits while it still writes
  spoils its own value, or, after the chunk's next change of hands, somebody else's: as any process with the
  arena mapped could.
* :meth:`LaneEnd.close` destroys all links first, then frees the windows, then says which grants may go back.
  If a link cannot be destroyed it raises, and the grants stay where they are: the process must end,
  and the kernel destroys what it had before the worker hears of that.

A grant counts as a copy under way (``WorkerSession.begin_copy``) of the session that it came by, until it is spent or
given back. So a session that ended because its worker died is not released, and its chunks are not reused by the
worker's successor, before every lane has let go of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from .errors import CorruptionError
from .fabric import FabricError, Link, LinkAddress
from .session import GrantTuple, WorkerSession
from .windows import Cover, Windows

log = logging.getLogger("simm.endpoint")

#: Links that a lane may ask for in its life: rail pairs, and pairs that were tried in vain.
LINKS_MAX: Final = 64


class Held:
    """A grant of a lane. ``covers``: its windows, by the link's number."""

    __slots__ = ("chunk", "covers", "number", "offset", "session")

    def __init__(self, session: WorkerSession, grant: GrantTuple) -> None:
        self.session = session
        self.number, self.offset, self.chunk = grant
        self.covers: dict[int, Cover] = {}

    @property
    def grant(self) -> GrantTuple:
        """As the client is told of it, and the session knows it."""
        return self.number, self.offset, self.chunk


class NoWindows(FabricError):
    """There are no windows for so many chunks just now. Nothing else is wrong."""


class LaneEnd:
    """One lane. For the loop's thread."""

    def __init__(self) -> None:
        #: Of the HELLO; None before it.
        self.role: int | None = None
        #: Since RDMA_OPEN: how its chunks are written, and whether they are by windows at all.
        self.opened = False
        self.windows: Windows | None = None
        #: By number; None for those that have been disconnected.
        self.links: list[Link | None] = []
        self.rails: list[int] = []
        #: By id: what the client has been told of and may write into.
        self.grants: dict[int, Held] = {}
        #: Ready for it, and to be told with the next answer.
        self.prepared: list[Held] = []
        self.granted_bytes = 0
        #: When it sent something last, and whether it has been asked for its grants since.
        self.heard = 0.0
        self.recalled = False
        self.closed = False

    def __repr__(self) -> str:
        return f"<LaneEnd links={self.link_count} grants={len(self.grants)}+{len(self.prepared)}>"

    @property
    def link_count(self) -> int:
        """Links that are there."""
        return sum(link is not None for link in self.links)

    @property
    def broken(self) -> str:
        """Why one of the links is of no use any more; empty while all are."""
        return next((link.broken for link in self.links if link is not None and link.broken), "")

    # -- links ------------------------------------------------------------------------------------

    def connect(self, link: Link, rail: int, peer: LinkAddress) -> tuple[int, LinkAddress]:
        """Connect a new link, on rail number ``rail``, to the client's end: its number, and our end.

        Raises FabricError, and has closed it then.
        """
        try:
            address = link.address()
            link.connect(peer)
        except FabricError:
            link.close()
            raise
        self.links.append(link)
        self.rails.append(rail)
        return len(self.links) - 1, address

    def disconnect(self, number: int) -> bool:
        """Destroy one link: nothing that came by it can arrive any more. False when there is none."""
        link = self.links[number] if number < len(self.links) else None
        if link is None:
            return False
        link.close()
        self.links[number] = None
        covers = [held.covers.pop(number) for held in self.holds() if number in held.covers]
        if self.windows is not None:
            self.windows.free(covers)
            self.windows.retire(self.rails[number], link)
        return True

    # -- grants -----------------------------------------------------------------------------------

    def holds(self) -> Iterable[Held]:
        """All grants, those that the client has not been told of included."""
        yield from self.grants.values()
        yield from self.prepared

    def hold(self, session: WorkerSession, grants: Sequence[GrantTuple]) -> None:
        """Grants that are the lane's from now on; to be found in ``prepared``, with windows where there are any.

        Raises NoWindows when it is not, and FabricError when a link broke: close the lane then.
        """
        fresh = [Held(session, grant) for grant in grants]
        chunks = [(held.offset, held.chunk) for held in fresh]
        covers: list[tuple[int, Link, list[Cover]]] = []
        if self.windows is not None:
            try:
                for number, link in enumerate(self.links):
                    if link is not None:
                        covers.append((number, link, self.windows.prepare(self.rails[number], link, chunks)))
            except FabricError as exc:
                for _, _, taken in covers:
                    self.windows.recycle(taken)
                raise NoWindows(str(exc)) from exc
        for held in fresh:
            session.begin_copy()
            self.prepared.append(held)
            self.granted_bytes += held.chunk
        for number, _, taken in covers:
            for held, cover in zip(fresh, taken):
                held.covers[number] = cover  # before the first is bound: close() must find all of them
        for _, link, taken in covers:
            assert self.windows is not None
            self.windows.bind(link, taken)

    def tell(self, most: int) -> list[Held]:
        """Prepared grants, at most so many, which the client may write into from now on."""
        told, self.prepared = self.prepared[:most], self.prepared[most:]
        for held in told:
            self.grants[held.number] = held
        return told

    def keys(self, told: Sequence[Held]) -> list[int]:
        """The keys of grants, link by link; nothing where there are no windows."""
        if self.windows is None:
            return []
        numbers = range(len(self.links))
        return [held.covers[number].key if number in held.covers else 0 for held in told for number in numbers]

    def fence(self, holds: Sequence[Held]) -> None:
        """End what the windows of these grants allow. Raises FabricError: close the lane then."""
        if self.windows is None:
            return
        for number, link in enumerate(self.links):
            if link is None:
                continue
            covers = [held.covers[number] for held in holds if number in held.covers]
            if covers:
                self.windows.unbind(link, covers)
                for held in holds:
                    held.covers.pop(number, None)
                self.windows.recycle(covers)

    def forget(self, holds: Iterable[Held]) -> None:
        """These grants, fenced, are not the lane's any more."""
        for held in holds:
            if self.grants.pop(held.number, None) is None:
                self.prepared.remove(held)
            self.granted_bytes -= held.chunk

    def check(self) -> None:
        """Raises CorruptionError when the books contradict themselves. O(grants x links)."""
        held = list(self.holds())
        if sum(each.chunk for each in held) != self.granted_bytes:
            raise CorruptionError(f"a lane's grants do not have {self.granted_bytes} bytes")
        if len({each.number for each in held}) != len(held):
            raise CorruptionError("a lane has a grant twice")
        for each in held:
            for number, cover in each.covers.items():
                binding = cover.binding
                if number >= len(self.links) or self.links[number] is None or cover.rail != self.rails[number]:
                    raise CorruptionError(f"grant {each.number:#x} has a window for link {number}, which is not there")
                assert self.windows is not None
                if (binding.address, binding.length) != (self.windows.address_of(each.offset), each.chunk):
                    raise CorruptionError(f"the window of grant {each.number:#x} lies elsewhere than its chunk")

    def close(self) -> list[Held]:
        """Destroy all links, free the windows: the grants that were the lane's, which nobody writes into any more.

        Raises whatever a link that cannot be destroyed does; the grants must stay then.
        """
        self.closed = True
        for link in self.links:
            if link is not None:
                link.close()
        links, self.links = self.links, []
        held = list(self.holds())
        self.grants, self.prepared, self.granted_bytes = {}, [], 0
        if self.windows is not None:
            try:
                for each in held:
                    self.windows.free(each.covers.values())
                for rail, link in zip(self.rails, links):
                    if link is not None:
                        self.windows.retire(rail, link)
            except FabricError as exc:  # a window that cannot be freed lets nobody write: its link has gone
                log.error("freeing memory windows: %s", exc)
        return held
