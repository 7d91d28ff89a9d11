"""A data server's HTTP pages, /healthz, /readyz and /metrics, made from what the supervisor knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...arena.events.victims import AGE_BUCKETS, age_bound_s
from ...cluster.assignment import Member
from ...config.tokens import Token, namespaces_of
from ...constants import OTHERS_NAMESPACE
from ...ipc.counts import BUCKETS, SAMPLE, SAMPLE_BATCHES, SAMPLE_PUTS, Word, bound_s
from ...ipc.tally import MISSES, Totals, counters_summary
from ...net.http import Page, Route
from ...net.loop import Loop
from ...net.metrics import OF_PROCESSES, Metric, Samples
from ...net.tls_peer import ServerTls
from ..children import SILENT_S, Supervised, WorkerSlot
from ..membership import Membership
from ..rdma_supervisor import Endpoints
from .usage import Usage, usage_of

_Kind = Literal["gauge", "counter", "histogram"]
#: Begins a text of a server that is well, short of what follows.
_BUT: Final = "ok, but "


def _worker(name: str, kind: _Kind, about: str, *labels: str) -> Metric:
    """Return a metric of one worker."""
    return Metric(name, kind, about, ("server", "worker", "numa", *labels))


_JOINED: Final = Metric("simm_joined", "gauge", "1 while a manager knows this server.", ("server",))
_FENCED: Final = Metric(
    "simm_fenced", "gauge", "1 while the manager does not know this server, so that it takes no put and no delete.",
    ("server",),
)  # fmt: skip
_EPOCH: Final = Metric("simm_map_epoch", "gauge", "Epoch of the shard map in use.", ("server",))
#: By key of the worker's STATS.
_WORKER: Final = {
    "entries": _worker("simm_entries", "gauge", "Values stored."),
    "slots": _worker("simm_slots", "gauge", "Values that the table can hold."),
    "data_bytes": _worker("simm_data_bytes", "gauge", "Size of the memory for values."),
    "free_bytes": _worker(
        "simm_free_bytes", "gauge", "Bytes in free chunks. A cache is full in normal operation: it evicts then."
    ),
    "room": _worker(
        "simm_largest_free_bytes", "gauge",
        "Largest piece of free memory outside of slabs, bytes. Far less than simm_free_bytes: it is in pieces, and "
        "larger values evict others.",
    ),
    "granted_bytes": _worker("simm_granted_bytes", "gauge", "Bytes handed to clients and not yet committed."),
    "grants": _worker("simm_grants", "gauge", "Chunks handed to clients and not yet committed."),
    "pins": _worker("simm_pins", "gauge", "Values pinned by clients. A number that only grows: views are not closed."),
    "pinned_bytes": _worker(
        "simm_pinned_bytes", "gauge", "Bytes that pins keep from eviction, at most half of simm_data_bytes."
    ),
    "sessions": _worker("simm_sessions", "gauge", "Sessions of clients and of this server's own processes."),
    "sessions_quarantined": _worker(
        "simm_sessions_quarantined", "gauge",
        "Sessions whose connection is gone and whose process still exists: stopped, or hung.",
    ),
    "connections": _worker("simm_connections", "gauge", "Connections to the worker."),
    "namespaces": _worker("simm_namespaces", "gauge", "Places of namespaces that are in use, of 256."),
    "shards": _worker("simm_shards", "gauge", "Shards in which puts and deletes are accepted."),
    "frozen": _worker(
        "simm_shards_frozen", "gauge", "Shards that another server takes over, and of which it still needs the values."
    ),
    "puts": _worker("simm_puts_total", "counter", "Values committed, by any path."),
    "overwrites": _worker("simm_overwrites_total", "counter", "Values committed that replaced another one."),
    "deletes": _worker("simm_deletes_total", "counter", "Values deleted."),
    "groups": _worker("simm_groups", "gauge", "Groups of keys whose values are evicted together."),
    "stale_commits": _worker("simm_stale_commits_total", "counter", "Commits with a spent or foreign grant."),
    "stale_drops": _worker("simm_stale_drops_total", "counter", "Values dropped as their namespaces have advanced."),
    "requests": _worker(
        "simm_requests_total", "counter",
        "Requests handled. GETs by shared memory and by RDMA involve no process of the server, and are not counted.",
    ),
    "protocol_errors": _worker(
        "simm_protocol_errors_total", "counter",
        "Connections closed for malformed input, by the worker, its streams and its endpoint.",
    ),
    "unauthorized": _worker(
        "simm_unauthorized_total", "counter",
        "Connections that these refused: with another token, without one, or of a user who may not.",
    ),
    "handler_errors": _worker("simm_handler_errors_total", "counter", "Requests that failed by an error in SiMM."),
    "events": _worker(
        "simm_events_total", "counter", "Events that the worker has written to its ring: what came and what went."
    ),
    "event_bytes": _worker("simm_event_ring_bytes", "gauge", "Size of the ring of events; 0 without --events."),
    "event_turns": _worker(
        "simm_event_ring_turns_total", "counter",
        "Times that the ring was written all around. A reader that is away for so long has a gap.",
    ),
    "mended": _worker(
        "simm_arena_mended_total", "counter",
        "Words and slots of the arena that another process had overwritten and the worker has put right.",
    ),
}  # fmt: skip
_EVICTIONS: Final = _worker(
    "simm_evictions_total", "counter",
    "Entries evicted. Reason own: for a value of the same size; reassigned: a slab of another size was older; window: "
    "there was no value of the same size; last_resort: pins and grants left no other choice; set_full: no slot was "
    "free; group: another one of its group was evicted or deleted; near: a near copy, which goes first.",
    "reason",
)  # fmt: skip
_EVICTED_CHUNKS: Final = _worker(
    "simm_evictions_for_room_total", "counter",
    "Entries evicted to make room, by the size of their chunks in bytes, large for those above slabs; less than "
    "simm_evictions_total by set_full and group.",
    "chunk",
)  # fmt: skip
_EVICTION_AGE: Final = _worker(
    "simm_eviction_age_seconds", "histogram",
    "How long entries evicted to make room had been stored: a sample of them. Shorter than the time after which a "
    "prompt comes back: more memory would give more hits.",
)  # fmt: skip
_AGE_BOUNDS: Final = tuple(map(age_bound_s, range(AGE_BUCKETS)))
_PUT_FAILURES: Final = _worker(
    "simm_put_failures_total", "counter",
    "Parts of puts that the worker refused; clients try most of it again. Cause no_room: a request for grants brought "
    "none, as others hold all room; table_full: all entries that may go are pinned; wrong_owner: the shard has moved; "
    "over_quota: the namespace holds what its quota allows; stale_grant: the grant was spent or foreign; old_epoch: "
    "the put began before the namespace advanced; bad_request.",
    "cause",
)  # fmt: skip
#: By key of a namespace's quota in the worker's STATS.
_QUOTAS: Final = {
    "used_bytes": _worker(
        "simm_namespace_used_bytes", "gauge", "Bytes that the values of a namespace with a quota hold.", "namespace"
    ),
    "quota_bytes": _worker(
        "simm_namespace_quota_bytes", "gauge", "This worker's part of a namespace's quota.", "namespace"
    ),
}
#: By key of a Row's moves.
_MOVES: Final = {
    "left": _worker("simm_moves_left", "gauge", "Shards still moving in."),
    "rate": _worker("simm_move_bytes_per_second", "gauge", "Bytes a second copied from previous owners of late."),
    "bytes": _worker("simm_moved_bytes_total", "counter", "Bytes copied from previous owners."),
    "values": _worker("simm_moved_values_total", "counter", "Values copied from previous owners."),
    "lost": _worker(
        "simm_move_lost_values_total", "counter", "Values of previous owners that did not come along: misses now."
    ),
}
_RDMA_READY: Final = _worker(
    "simm_rdma_ready", "gauge", "1 while clients can open RDMA connections; reason says why not.", "reason"
)
#: By key of an endpoint's STATS.
_RDMA: Final = {
    "rdma_connections": _worker("simm_rdma_connections", "gauge", "RDMA connections of clients."),
    "queue_pairs": _worker("simm_rdma_queue_pairs", "gauge", "Queue pairs of these."),
    "granted_bytes": _worker("simm_rdma_granted_bytes", "gauge", "Bytes handed to RDMA clients, not yet committed."),
    "registered_bytes": _worker("simm_rdma_registered_bytes", "gauge", "Bytes registered, on all rails together."),
    "windows": _worker("simm_rdma_windows", "gauge", "Memory windows made."),
    "protected": _worker(
        "simm_rdma_protected", "gauge", "1 where clients can write only into the chunks that they hold."
    ),
    "connections_opened": _worker("simm_rdma_connections_opened_total", "counter", "RDMA connections opened."),
    "connections_broken": _worker(
        "simm_rdma_connections_broken_total", "counter",
        "RDMA connections closed because the endpoint met a broken link: a device failed, or refused a client's WRITE.",
    ),
    "commits": _worker("simm_rdma_commits_total", "counter", "Values committed that came by RDMA."),
    "commit_failures": _worker("simm_rdma_commit_failures_total", "counter", "Values that came by RDMA in vain."),
    "recalls": _worker("simm_rdma_recalls_total", "counter", "RDMA connections asked for idle grants."),
}  # fmt: skip
_OPERATIONS: Final = _worker(
    "simm_operations_total", "counter",
    "Keys that clients have got or viewed, put, asked for (exists) or deleted. Clients on the host (path shm) count "
    "theirs in memory that they share with the worker. By path tcp and rdma servers count, each try; gets by rdma "
    "involve no server and are not among them. A put of two copies looks for up to five keys, which count as exists; "
    "so do those that a replacement looks for, but by path shm.",
    "namespace", "path", "op",
)  # fmt: skip
_HITS: Final = _worker("simm_hits_total", "counter", "Values that clients have got or viewed.", "namespace", "path")
_MISSES: Final = _worker(
    "simm_misses_total", "counter",
    "Keys that clients have not got. Reason absent: not stored, or deleted; evicted: it had to make room (of clients "
    "on the host, by a sample of the keys; by tcp it is absent); moving: not found at either owner of a shard that "
    "moves; wrong_size: the buffer has another size; unsound: another checksum or namespace; unreachable: its server "
    "could not be asked; timeout: its server had not answered when the call's deadline passed. Clients on the host "
    "count these two for servers elsewhere as well, by path tcp. Of a namespace with two copies each copy that was "
    "tried counts.",
    "namespace", "path", "reason",
)  # fmt: skip
_OP_BYTES: Final = _worker(
    "simm_op_bytes_total", "counter", "Bytes of values that clients have got or put.", "namespace", "path", "op"
)
_KEPT: Final = _worker(
    "simm_kept_bytes", "gauge",
    "Bytes that clients keep from eviction: soft, evicted last; hard, not evicted; and of near copies, evicted first.",
    "namespace", "class",
)  # fmt: skip
_KEPT_SLOTS: Final = _worker(
    "simm_kept_slots", "gauge", "Values that are hard kept; each takes a slot of the table.", "namespace", "class"
)
#: By key of what STATS says of kept values.
_KEEP: Final = {
    "hard_max": _worker("simm_keep_max_bytes", "gauge", "Bytes that may be hard kept in all: --keep-share."),
    "hard_fenced": _worker(
        "simm_keep_fenced_bytes", "gauge",
        "Bytes of the aligned 2 MiB pieces with a hard kept value in them; simm_keep_max_bytes bounds these, too.",
    ),
    "namespace_max": _worker(
        "simm_keep_namespace_max_bytes", "gauge", "Bytes of a namespace that may be hard kept: --keep-namespace-share."
    ),
    "slots_max": _worker("simm_keep_max_slots", "gauge", "Slots of the table that hard kept values may take in all."),
    "namespace_slots_max": _worker("simm_keep_namespace_max_slots", "gauge", "Slots that one namespace's may take."),
    "near_max": _worker("simm_near_max_bytes", "gauge", "Bytes that near copies may take: --near-share."),
}  # fmt: skip
_NEAR: Final = _worker(
    "simm_near_copies_total", "counter",
    "Near copies: made; refused, as there was no room; replaced by another one; expired.", "kind",
)  # fmt: skip
_KEEP_FAILURES: Final = _worker(
    "simm_keep_failures_total", "counter",
    "Values that were not kept when a client asked for that. Cause over_quota: hard kept values take all bytes, slots "
    "or pieces of 2 MiB that they may, in all or of the namespace, or 6 of the 8 slots of the value's set; not_found; "
    "wrong_owner: the shard has moved; bad_request.",
    "cause",
)  # fmt: skip
_PUTS_FAILED: Final = _worker(
    "simm_puts_failed_total", "counter",
    "Values that clients could not put: by path shm in the end, by others at a try.", "namespace", "path",
)  # fmt: skip
#: By word: of readers in arenas.
_READS: Final = {
    Word.RETRIES: _worker(
        "simm_seqlock_retries_total", "counter", "Reads in the arena that began again, as the entry changed meanwhile."
    ),
    Word.PINNED: _worker(
        "simm_pinned_reads_total", "counter", "Reads in the arena that asked the worker, as the entry kept changing."
    ),
}
_SECONDS: Final = _worker(
    "simm_op_seconds", "histogram",
    "How long calls take. By path shm as clients see them, a batch at one worker (_many): "
    f"one in {SAMPLE} of single gets, one in {SAMPLE_PUTS} of single puts, one in {SAMPLE_BATCHES} of batches that are "
    "got or looked for, all others. By path tcp in the stream process.",
    "path", "op",
)  # fmt: skip
_BOUNDS: Final = tuple(map(bound_s, range(BUCKETS)))
_DISBELIEVED: Final = _worker(
    "simm_sessions_disbelieved_total", "counter",
    "Sessions of clients whose counts shrank or grew faster than possible; they are not counted any more.",
)  # fmt: skip
_SILENT: Final = _worker(
    "simm_worker_silent_seconds", "gauge", "Time since the worker answered its supervisor; 0 while it is restarted."
)
_CUT_OFF: Final = _worker(
    "simm_streams_cut_off", "gauge",
    "Stream processes that hang, or have not reached their worker for 5 s: puts by TCP fail.",
)  # fmt: skip
_CORRUPTIONS: Final = _worker(
    "simm_worker_corruptions_total", "counter",
    "Processes of the worker that ended because another process had overwritten their arena.",
)  # fmt: skip
_RESTARTS: Final = _worker(
    "simm_process_restarts_total", "counter", "Processes that died and were replaced: worker, stream or endpoint.",
    "process",
)  # fmt: skip
_CPU: Final = _worker(
    "simm_process_cpu_seconds_total", "counter",
    "Processor time of the worker's processes and their predecessors, seconds: worker, stream (all of them), endpoint, "
    "mover.",
    "process",
)  # fmt: skip
_RESIDENT: Final = _worker(
    "simm_process_resident_memory_bytes", "gauge", "Their memory in use, with what they touched of the arena.",
    "process",
)  # fmt: skip
_PRIVATE: Final = _worker(
    "simm_process_private_memory_bytes", "gauge", "Their memory in use without shared memory, such as the arena.",
    "process",
)  # fmt: skip
_DESCRIPTORS: Final = _worker(
    "simm_process_open_fds", "gauge",
    "File descriptors that one of these processes has open: the one with the fewest left. Each client takes some.",
    "process",
)  # fmt: skip
_DESCRIPTORS_MAX: Final = _worker(
    "simm_process_max_fds", "gauge", "File descriptors that this one may open.", "process"
)

#: All metrics of a data server, in their order.
METRICS: Final = (
    _JOINED, _FENCED, _EPOCH, *_WORKER.values(), _EVICTIONS, _EVICTED_CHUNKS, _EVICTION_AGE, _PUT_FAILURES, _KEPT,
    _KEPT_SLOTS, *_KEEP.values(), _KEEP_FAILURES, _NEAR, *_QUOTAS.values(), *_MOVES.values(),
    _RDMA_READY, *_RDMA.values(), _OPERATIONS, _HITS, _MISSES, _OP_BYTES, _PUTS_FAILED, *_READS.values(), _SECONDS,
    _DISBELIEVED, _SILENT, _CUT_OFF, _CORRUPTIONS, _RESTARTS, _CPU, _RESIDENT, _PRIVATE, _DESCRIPTORS,
    _DESCRIPTORS_MAX, *OF_PROCESSES,
)  # fmt: skip


@dataclass
class Row:
    """The supervisor's knowledge of one worker."""

    worker: int
    numa: int
    stats: Mapping[str, Any]
    moves: Mapping[str, int] = field(default_factory=dict)
    #: Since it answered the supervisor, seconds.
    silent_s: float = 0.0
    #: Of its endpoint: ``ready``, ``reason`` for not being so, and counters where there is one.
    rdma: Mapping[str, Any] = field(default_factory=dict)
    #: Its stream processes that hang or do not reach it.
    streams_cut_off: int = 0
    #: Its processes that ended with a CorruptionError.
    corruptions: int = 0
    #: What its processes do -> how many died.
    restarts: Mapping[str, int] = field(default_factory=dict)
    #: What its processes do -> what they use.
    usage: Mapping[str, Usage] = field(default_factory=dict)
    #: By path, what clients or the worker's processes have counted.
    counted: Mapping[str, Totals] = field(default_factory=dict)
    #: What it, its streams and its endpoint have refused or failed at, with all predecessors, as keys of STATS.
    failures: Mapping[str, int] = field(default_factory=dict)
    #: Its namespaces may be named. Not if tokens are bound to some: who reads the page may be a tenant.
    names_all: bool = True


