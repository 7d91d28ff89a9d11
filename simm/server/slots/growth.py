"""Grow a running data server: one more worker, with an arena of its own, beside those that serve.

    asking       the manager is asked whether it would take the worker: this server is not being drained, and so on
    populating   the arena's files are made, and a child process faults their pages in, however long that takes
    starting     the worker and its streams and endpoint are forked; the worker takes the newest map, which gives it
                 nothing
    joining      the server joins again, as the same instance, with one worker more. The map that names the worker gives
                 it shards, which move to it as to a new server's
    done

Until *joining* the worker is not among the server's slots. Nothing that serves knows of it, and whatever fails is
undone: its processes are ended, its files removed, and the reason is kept for who asks. From then on it is a worker
like any other: one that dies is restarted on its arena.

What can go wrong, and what we chose
------------------------------------
* *The supervisor must not wait.* Faulting in a TiB takes a minute, in which the manager would declare the server dead.
  So a child does it. Where memory runs out, the kernel ends that child and not the supervisor. Giving the pages back
  takes as long, and another child does that.
* *A child hangs, or is stopped.* Nobody could grow this server until its restart. The one that faults memory in must
  say something now and then, and so must the new worker, or its heartbeat must move. Else it is killed, and all is
  undone.
* *The supervisor is killed.* The children end with it. The arena is a leftover that the next start removes.
* *The manager refuses the JOIN* (too many workers, a token that allows less room). The server joins without the worker.
* *The manager is lost in the middle.* The server joins the next one with all its workers, as soon as there is one. A
  manager that has an older state knows this instance with fewer workers, and asks for no JOIN. The map says so: then
  this server joins again by itself.
* *A warm stop.* The arena's header says that it was added, and on which node. The next start takes it over with the
  others; see ``arena_stock.py``. A server that is stopped before *joining* drops it.
* *A worker's map.* The manager takes a heartbeat's epoch as that of all workers. The new one has an empty arena, whose
  shard words are 0: no value in it is older than any map, as with a new server's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from ...cluster.assignment import Member
from ...cluster.nodes import GONE, NODE_WORKERS_MAX, WORKERS_MAX
from ...config.parsers import parse_bytes
from ...constants import SLAB_BYTES
from ...errors import ConfigError, SegmentError, SimmError, UsageError, printable
from ...host import numa
from ...host.memory import mib
from ...host.threads import LACKING
from ...ipc import segments
from ...ipc.arena_files import OwnedArena
from ...net.listeners import NamedSocket
from ...net.loop import Loop
from ...net.process import end_children
from ...rpc import encode
from ...wire import messages as M
from ..arena_stock import ArenaStock
from ..children import Children, Supervised, WorkerSlot
from ..membership import Membership
from ..rdma_supervisor import Endpoints
from .opening import Opener, close_all

log = logging.getLogger("simm.dataserver")

#: The manager must answer so soon whether it would take the worker.
ASK_S: Final = 5.0
#: Between two attempts to join a manager whose map lacks a worker.
REJOIN_S: Final = 2.0
#: A child that shows no sign of life for so long hangs, or is stopped. The one that faults memory in tells each 0.1 s
#: how far it is, and nothing while it unmaps the arena at its end, for which it gets more time.
SILENT_S: Final = 60.0

ASKING, POPULATING, STARTING, JOINING, DONE, FAILED = "asking", "populating", "starting", "joining", "done", "failed"
#: Nothing is under way.
ENDED: Final = ("", DONE, FAILED)


class Grown(Protocol):
    """What growing needs of its data server."""

    loop: Loop
    slots: list[WorkerSlot]
    member: Member
    membership: Membership
    children: Children
    endpoints: Endpoints
    stock: ArenaStock
    opener: Opener

    def unready(self) -> str:
        """Return why nothing can be added now; empty if it can."""

    def start_worker(self, slot: WorkerSlot) -> None:
        """Start a slot's worker, and send it what it must know."""

    def send_shards(self, slot: WorkerSlot) -> None:
        """Send a slot's worker what the newest map means for it."""

    def share_out(self, shared: list[socket.socket | NamedSocket]) -> None:
        """Take over sockets, to close them at the end; and tell all workers how much memory there is now."""


