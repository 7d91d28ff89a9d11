"""Elect one of several managers as the leader, and keep the cluster's state, both in etcd.

Two managers (or more) of one cluster get the same ``--coordinator``. One leads; the others stand by, and one of them
takes over when the leader is gone; docs/operations.md says how soon, and what it costs etcd. Under the prefix:

    PREFIX/leader       the leader (JSON), bound to its lease
    PREFIX/state        what :meth:`Coordinator.save` saved last: format, generation, length, checksum
    PREFIX/chunk/G/n    its bytes, JSON packed by zlib, in chunks of generation G

The term
--------
A manager leads if it has created PREFIX/leader, in a transaction that requires that the key does not exist. The
revision of that transaction is the *term*: no two leaderships share one, and later ones are larger. The key goes when
its lease ends or is revoked, so there is at most one leader. A thread renews the lease. The manager's loop asks for
``term`` before each act as the leader, and loads and saves. Without an answer of etcd a save blocks it for at most
``SAVE_S``.

What can go wrong, and what we chose
------------------------------------
* *The leader is stopped* (SIGSTOP, a swapping host, a suspended machine), another takes over, and the first wakes
  up and believes that it leads. It counts itself leader only until the time at which it *sent* its last successful
  keepalive, plus the lease's time, minus a margin of a tenth for clocks of different speed. etcd ends the lease
  later than that, as it counts from the keepalive's arrival. After this time ``term`` is 0, whichever threads have
  run. The clock is CLOCK_BOOTTIME, which cannot be set and goes on while a machine is suspended.
* *It is stopped between that check and its next act*, or a hypervisor stops the machine and its clocks with it. No
  check of a clock can exclude that. Then an old answer leaves late, as if the network had delayed it. Its map has
  an epoch below the new leader's, which continues from the reserved ones, and is ignored. Writes are excluded:
* *A deposed leader writes.* Each transaction of :meth:`Coordinator.save` requires that PREFIX/leader was created in its
  term. etcd decides that at the moment of the write, without a clock.
* *It leads again before its loop has noticed*: the thread has lost one term and won another. What the loop has is the
  state of the former term, and others may have stored since. So a manager saves only in the term in which it has loaded
  the state last.
* *Somebody deletes PREFIX/leader* (``etcdctl del``). The lease goes on, and another manager leads at once. So each
  renewal also looks whether the key is still that of its term. Until the next one, a third of the lease's time later,
  two serve: longer only if etcd answers keepalives and no reads, UNSEEN_TTLS leases at most. What the former one
  changes it cannot store, and so does not send. A server that follows it keeps its lease (``cluster/epochs.py``), so a
  new leader waits for a lease's time more before it confirms an advance.
* *etcd is slow.* A look that gets no answer is no reason to stop leading: the keepalive alone extends the lease, and
  each of the two has its own time.
* *An older state replaces a newer one* of the same leader: a request that was given up arrives after its repetition. So
  each save also requires that PREFIX/state is the one saved or loaded last. After a missing answer the next save first
  looks which one is there.
* *etcd is down.* The leader serves until its lease's time is over, then no manager leads until etcd is back:
  membership does not change and no new client gets a map, but the data path goes on.
* *etcd takes no writes* (its disk quota is used up). The leader goes on and reports it; a new one cannot be elected.
* *The state is larger than a request may be* (1.5 MiB; 1,500 workers are a twentieth of that, packed). Then it is
  stored in several transactions; the last brings PREFIX/state, which names the generation, and removes
  older chunks. A leader that dies in between leaves chunks that no state names; the next save removes them.
* *The state in etcd is damaged, or of a newer format.* CorruptionError: the manager ends and says what to do. It never
  starts a new cluster instead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..config.settings import Settings
from ..config.startup import read_secret
from ..errors import ConfigError, CorruptionError, SimmError
from ..net.loop import Loop
from .etcd import (
    REQUEST_BYTES_MAX,
    Etcd,
    EtcdError,
    KeyValue,
    TxnResult,
    created,
    delete,
    followed_tls,
    get,
    modified,
    put,
)
from .state_file import FILE_BYTES_MAX as STATE_BYTES_MAX
from .state_file import canonical

log = logging.getLogger("simm.control.election")

STATE_FORMAT: Final = 1
#: A manager says READY when it knows which one leads, and after this time in any case.
DECIDE_S: Final = 5.0
TTL_S: Final = 5.0
#: Part of the lease's time by which a leader stops early: two clocks may drift apart by that much.
MARGIN: Final = 0.1
#: Longest that a load or a save waits for etcd, seconds.
SAVE_S: Final = 2.0
#: Between two polls of a standby, seconds; shorter for leases below 5 s.
POLL_S: Final = 1.0
#: Between a failure and the next try, seconds.
RETRY_S: Final = 0.25
#: A leader that has not been able to read its key for so many leases' time leads no more.
UNSEEN_TTLS: Final = 1
#: zlib's level. 1,500 workers are 610 KB of JSON, 70 KB packed in 5 ms; level 6 would save a tenth of that.
PACK_LEVEL: Final = 3
CHUNK_BYTES: Final = 512 << 10
CHUNKS_PER_TXN: Final = 2
assert CHUNK_BYTES * CHUNKS_PER_TXN < REQUEST_BYTES_MAX * 3 // 4


class NotLeader(SimmError):
    """This manager does not lead, and only the leader may do this."""


def connect(settings: Settings) -> Coordinator:
    """Return the coordinator of the settings, not started. Raises ConfigError."""
    url = settings.coordinator
    assert url is not None
    if settings.coordinator_ttl_ms % 1000:
        raise ConfigError(
            f"coordinator_ttl_ms ({settings.coordinator_ttl_ms}, {settings.origin('coordinator_ttl_ms')}) must be "
            "whole seconds: etcd counts in them"
        )
    tls = None
    if url.tls:
        tls = followed_tls(settings.coordinator_ca, settings.coordinator_cert)
    elif settings.coordinator_ca is not None or settings.coordinator_cert is not None:
        raise ConfigError("--coordinator-ca and --coordinator-cert are for https: write --coordinator etcds://...")
    login = _read_login(settings.coordinator_login)
    return Coordinator(lambda: Etcd(url.endpoints, tls=tls, login=login, trusted=settings.server_uid), url.prefix,
                       ttl_s=settings.coordinator_ttl_ms // 1000)  # fmt: skip


def _read_login(path: Path | None) -> tuple[str, str] | None:
    if path is None:
        return None
    text = read_secret(path, str(path), "; name another with --coordinator-login").strip()
    user, colon, password = text.partition(":")
    if not user or not colon or "\n" in text:
        raise ConfigError(f"{path} must hold one line, USER:PASSWORD")
    return user, password


class Leader(NamedTuple):
    """Who leads, as PREFIX/leader says."""

    id: str
    #: Where it listens, and its http page ("" without): HOST:PORT.
    address: str
    http: str
    host: str
    pid: int
    #: Since when, seconds of the wall clock; for people.
    since: float


class _Held(NamedTuple):
    term: int
    lease: int
    #: By our clock.
    until: float


_NOT_HELD: Final = _Held(0, 0, 0.0)


def boot_time() -> float:
    """Seconds since the machine's start, those in which it was suspended included. Nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Coordinator:
    """One manager's part in it. It campaigns from :meth:`start` on, until :meth:`close`.

    Args:
        connect: makes an etcd client; called twice, as the thread has its own.
        prefix: of our keys, as ``/simm``.
        ttl_s: the lease's time, whole seconds. etcd may make it longer.

    ``term`` and ``leader`` are for any thread; load, save, resign and close for the manager's.
    """

    def __init__(
        self, connect: Callable[[], Etcd], prefix: str, *, ttl_s: float = TTL_S,
        clock: Callable[[], float] = boot_time,
    ) -> None:  # fmt: skip
        if ttl_s < 1 or ttl_s != int(ttl_s):
            raise ConfigError(f"the coordinator's lease has {ttl_s} s: give whole seconds, 1 or more")
        self.prefix = prefix
        self.id = secrets.token_hex(8)
        self.ttl_s = int(ttl_s)
        #: The state, for people.
        self.where = f"{prefix} in etcd"
        #: The value of PREFIX/leader while this manager leads.
        self.address = ""
        self.http = ""
        #: The leader, as far as is known; None without one, or if etcd does not answer.
        self.leader: Leader | None = None
        #: Why the last exchange with etcd failed; empty if it did not.
        self.trouble = ""
        self._key = f"{prefix}/leader".encode()
        self._state_key = f"{prefix}/state".encode()
        self._chunk_keys = f"{prefix}/chunk/".encode()
        self._etcd = connect()
        self._own_etcd = connect()
        self._clock = clock
        #: Replaced as a whole, so that every thread reads a consistent one.
        self._held = _NOT_HELD
        #: When PREFIX/leader was last seen to be this term's.
        self._seen_at = 0.0
        self._lock = threading.Lock()
        #: No campaign before this time.
        self._not_before = 0.0
        #: Revision of PREFIX/state as saved or loaded last; -1: unknown.
        self._saved = -1
        #: The term in which the state was loaded last; -1: in none. Only there may it be replaced.
        self._loaded = -1
        self._saves = 0
        self._wake = threading.Event()
        self._closing = False
        self._notice = -1
        self._thread = threading.Thread(target=self._run, name="simm-coordinator", daemon=True)

    def __repr__(self) -> str:
        return f"<Coordinator {self.prefix} {'leads' if self.term else 'stands by'}>"

    # -- leadership ------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The term in which this manager leads now, or 0. Ask before each act as the leader. O(1), without a lock."""
        held = self._held
        return held.term if held.term and self._clock() < held.until else 0

    @property
    def lead_left_s(self) -> float:
        """For how many more seconds this manager leads without another keepalive."""
        held = self._held
        return max(0.0, held.until - self._clock()) if held.term else 0.0

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``term`` may have changed. Call it after :meth:`start`.

        It does not report that the lease's time is over: only ``term`` does.
        """
        return self._notice

    def clear_notice(self) -> None:
        """Make the descriptor unreadable until the next change."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._notice)

    def start(self, address: str, http: str = "") -> None:
        """Campaign from now on. ``address`` and ``http`` are published for the other managers."""
        self.address = address
        self.http = http
        self._notice = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def resign(self, pause_s: float) -> None:
        """Stop leading, and campaign again after ``pause_s`` seconds, so that others go first."""
        self._not_before = self._clock() + pause_s
        self._drop("resigned", chosen=True)
        self._wake.set()

    def close(self) -> None:
        """Stop, and revoke the lease so that a standby need not wait for its end. Twice is harmless."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(2 * SAVE_S)
        self._drop("stopped", chosen=True)
        if self._notice >= 0 and not self._thread.is_alive():
            os.close(self._notice)
            self._notice = -1

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._closing:
                return
            try:
                pause = self._step()
                if self.trouble:
                    log.info("etcd answers again")
                    self.trouble = ""
            except EtcdError as exc:
                if not self.trouble:
                    log.warning("%s; trying again", exc)
                self.trouble = str(exc)
                if not self._held.term:
                    self.leader = None
                pause = RETRY_S
            except Exception:
                log.exception("looking for who leads failed")
                pause = POLL_S
            # Several managers must not ask at the same time.
            self._wake.wait(pause * random.uniform(0.8, 1.0))

    def _step(self) -> float:
        """Make one exchange with etcd; return the seconds until the next. Raises EtcdError."""
        return self._renew() if self._held.term else self._seek()

    def _renew(self) -> float:
        """Renew the lease; return the seconds until the next time."""
        held = self._held
        left = held.until - self._clock()
        if left <= 0:
            self._drop("no keepalive in time")
            return 0.0
        sent = self._clock()
        ttl_s = self._own_etcd.keepalive(held.lease, min(left, self.ttl_s / 3))
        if not ttl_s:
            self._drop("the lease has ended")
            return 0.0
        if not self._hold(held, self._until(sent, ttl_s)):
            self._drop("the keepalive's answer came too late")
            return 0.0
        if why := self._no_more(held):
            self._drop(why)
            return 0.0
        return max(0.0, sent + self.ttl_s / 3 - self._clock())

    def _no_more(self, held: _Held) -> str:
        """Return why this term is over although its lease is not; empty if it is not, as far as etcd answers."""
        try:
            found = self._own_etcd.get(self._key, self.ttl_s / 2)
        except EtcdError:
            if self._clock() - self._seen_at > UNSEEN_TTLS * self.ttl_s:
                return "nobody can tell whether the leader's key is still its own"
            raise
        self._seen_at = self._clock()
        owned = found is not None and found.create_revision == held.term
        return "" if owned else "somebody has deleted the leader's key"

    def _until(self, sent: float, ttl_s: float) -> float:
        """Return the time until which a lease holds that was asked for at ``sent``."""
        return sent + ttl_s * (1 - MARGIN)

    def _hold(self, before: _Held, until: float) -> bool:
        """Extend the leadership, if it has neither ended nor been dropped meanwhile.

        Once somebody has seen ``term`` 0 it stays so: the clock goes on, and this refuses.
        """
        with self._lock:
            if self._held is not before or self._clock() >= before.until:
                return False
            self._held = before._replace(until=until)
            return True

    def _seek(self) -> float:
        """Find the leader; without one, try to lead. Return the seconds until the next time."""
        poll_s = min(POLL_S, self.ttl_s / 5)
        deadline_s = max(1.0, self.ttl_s / 3)
        found = self._own_etcd.get(self._key, deadline_s)
        if found is not None:
            self.leader = _leader(found)
            if self.leader is not None and self.leader.id == self.id:
                # This manager's own key, of a campaign without an answer, or of a term that it could not revoke.
                self._own_etcd.revoke(found.lease, deadline_s)
                return 0.0
            return poll_s
        self.leader = None
        wait = self._not_before - self._clock()
        if wait > 0:
            return min(wait, poll_s)
        return self._campaign(deadline_s, poll_s)

    def _campaign(self, deadline_s: float, poll_s: float) -> float:
        sent = self._clock()
        lease, ttl_s = self._own_etcd.grant(self.ttl_s, deadline_s)
        me = Leader(self.id, self.address, self.http, socket.gethostname(), os.getpid(), round(time.time(), 3))
        try:
            value = json.dumps(me._asdict()).encode()
            done = self._own_etcd.txn(
                [created(self._key, 0)], [put(self._key, value, lease)], [get(self._key)], deadline_s
            )
        except EtcdError:
            self._revoke(lease)
            raise
        held, self._seen_at = _Held(done.revision, lease, self._until(sent, ttl_s)), self._clock()
        if not done.succeeded or self._closing or self._clock() >= held.until:
            self._revoke(lease)
            return poll_s
        with self._lock:
            self._held = held
            self.leader = me
        log.info("leading, term %d", held.term)
        self._notify()
        return self.ttl_s / 3

    def _drop(self, why: str, *, chosen: bool = False) -> None:
        """Stop leading, from any thread, and revoke the lease if etcd answers."""
        with self._lock:
            held, self._held = self._held, _NOT_HELD
            if not held.term:
                return
            self.leader = None
        log.log(logging.INFO if chosen else logging.WARNING, "leading no more, term %d: %s", held.term, why)
        self._notify()
        self._wake.set()  # to find the leader
        self._revoke(held.lease)

    def _revoke(self, lease: int) -> None:
        etcd = self._own_etcd if threading.current_thread() is self._thread else self._etcd
        try:
            etcd.revoke(lease, 1.0)
        except EtcdError as exc:
            log.info("the lease could not be given back and will end by itself: %s", exc)

    def _notify(self) -> None:
        if self._notice >= 0:
            with contextlib.suppress(BlockingIOError):  # readable already
                os.eventfd_write(self._notice, 1)

    # -- state -----------------------------------------------------------------------------------

    def load(self) -> Any:
        """Return the state last saved by any leader, or None before the first. In this term it may be replaced then.

        Raises NotLeader, OSError when etcd does not answer, CorruptionError with the remedy.
        """
        term = self._my_term()
        self._loaded = -1
        try:
            while True:
                try:
                    state = self._load(term)
                    self._loaded = term
                    return state
                except CorruptionError:
                    # It may have been replaced meanwhile, by a new leader or by a late save of this one.
                    self._my_term(term)
                    head = self._etcd.get(self._state_key, SAVE_S)
                    if (head.mod_revision if head is not None else 0) == self._saved:
                        raise
        except EtcdError as exc:
            self._saved = -1
            raise OSError(errno.EIO, str(exc)) from exc

    def _load(self, term: int) -> Any:
        until = self._clock() + SAVE_S
        head = self._etcd.get(self._state_key, SAVE_S)
        self._saved = head.mod_revision if head is not None else 0
        state = None
        if head is not None:
            count, about = _read_head(head, self._way_out())
            packed = bytearray()
            for number in range(count):
                chunk = self._etcd.get(self._chunk_key(about["generation"], number), max(0.0, until - self._clock()))
                if chunk is None:
                    raise CorruptionError(
                        f"{self.where}: chunk {number} of {count} of the state is missing: {self._way_out()}"
                    )
                packed += chunk.value
            state = _unpack(bytes(packed), about, self.where, self._way_out())
        # This is the newest state only if no other manager has led meanwhile.
        self._my_term(term)
        return state

    def save(self, state: Any) -> None:
        """Replace the state, durably. Raises NotLeader, and OSError if it may not have been done.

        NotLeader also for a manager that leads again, but has not loaded what others stored in between.
        """
        term = self._my_term(self._loaded)
        body = canonical(state)
        packed = zlib.compress(body, PACK_LEVEL)
        chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
        until = self._clock() + min(SAVE_S, self.lead_left_s)
        for _ in range(2):
            self._saves += 1
            generation = f"{term:016x}-{self._saves:08x}"
            head = {
                "kind": "simm manager state", "format": STATE_FORMAT, "generation": generation, "chunks": len(chunks),
                "bytes": len(body), "crc32": zlib.crc32(body),
            }  # fmt: skip
            if self._save_once(term, json.dumps(head).encode(), generation, chunks, until):
                return
        raise OSError(errno.EIO, f"{self.where}: somebody else writes the state in our term")

    def _save_once(self, term: int, head: bytes, generation: str, chunks: list[bytes], until: float) -> bool:
        """Return True if it was stored; False if an earlier save without an answer was carried out after all."""
        try:
            if self._saved < 0:
                found = self._etcd.get(self._state_key, max(0.0, until - self._clock()))
                self._saved = found.mod_revision if found is not None else 0
            puts = [put(self._chunk_key(generation, number), chunk) for number, chunk in enumerate(chunks)]
            for at in range(0, len(puts), CHUNKS_PER_TXN):
                group = puts[at : at + CHUNKS_PER_TXN]
                if at + CHUNKS_PER_TXN >= len(puts):
                    old = delete(self._chunk_keys, self._chunk_key(generation, 0))
                    group += [old, put(self._state_key, head)]
                done = self._write(term, group, until)
                if not done.succeeded:
                    self._refused(term, done)
                    return False
        except EtcdError as exc:
            self._saved = -1
            raise OSError(errno.EIO, str(exc)) from exc
        self._saved = done.revision
        return True

    def _write(self, term: int, operations: list[dict[str, Any]], until: float) -> TxnResult:
        """Run a transaction on condition that this term leads and the state is still the known one."""
        conditions = [created(self._key, term), modified(self._state_key, self._saved)]
        look = [get(self._key), get(self._state_key)]
        return self._etcd.txn(conditions, operations, look, max(0.0, until - self._clock()))

    def _refused(self, term: int, done: TxnResult) -> None:
        """Find out why a write was refused. Raises NotLeader if this term does not lead."""
        leader, state = done.found
        if leader is None or leader.create_revision != term:
            self._drop("the leader's key belongs to another term")
            raise NotLeader(f"{self.where}: the term {term} is over")
        self._saved = state.mod_revision if state is not None else 0

    def _my_term(self, same: int = 0) -> int:
        term = self.term
        if not term:
            raise NotLeader(f"{self.where}: we do not lead")
        if term != (same or term):
            raise NotLeader(f"{self.where}: term {term} is another one than that of our state")
        return term

    def _chunk_key(self, generation: str, number: int) -> bytes:
        return self._chunk_keys + f"{generation}/{number:04d}".encode()

    def _way_out(self) -> str:
        return (
            f"run the SiMM that wrote it, or, to begin anew, delete it (etcdctl del {self.prefix}/state; the "
            "cluster then refills from its servers)"
        )


def _leader(found: KeyValue) -> Leader | None:
    """Parse PREFIX/leader; None if it is malformed, or has what pages and answers to peers cannot show."""
    try:
        fields = json.loads(found.value)
        leader = Leader(**fields)
    except (ValueError, RecursionError, TypeError):
        return None
    return leader if all(isinstance(text, str) and text.isprintable() for text in leader[:4]) else None


def _read_head(head: KeyValue, way_out: str) -> tuple[int, dict[str, Any]]:
    """Return (number of chunks, the whole head). Raises CorruptionError."""
    where = head.key.decode("utf-8", "replace")
    try:
        about = json.loads(head.value)
    except (ValueError, RecursionError) as exc:
        raise CorruptionError(f"{where} in etcd is damaged ({exc}): {way_out}") from None
    if not isinstance(about, dict) or about.get("kind") != "simm manager state":
        raise CorruptionError(f"{where} in etcd is no SiMM manager's state: is this the right --coordinator? {way_out}")
    if about.get("format") != STATE_FORMAT:
        raise CorruptionError(
            f"{where} in etcd has format {about.get('format')!r}, this build reads {STATE_FORMAT}: {way_out}"
        )
    count, generation = about.get("chunks"), about.get("generation")
    if not isinstance(count, int) or not isinstance(generation, str) or not 0 < count <= STATE_BYTES_MAX // CHUNK_BYTES:
        raise CorruptionError(f"{where} in etcd is damaged: {way_out}")
    return count, about


def _unpack(packed: bytes, about: dict[str, Any], where: str, way_out: str) -> Any:
    """Return the state of a head and its chunks. Raises CorruptionError. Never allocates more than a state."""
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(packed, STATE_BYTES_MAX)
        whole = unpacker.eof and not unpacker.unconsumed_tail and not unpacker.unused_data
        if not whole or len(body) != about.get("bytes") or zlib.crc32(body) != about.get("crc32"):
            raise CorruptionError(f"the state in {where} is damaged (checksum): {way_out}")
        return json.loads(body)
    except (zlib.error, ValueError, RecursionError) as exc:
        raise CorruptionError(f"the state in {where} is damaged ({exc}): {way_out}") from None


def campaign(
    loop: Loop, coordinator: Coordinator, address: str, page: str, poll: Callable[[], None], leading: Callable[[], bool]
) -> None:
    """Campaign, and serve until a leader is known, for DECIDE_S at most. ``poll``: draws the consequences of news."""

    def on_notice(_mask: int) -> None:
        coordinator.clear_notice()
        poll()

    coordinator.start(address, page)
    loop.watch(coordinator, on_notice)
    until = loop.clock() + DECIDE_S
    while loop.running and not leading() and coordinator.leader is None and not coordinator.trouble:
        if loop.clock() > until:
            break
        loop.run_once(0.05)