class DataServerPages:
    """The pages of one data server, from what its supervisor has. ``slots`` may grow until the first page is asked for.

    ``trouble`` says why the server is not ready, if that is no matter of a worker's. ``tls``: of its ports.
    """

    def __init__(
        self, loop: Loop, slots: Sequence[WorkerSlot], member: Member, membership: Membership, endpoints: Endpoints,
        trouble: Callable[[], str], tls: ServerTls | None = None, tokens: Sequence[Token] = (),
    ) -> None:  # fmt: skip
        self._trouble = trouble
        self._tls = tls
        self._tokens = tokens  # may change meanwhile
        self.routes: dict[str, Route] = {
            "/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz,
        }  # fmt: skip
        self._loop = loop
        self._slots = slots
        self._member = member
        self._membership = membership
        self._endpoints = endpoints

    def healthz(self) -> Page:
        """Return whether every worker serves or comes to, see :func:`healthz`."""
        now = self._loop.clock()
        serving = [slot for slot in self._slots if slot.ready]
        waiting = [slot for slot in self._slots if not slot.ready]
        down = [slot.number for slot in waiting if not slot.comes_up(now)]
        coming = [slot.number for slot in waiting if slot.number not in down]
        silent = [slot.number for slot in serving if now - slot.worker.last_seen > SILENT_S]
        cut_off = [slot.number for slot in serving if any(stream.is_cut_off(slot.ready_at) for stream in slot.streams)]
        # A stream does not reach a worker that recovers its arena: that is no fault of the stream's.
        cut_off += [slot.number for slot in waiting if any(stream.is_silent() for stream in slot.streams)]
        unreachable = [slot.stats["unreachable"] for slot in serving if slot.stats.get("unreachable")]
        # It restarts by itself, however often. A restart of all would help no more, and cost the values.
        dead = [slot.number for slot in serving if any(stream.child is None for stream in slot.streams)]
        joined, fenced = self._membership.joined, self._member.fenced
        return healthz(
            down, silent, joined, fenced, coming=coming, cut_off=sorted(cut_off), unreachable=unreachable, dead=dead,
            deaths=max((slot.fruitless for slot in waiting), default=0),
        )  # fmt: skip

    def readyz(self) -> Page:
        """Return whether the server takes part: it has said READY, all workers serve, it is not fenced, does not stop.

        It stays ready without a manager, as the data path needs none.
        """
        health = self.healthz()
        well = health.status == 200 and all(slot.ready for slot in self._slots)
        trouble = self._trouble() or ("" if well else health.body.strip().removeprefix(_BUT))
        if not trouble and self._member.fenced:
            trouble = "the manager does not know this server: no puts until it does"
        return Page(f"{trouble}\n", status=503) if trouble else Page("ready\n")

    def metrics(self) -> Samples:
        """Return the metrics."""
        rows = []
        for slot in self._slots:
            moves = {key: count + getattr(slot.progress, key) for key, count in slot.moved_ever.items()}
            moves["left"] = len(self._member.moving(slot.number, slot.words()))
            moves["rate"] = slot.progress.rate
            silent_s = self._loop.clock() - slot.worker.last_seen if slot.ready else 0.0
            row = Row(slot.number, slot.node, slot.stats, moves, silent_s, corruptions=slot.corruptions)
            row.rdma = self._endpoints.row(slot.number)
            row.streams_cut_off = sum(stream.is_cut_off(slot.ready_at) for stream in slot.streams)
            row.restarts = {**slot.deaths, **self._endpoints.deaths(slot.number)}
            processes = self._processes(slot)
            alive = [(name, process.child) for name, process in processes if process.child is not None]
            row.usage = usage_of(alive, [(name, process.cpu_s) for name, process in processes])
            row.counted = slot.counts(self._endpoints.counted(slot.number))
            row.failures = slot.failures(self._endpoints.failures(slot.number))
            row.names_all = not namespaces_of(self._tokens)
            rows.append(row)
        joined, member = self._membership.joined, self._member
        ends = self._tls.certificate_ends() if self._tls else None
        return metrics(
            member.name, rows, joined=joined, fenced=member.fenced, epoch=member.epoch, certificate_ends=ends
        )

    def _processes(self, slot: WorkerSlot) -> list[tuple[str, Supervised]]:
        """Return what the processes of a worker do, and the processes."""
        found: list[tuple[str, Supervised]] = [("worker", slot.worker), ("mover", slot.mover)]
        found += [("stream", stream) for stream in slot.streams]
        endpoint = self._endpoints.by_worker.get(slot.number)
        if endpoint is not None:
            found.append(("endpoint", endpoint.process))
        return found

    def ready(self, host: str, http: str) -> str:
        """Return the line that says that the server serves at a host, and where its pages are."""
        ports = ",".join(str(slot.tcp.getsockname()[1]) for slot in self._slots if slot.tcp is not None)
        memory = sum(slot.segment.size for slot in self._slots)
        rdma = ",".join(str(endpoint.port) for endpoint in self._endpoints.by_worker.values())
        return (
            f"READY dataserver {self._member.name} {host}:{ports} workers={len(self._slots)} "
            f"memory={memory >> 20}M{http}{' rdma=' + rdma if rdma else ''}"
        )

    def status(self) -> str:
        """Return a line for the service manager: what is wrong, else what there is."""
        health = self.healthz()
        if health.status != 200:
            return health.body.partition("\n")[0]
        if self._member.fenced or not self._membership.joined or not all(slot.ready for slot in self._slots):
            return f"serving, {health.body.strip().removeprefix(_BUT)}"
        size = sum(slot.data_bytes for slot in self._slots)
        used = size - sum(slot.stats.get("free_bytes", 0) for slot in self._slots)
        entries = sum(slot.stats.get("entries", 0) for slot in self._slots)
        left = sum(len(self._member.moving(slot.number, slot.words())) for slot in self._slots)
        moving = f", {left} shards still moving in" if left else ""
        shards = sum(map(self._member.owned, self._member.workers))
        return (
            f"serving {entries:,} values in {used / (1 << 30):.2f} of {size / (1 << 30):.2f} GiB, "
            f"{shards:,} shards, workers: {len(self._slots)}{moving}"
        )