class Growth:
    """The growing of one data server, one worker at a time."""

    def __init__(self, server: Grown) -> None:
        self._server = server
        self.state = ""
        #: Why the last one failed.
        self._why = ""
        self._number = self._node = self._size = self._done = 0
        self._arena: OwnedArena | None = None
        self._populate: Supervised | None = None
        self._slot: WorkerSlot | None = None
        self._shared: list[socket.socket | NamedSocket] = []
        self._clock = server.loop.clock
        self._began = self._asked_at = self._joined_at = 0.0
        #: The heartbeat of the worker that starts, when it was last looked at.
        self._beat = 0
        #: Processes that were told to end.
        self._ending: list[Supervised] = []
        #: The map and the workers that were last compared, and which of these it lacks.
        self._compared: tuple[object, object] = (None, None)
        self._unlisted: list[int] = []
        self._listed: set[int] = set()

    @property
    def busy(self) -> bool:
        """Return True if something is under way."""
        return self.state not in ENDED

    @property
    def arenas(self) -> list[OwnedArena]:
        """Return the arena that no slot has yet."""
        return [self._arena] if self._arena is not None else []

    # -- what operators ask -----------------------------------------------------------------------

    def order(self, text: str) -> dict[str, Any]:
        """Carry an operator's order out, and return how far it is; without text only that.

        ``text``: bytes, and perhaps a NUMA node. Raises SimmError if it cannot be done; nothing has changed then.
        """
        if text:
            size, _, node = text.partition(" ")
            self._begin(size, node)
        return self.report()

    def report(self) -> dict[str, Any]:
        """Return how far it is, JSON-able."""
        slots = self._server.slots
        return {
            "server": self._server.member.name, "state": self.state or "none", "text": self.text(),
            "worker": self._number, "numa_node": self._node, "bytes": self._size, "done_bytes": self._done,
            "workers": len(slots), "memory_bytes": sum(slot.segment.size for slot in slots),
        }  # fmt: skip

    def text(self) -> str:
        """Return how far it is, in words."""
        what = f"worker {self._number} with {mib(self._size)} on node {self._node}"
        slots = self._server.slots
        total = sum(slot.segment.size for slot in slots)
        owned = self._server.member.owned(self._number)
        return {
            "": "it has not been asked to grow",
            ASKING: f"{what} is to be added: its memory is faulted in, then it joins, and shards move to it",
            POPULATING: f"{what}: {mib(self._done)} of its memory are faulted in; then it joins, and shards move to it",
            STARTING: f"{what}: its memory is there, its processes start",
            JOINING: f"{what}: it serves, and waits for the manager's map to name it",
            DONE: f"{what} serves, {owned:,} shards so far; the server has {len(slots)} workers and {mib(total)} now",
            FAILED: f"{what}: not added, nothing else has changed: {self._why}",
        }[self.state]

    def _begin(self, size_text: str, node_text: str) -> None:
        server = self._server
        if self.busy:
            raise UsageError(f"it grows already: {self.text()}")
        if why := server.unready():
            raise UsageError(f"it cannot grow now: {why}")
        try:
            size = parse_bytes(size_text) // SLAB_BYTES * SLAB_BYTES
            nodes = numa.parse_numa(node_text) if node_text else sorted(set(server.opener.options.nodes))
        except ConfigError as exc:
            raise UsageError(str(exc)) from None
        if len(nodes) != 1 and node_text:
            raise UsageError(f"numa={node_text!r}: name one node")
        if size <= 0:
            raise UsageError(f"an arena of {size_text} is none: name the memory to add, as 64G")
        number = max(slot.number for slot in server.slots) + 1
        if number >= min(NODE_WORKERS_MAX, segments.WORKERS_MAX):
            raise UsageError(f"a data server has at most {NODE_WORKERS_MAX} workers")
        options = server.opener.options
        segments.check_socket_paths(options.runtime_dir, options.name, number + 1)
        if not server.membership.joined:
            raise UsageError("no manager answers, which would give the new memory its shards: try again when one does")
        node = max(nodes, key=lambda each: numa.node_free_bytes(each) or 0)
        server.stock.require_room(size, node)
        self.state, self._why, self._number, self._node, self._size, self._done = ASKING, "", number, node, size, 0
        self._began = self._asked_at = self._clock()
        log.warning("an operator adds worker %d with %s on node %d", number, mib(size), node)
        server.membership.request(M.ClusterStatus(0), self._on_status)

    # -- asking -----------------------------------------------------------------------------------

    def _on_status(self, msg: Any, _status: int) -> None:
        if self.state != ASKING:
            return
        try:
            why = msg.text if isinstance(msg, M.Error) else self._refused_by(json.loads(msg.json))
        except (AttributeError, ValueError, TypeError, KeyError):
            why = "the manager's status cannot be read: is it another version of SiMM?"
        if why:
            self._fail(printable(str(why)))
        else:
            self._attempt(self._make)

    def _refused_by(self, status: dict[str, Any]) -> str:
        """Return why the cluster cannot take another worker of this server now; empty if it can."""
        name = self._server.member.name
        if status["rebuilding"]:
            return "the manager is collecting the map that it lost: try again in some seconds"
        if any(node["name"] == name and node["draining"] for node in status["nodes"]):
            return f"{name!r} is being drained, and would get no shards: `simm node resume {name}` first"
        # Those that have gone are remembered, and take no room. The manager decides about any that may return.
        living = [node for node in status["nodes"] if node.get("state") not in GONE]
        if sum(len(node["workers"]) for node in living) >= WORKERS_MAX:
            return f"a cluster has at most {WORKERS_MAX} workers"
        return ""

    # -- populating -------------------------------------------------------------------------------

    def _make(self) -> None:
        server = self._server
        server.stock.require_room(self._size, self._node)  # it was a while ago
        server.stock.nodes[self._number] = self._node
        arena = self._arena = server.stock.create(self._number, self._size)
        stock, number = server.stock, self._number

        def body(supervisor: socket.socket) -> None:
            def tell(done: int, _new: int, _total: int) -> bool:
                supervisor.sendall(encode(M.StatsReply(json.dumps({"done": done}).encode())))
                return True

            end = {"end": ""}
            try:
                stock.populate({number: arena}, tell)
            except (SimmError, OSError, MemoryError) as exc:
                end = {"end": str(exc) or type(exc).__name__}
            supervisor.sendall(encode(M.StatsReply(json.dumps(end).encode())))
            supervisor.recv(1)  # what has been sent must be read before this process ends

        name = f"populating of worker {number}"
        self._populate = Supervised(server.children, name, body, arena.fds, self._on_populated, segment=arena)
        self._populate.start()
        self.state = POPULATING

    def _on_populated(self, msg: Any, _request_id: int) -> None:
        if self.state != POPULATING or not isinstance(msg, M.StatsReply):
            return
        found = json.loads(msg.json)
        self._done = found.get("done", self._done)
        if "end" in found:
            if found["end"]:
                self._fail(found["end"])
            else:
                self._done = self._size
                self._end_populate()
                self._attempt(self._open)

    def _end_populate(self) -> None:
        process, self._populate = self._populate, None
        if process is not None:
            process.kill()  # that it unmaps so much takes a while, which nobody waits for
            self._ending.append(process)

    # -- starting ---------------------------------------------------------------------------------

    def _open(self) -> None:
        server, arena = self._server, self._arena
        assert arena is not None
        slot = WorkerSlot(self._number, self._node, arena)
        self._shared = server.opener.open(slot)
        self._slot, self._beat = slot, 0
        self.state = STARTING
        server.member.add(slot.number)
        server.start_worker(slot)

    def tick(self) -> None:
        """Go on if a child has answered or ended. Called several times a second, and with every child's end."""
        self._ending = [process for process in self._ending if process.child is not None and not process.ended()]
        member = self._server.member
        if self._compared != (member.map, member.workers):
            self._compared = member.map, member.workers
            self._listed, self._unlisted = member.listed, member.unlisted
        if self.state == ASKING and self._clock() - self._asked_at > ASK_S:
            self._fail("the manager does not answer: try again when it does")
        elif self.state == POPULATING and self._populate is not None:
            self._populate.kill_if_silent(SILENT_S + self._size / segments.UNMAP_BYTES_PER_S)
            if (child := self._populate.ended()) is not None:
                self._fail(f"the process that faulted its memory in died{child.cause}")
        elif self.state == STARTING and (slot := self._slot) is not None:
            if (beat := slot.segment.heartbeat()) != self._beat:
                self._beat, slot.worker.last_seen = beat, self._clock()
            slot.worker.kill_if_silent(SILENT_S)
            if (child := slot.worker.ended()) is not None:
                self._fail(f"its worker died{child.cause}, see the log")
            elif slot.ready and slot.current:
                self._attempt(self._join)
        elif self.state == JOINING and self._number in self._listed:
            self.state = DONE
            log.warning("%s (%.1f s)", self.text(), self._clock() - self._began)
        self._join_again()

    # -- joining ----------------------------------------------------------------------------------

    def _join(self) -> None:
        server, slot = self._server, self._slot
        assert slot is not None
        server.slots.append(slot)
        server.share_out(self._shared)
        self._arena = self._slot = None
        self._shared = []
        for stream in slot.streams:
            stream.start_or_retry()
        server.endpoints.start_of(slot.number, later=True)
        self.state = JOINING
        server.send_shards(slot)
        self._joined_at = self._clock()
        server.membership.rejoin()

    def _join_again(self) -> None:
        """Join once more if the map lacks a worker: the manager has an older state, and asks for no JOIN."""
        server, now = self._server, self._clock()
        missing = [number for number in self._unlisted if self.state != STARTING or number != self._number]
        if missing and server.membership.joined and not server.member.fenced and now - self._joined_at > REJOIN_S:
            self._joined_at = now
            log.warning("the manager's map lacks workers %s: joining again", missing)
            server.membership.rejoin()

    def refused(self, why: str) -> bool:
        """Take back the worker that the manager does not take. Return False if there is none."""
        server = self._server
        slot = next((slot for slot in server.slots if slot.number == self._number), None)
        if self.state != JOINING or slot is None:
            return False
        server.slots.remove(slot)
        self._slot, self._arena, self._shared = slot, slot.segment, [slot.unix]
        self._shared += [slot.tcp] if slot.tcp is not None else []
        self._fail(f"the manager has refused it: {why}")
        server.share_out([])
        return True

    # -- the end ----------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (SimmError, *LACKING) as exc:
            self._fail(str(exc) or type(exc).__name__)

    def _fail(self, why: str) -> None:
        self.stop()
        self.state, self._why = FAILED, why
        log.error("%s", self.text())

    def stop(self) -> None:
        """Undo what is under way, as far as the server's slots do not have it."""
        server = self._server
        self._end_populate()
        slot, self._slot = self._slot, None
        if slot is not None:
            processes = [*server.endpoints.remove(slot.number), slot.worker, slot.mover, *slot.streams]
            end_children([each.child for each in processes if each.child is not None], 0.0)
            for each in processes:
                each.retire()
            self._ending += processes
            server.member.remove(slot.number)
        close_all(self._shared)
        self._shared = []
        arena, self._arena = self._arena, None
        if arena is not None:
            self._remove(arena)
        if self.busy:
            self.state = ""

    def _remove(self, arena: OwnedArena) -> None:
        """Remove an arena's files. Whoever closes them last gives their pages back: a process of its own."""
        children = self._server.children
        last = Supervised(children, f"freeing of {arena.name}", _wait, arena.fds, segment=arena)
        if not children.stopping:
            with contextlib.suppress(*LACKING):  # no process to spare
                last.start()
        try:
            segments.store_closed(arena.name)
            arena.unlink()
        except SegmentError as exc:
            log.error("removing %s: %s", arena.name, exc)
        arena.close()
        last.kill()
        self._ending.append(last)


def _wait(supervisor: socket.socket) -> None:
    supervisor.recv(1)