def healthz(
    down: Sequence[int], silent: Sequence[int], joined: bool, fenced: bool, *,
    coming: Sequence[int] = (), cut_off: Sequence[int] = (), unreachable: Sequence[str] = (), dead: Sequence[int] = (),
    deaths: int = 0,
) -> Page:  # fmt: skip
    """Return 200 while every worker serves or comes to, also without a manager, as the data path needs none.

    Where this says otherwise a kubelet ends the server, with all values. So a worker that recovers its arena is well.

    ``down``: workers that do not serve, and will not by themselves. ``silent``: workers that hang. ``coming``: workers
    that start or recover their arenas. ``cut_off``: workers with a stream process that hangs or does not reach them.
    ``unreachable``: why clients of this host do not find a worker. ``dead``: workers of which a stream process has died
    and is started again. ``deaths``: of a worker that is coming, in a row.
    """
    if down:
        why = "they cannot be started, hang, or end again and again"
        return Page(f"workers {list(down)} do not come up: {why}\n", status=503)
    if silent:
        return Page(f"workers {list(silent)} do not answer: stopped, or hung? kill -9 restarts one\n", status=503)
    if cut_off:
        text = f"a stream process of workers {list(cut_off)} hangs or does not reach its worker: kill -9 restarts it\n"
        return Page(text, status=503)
    if unreachable:
        return Page("".join(f"{why}\n" for why in unreachable), status=503)
    if coming:
        so_far = f"; one died {deaths} times in a row before it served" if deaths else ""
        return Page(f"{_BUT}workers {list(coming)} are restarting: they recover their arenas{so_far}\n")
    if fenced:
        return Page(f"{_BUT}the manager does not know us: no puts until it does\n")
    if dead:
        return Page(f"{_BUT}a stream process of workers {list(dead)} is being restarted\n")
    return Page("ok\n" if joined else f"{_BUT}no manager\n")


def metrics(
    server: str, rows: Sequence[Row], *, joined: bool, fenced: bool, epoch: int, certificate_ends: float | None = None
) -> Samples:
    """Return the metrics of a data server by its name."""
    samples = Samples(METRICS)
    samples.add(_JOINED, joined, server)
    samples.add(_FENCED, fenced, server)
    samples.add(_EPOCH, epoch, server)
    for row in rows:
        _add_row(samples, row, (server, row.worker, row.numa))
    samples.add_process(certificate_ends)
    return samples


def _add_row(samples: Samples, row: Row, who: tuple[str, int, int]) -> None:
    stats = row.stats
    for key, metric in _WORKER.items():
        samples.add(metric, row.failures.get(key, stats.get(key, 0)), *who)
    others = {"set_full": stats.get("set_evictions", 0), "group": stats.get("group_evictions", 0)}
    for reason, count in {**stats.get("evictions", {}), **others}.items():
        samples.add(_EVICTIONS, count, *who, reason)
    for chunk, count in stats.get("evictions_by_chunk", {}).items():
        samples.add(_EVICTED_CHUNKS, count, *who, chunk)
    if ages := stats.get("eviction_ages"):
        samples.add_histogram(_EVICTION_AGE, ages[0] / 1000, ages[1:], _AGE_BOUNDS, *who)
    for cause, count in stats.get("put_failures", {}).items():
        samples.add(_PUT_FAILURES, count, *who, cause)
    kept = stats.get("kept", {})
    shown = None if row.names_all else stats.get("quotas", {})
    for metric, key in ((_KEPT, "bytes"), (_KEPT_SLOTS, "slots")):
        for (namespace, kind), count in _kept_by(kept.get(key, {}), shown).items():
            samples.add(metric, count, *who, namespace, kind)
    for key, metric in _KEEP.items():
        samples.add(metric, kept.get(key, 0), *who)
    for cause, count in kept.get("failures", {}).items():
        samples.add(_KEEP_FAILURES, count, *who, cause)
    for kind, count in stats.get("near", {}).items():
        samples.add(_NEAR, count, *who, kind)
    for namespace, counts in stats.get("quotas", {}).items():
        for key, metric in _QUOTAS.items():
            samples.add(metric, counts[key], *who, namespace)
    for key, metric in _MOVES.items():
        samples.add(metric, row.moves.get(key, 0), *who)
    if row.rdma:
        samples.add(_RDMA_READY, row.rdma["ready"], *who, row.rdma.get("reason", ""))
        for key, metric in _RDMA.items():
            if key in row.rdma:
                samples.add(metric, row.rdma[key], *who)
    _add_counts(samples, row.counted, shown, who)
    samples.add(_DISBELIEVED, stats.get("counted", {}).get("disbelieved", 0), *who)
    samples.add(_SILENT, row.silent_s, *who)
    samples.add(_CUT_OFF, row.streams_cut_off, *who)
    samples.add(_CORRUPTIONS, row.corruptions, *who)
    for process, count in row.restarts.items():
        samples.add(_RESTARTS, count, *who, process)
    for process, used in row.usage.items():
        samples.add(_CPU, used.cpu_s, *who, process)
        samples.add(_RESIDENT, used.resident, *who, process)
        samples.add(_PRIVATE, used.private, *who, process)
        if used.descriptors_max:
            samples.add(_DESCRIPTORS, used.descriptors, *who, process)
            samples.add(_DESCRIPTORS_MAX, used.descriptors_max, *who, process)


def _kept_by(found: Mapping[str, Mapping[str, int]], shown: Collection[str] | None) -> dict[tuple[str, str], int]:
    """Return kept bytes, or slots, by namespace and class, those of namespaces that are not in ``shown`` as of one.

    So are names that cannot be printed: escaped, two of them may look alike.
    """
    sums: dict[tuple[str, str], int] = {}
    for namespace, sizes in found.items():
        named = namespace.isprintable() and (shown is None or namespace in shown)
        name = namespace if named else OTHERS_NAMESPACE
        for kind, size in sizes.items():
            sums[name, kind] = sums.get((name, kind), 0) + size
    return sums


def _by_shown_name(totals: Totals, shown: Collection[str]) -> dict[str, list[int]]:
    """Return the counts of the namespaces in ``shown``, and those of all others as one.

    A tenant that knows another one's namespace can find out which of its keys are stored (SECURITY.md).
    """
    found: dict[str, list[int]] = {}
    for namespace, counts in totals.namespaces.items():
        name = namespace if namespace in shown else OTHERS_NAMESPACE
        found[name] = [one + other for one, other in zip(found.get(name, [0] * len(counts)), counts)]
    return found


def _add_counts(
    samples: Samples, counted: Mapping[str, Totals], shown: Collection[str] | None, who: tuple[str, int, int]
) -> None:
    """Add what clients or the worker's processes have counted, by path. ``shown``: namespaces to name; None: all."""
    for path, totals in counted.items():
        for namespace, counts in _by_shown_name(totals, totals.namespaces if shown is None else shown).items():
            found = counters_summary(counts)
            hits, misses = found["hits"], found["misses"]
            samples.add(_HITS, hits, *who, namespace, path)
            for reason in MISSES:
                samples.add(_MISSES, misses[reason], *who, namespace, path, reason)
            for op, count in (
                ("get", hits + sum(misses.values())), ("put", found["puts"]),
                ("exists", found["exists_found"] + found["exists_absent"]),
                ("delete", found["deletes"] + found["deletes_absent"]),
            ):  # fmt: skip
                samples.add(_OPERATIONS, count, *who, namespace, path, op)
            for op, size in (("get", found["bytes_read"]), ("put", found["bytes_put"])):
                samples.add(_OP_BYTES, size, *who, namespace, path, op)
            samples.add(_PUTS_FAILED, found["put_failures"], *who, namespace, path)
        for op, latencies in totals.latencies.items():
            samples.add_histogram(_SECONDS, latencies[0] / 1e9, latencies[1:], _BOUNDS, *who, path, op)
    shm = counted.get("shm")
    for word, metric in _READS.items():
        samples.add(metric, sum(counts[word] for counts in shm.namespaces.values()) if shm else 0, *who)
