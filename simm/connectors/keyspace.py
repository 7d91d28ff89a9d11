"""Keys that keep different models apart, and a flush that takes one put.

An engine's page keys are hashes of tokens. They name neither the model nor how its pages are laid out. So each key
here begins with the *identity* of what it holds: a digest of everything that must be equal for two pages to be
interchangeable. It also has the *generation* of its scope, which a flush replaces.

Generations
-----------
The generation of a scope is a number that is stored under a key of that scope. It is read before each operation (5 us
on the same host, one round trip otherwise) and is part of all other keys. A flush stores a larger one; what was stored
before is then found under no key, and is evicted in time. What holds:

* A keyspace that was told to flush never again reads what was stored before, whether or not its put succeeds: it knows
  its own generation, and only ever moves to a larger one.
* Other keyspaces of the scope follow with their first operation after the flush. While the generation's server cannot
  be reached, they keep the one they know. A new keyspace that knows none misses until it can be read.
* A generation that was evicted, or lost with its server, is stored again by any keyspace that knows it. If none does,
  a new one begins. It is the time in nanoseconds, so nothing was ever stored under it. Where several keyspaces begin
  one at the same moment they take the one that is stored first: others may have stored under it already.
* A number that is too late for a time counts as none, as there could be no flush after it.
* A generation is read at its owner, also by a client with near copies.

What can go wrong
-----------------
The store has no operation that replaces a value only if it is still the one that was read. So the generation before a
flush may be stored again after it, by a keyspace that has found none a moment ago, after an eviction.

* A keyspace that knows a generation and finds none looks a second time, not before ``_PAUSE_S`` after the first of its
  threads has found none. Then it stores its own only where there is still none, and looks again for a larger one.
* A flush reads the generation back, all of its copies, and tries again while it finds an older one. It reports success
  only if all that it has read are its own, or larger ones, and no copy could not be read.
* A flush does not report success either while another thread of its keyspace still stores an older generation.
* :meth:`Keyspace.flush_until_seen` looks again in a thread, and stores the generation where it finds an older one. An
  engine that is idle after a reset, and so does nothing that would store it, reaches the others in this way. An older
  one that another engine has stored after the flush has looked is replaced so, too. The thread ends when two looks, a
  pause apart, have found no older one. Pauses differ at random by a quarter either way, as one outage begins the
  threads of many engines.
* With two copies a server that is away while the generation is replaced may keep the one before. A flush does not
  report success then, see :meth:`~simm.sdk.ops.replicas.Replicas.replace`.
* An old one that is stored after the flush has looked is replaced by the next operation of any keyspace that knows the
  larger one, or by the thread's next look. That is ``_AGAIN_S`` later or so after a flush, and up to 1.25 times
  ``_AGAIN_MAX_S`` after an outage. Until then a keyspace that does not know it may go on with the old one.

A flush forgets; it tells nobody of other weights. A keyspace whose engine goes on with the old weights stores under the
new generation, and all read it. Where engines of one scope get new weights one after the other, it takes a version in
the scope or in the keys.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..client import Client, NoValue, sink_of, source_of
from ..errors import SimmError, UsageError
from ..host import fork
from ..host.buffers import Span
from ..host.threads import Wake, ended_within, lives
from ..schemes.encodings import short_key
from ..schemes.registry import GENERATION, generation_key
from ..sdk.batch import UNLOADABLE
from ..wire.status import Status
from .described import Hidden, described

log = logging.getLogger("simm.connectors")

#: Attempts to store a generation while others do.
_ATTEMPTS: Final = 3

#: Between the first look that finds no generation and the second one, seconds. Another keyspace may be about to store
#: one, which takes some round trips. It is once for each generation that is lost.
_PAUSE_S: Final = 0.002

#: A generation is about the time of its flush. No keyspace stores one that is later than now by so many nanoseconds.
_AHEAD_NS: Final = 1 << 62

#: Why a flush has returned False, and what follows, for the log.
NOT_FLUSHED: Final = (
    "a server of SiMM could not be reached, or another engine, or another thread of this one, has stored the generation"
    " before at the same moment. It is stored again until they follow, as long as this engine runs; the log says when"
    " they do"
)

#: Between looks at a flush of which others may know nothing yet, seconds: the first one, and the longest one.
_AGAIN_S: Final = 1.0
_AGAIN_MAX_S: Final = 30.0
#: For parts of pauses that differ from one engine to the other. It has no state: an engine seeds ``random``, and what
#: it draws must not change; and processes that are forked from one have the same state.
_DICE: Final = random.SystemRandom()

#: Most threads of an adapter that makes its own.
_THREADS_MAX: Final = 64

#: Characters of a setting in a warning.
_SHOWN: Final = 200


def identity(facts: Mapping[str, Any]) -> str:
    """Return a digest, 24 characters, of facts that must all be equal for values to be interchangeable. O(facts).

    Never raises because of a value. Warns once of each fact that is code, or has some, as parts of it count by their
    names; and once of each that cannot be told: it is another one at each call, so nothing is shared.
    """
    texts = {}
    for name, value in facts.items():
        texts[name], code, unknown = described(value)
        if unknown:
            _warn_of_unknown(name, unknown)
        elif code:
            _warn_of_code(name, repr(value) if isinstance(value, Hidden) else texts[name][:_SHOWN])
    return hashlib.blake2b(json.dumps(texts, sort_keys=True).encode(), digest_size=12).hexdigest()


@functools.cache
def _warn_of_code(name: str, text: str) -> None:
    log.warning(
        "the engine's setting %s is code, or has some (%s). Functions in it count with their bytecode, defaults and "
        "closures, and objects with what they hold. What the functions call or read of their modules, and the classes "
        "of objects, count by their names: engines with other versions of those need a weight_version or a salt each, "
        "else they read each other's values", name, text,
    )  # fmt: skip


@functools.cache
def _warn_of_unknown(name: str, why: str) -> None:
    log.warning(
        "the engine's setting %s cannot be told from others (%s): what is stored with it is shared with no other "
        "engine, and not found after a restart", name, why,
    )  # fmt: skip


class Keyspace:
    """The keys of one scope in one client's namespace. Any thread may call it.

    Args:
        client: whose namespace it is. Its owner closes it.
        scope: what a flush covers, as text that goes at the head of its keys: ``"sglang/<identity>"``.
    """

    def __init__(self, client: Client, scope: str) -> None:
        self._client = client
        self.scope = scope
        self._name = generation_key(scope)
        self._lock = threading.Lock()
        #: The largest generation that this keyspace has seen; 0 for none.
        self._known = 0
        #: When a look has found none, monotonic seconds; None if none has since one was there.
        self._lost_at: float | None = None
        #: Generations that are being stored, by thread: an older one may arrive after a larger one.
        self._storing: dict[int, int] = {}
        #: Looks again at a flush that others may not see; None where there is none.
        self._thread: threading.Thread | None = None
        #: A flush of whose failure the log has told, and which others do not follow yet.
        self._owed = False
        self._closed = False
        #: Set when it is closed, and by a flush while there is a thread.
        self._wake = Wake()
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Take a new lock: another thread, which the child does not have, may hold this one. Only the parent stores."""
        self._lock = threading.Lock()
        self._storing = {}
        self._thread = None

    def __repr__(self) -> str:
        return f"<Keyspace {self.scope} generation={self._known}>"

    @property
    def _key(self) -> bytes:
        """The digest of what holds the generation. It changes with the epoch of the client's namespace."""
        return self._client.digest(self._name)

    def generation(self) -> str | None:
        """Return the generation's text, for keys. None if it is not known: there is nothing to read, nor to put.

        None, too, if its server was waited for: the caller's call has had its deadline then, and is a miss. That server
        counts as down from now on, so the next call goes on with the generation known last. Raises UsageError if the
        client is closed.
        """
        until = time.monotonic() + self._client.deadline_s / 2
        attempts = _ATTEMPTS
        again = False
        first = 0
        while attempts:
            got, stored = self._read()
            with self._lock:
                known = self._known = max(self._known, stored)
                if got == NoValue.UNAVAILABLE and (not known or time.monotonic() > until):
                    return None
                if stored == known != 0 or got == NoValue.UNAVAILABLE:
                    if stored:
                        self._lost_at = None
                    return f"{known:016x}"
                absent = got == NoValue.MISS
                now = time.monotonic()
                if not absent:
                    self._lost_at = None
                elif self._lost_at is None:
                    self._lost_at = now
                pause_s = 0.0 if self._lost_at is None else self._lost_at + _PAUSE_S - now
                look = absent and known != 0 and not again
                if not known:  # it is not noted: another keyspace may store one before
                    known = first = first or time.time_ns()
            if look:
                again = True
                if pause_s > 0.0:  # also if another thread has found it lost
                    time.sleep(pause_s)
                continue
            # And look again: another one may have stored a larger generation meanwhile.
            attempts -= 1
            if self._store(known, absent=absent):
                with self._lock:  # if there is none at the next look, it was lost anew
                    again, self._lost_at = False, None
            elif time.monotonic() > until:
                return None
        with self._lock:
            known = self._known = max(self._known, known)
        return f"{known:016x}"

    def flush(self) -> bool:
        """Begin a new generation: what was stored before is a miss from now on.

        Return whether other keyspaces see it too: it, or a larger one, was read back, from all copies if there are two.
        This one keeps to it in any case, also if the client raises, and stores it later. Three round trips, one more
        with two copies, and more while others store an older one.
        """
        stored = 0
        try:
            _, stored = self._read()
        finally:
            with self._lock:
                new = self._known = max(self._known + 1, stored + 1, time.time_ns())
        until = time.monotonic() + self._client.deadline_s / 2
        for _ in range(_ATTEMPTS):
            if not self._store(new):
                return False
            if self._oldest() >= new:
                with self._lock:
                    # A copy, as others end without the lock.
                    older = any(each < new for each in tuple(self._storing.values()))
                if not older:
                    return True
            if time.monotonic() > until:
                break
        return False

    def flush_until_seen(self) -> bool:
        """Do :meth:`flush`, and look again in a thread until others see it, or until :meth:`close`.

        Return as :meth:`flush` does, and raise what it raises. The thread looks after about ``_AGAIN_S`` seconds, then
        after twice as long each time, ``_AGAIN_MAX_S`` at the most. It ends after two looks in a row with nothing to
        store. It also looks where the flush has succeeded, as another engine may undo it later: by a put of its own
        that has begun before, and takes its time. It makes no further generation, so what is stored after this flush
        stays.
        """
        try:
            seen = self.flush()
        except Exception:
            self._go_on(seen=False)  # this keyspace keeps to the new generation all the same
            raise
        self._go_on(seen=seen)
        return seen

    def close(self) -> None:
        """End the thread of :meth:`flush_until_seen`: waits for two deadlines of the client at most. Never raises."""
        self._closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            ended_within(thread, 2 * self._client.deadline_s)

    def _go_on(self, *, seen: bool) -> None:
        """Have a thread look at the generation from now on, the one that does so already if there is one."""
        try:
            with self._lock:
                self._owed |= not seen
                if not self._closed and (self._thread is None or not lives(self._thread)):
                    # It is noted before it is started: it may run after an interrupt, and ends under the lock.
                    self._thread = threading.Thread(target=self._until_seen, name="simm-flush", daemon=True)
                    try:
                        self._thread.start()
                    except Exception:
                        self._thread = None
                        raise
                else:
                    self._wake.set()  # its pause may be a long one by now
        except Exception as exc:
            if not seen:
                log.warning("nobody stores the flush of %s until this engine uses SiMM again: %s", self.scope, str(exc))

    def _until_seen(self) -> None:
        pause_s, seen = _AGAIN_S, 0
        me = threading.current_thread()
        while True:
            if self._wake.wait(_about(pause_s)):
                pause_s = _AGAIN_S
                if not self._closed:  # a further flush; a second one ends this pause, so that there is a look at last
                    self._wake.wait(_about(pause_s))
            if self._closed or self._thread is not me:  # another one looks if the start of this one was interrupted
                return
            pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            before, seen, ended, there = seen, 0, False, False
            try:
                seen, there = self._spread()
            except UsageError:  # the client is closed
                ended = True
            except Exception as exc:  # the log has the reason of the flush that failed
                log.debug("the flush of %s is not stored yet: %s", self.scope, str(exc))
            with self._lock:
                # Else there was a further flush meanwhile, or others have stored another one since.
                done = self._thread is me and (ended or (there and seen == before == self._known))
                if done:
                    self._thread = None
                    told, self._owed = self._owed, False
            if done:
                if told and not ended:
                    log.warning("all engines follow the flush of %s now", self.scope)
                return

    def _spread(self) -> tuple[int, bool]:
        """Store the generation known where one may read an older one.

        Return it if nobody can any more, else 0; and whether nobody could before.
        """
        _, stored = self._read()
        there = True
        while True:
            with self._lock:
                known = self._known = max(self._known, stored)
            if self._oldest() >= known:
                return known, there
            there = False
            done = self._store(known) and self._oldest() >= known
            with self._lock:
                newer = self._known > known
            if not newer:  # else a flush has succeeded meanwhile, perhaps, and this has undone it
                return known if done else 0, False

    def _read(self) -> tuple[int, int]:
        """Return what a get of the generation returns, and the generation that is stored, 0 for none."""
        buffer = bytearray(GENERATION.size)
        got = self._client.get_digest_at_owner(self._key, sink_of(buffer))
        return got, _generation_in(buffer) if got == GENERATION.size else 0

    def _oldest(self) -> int:
        """Return the oldest generation that anybody reads, 0 for none and where a copy cannot be read."""
        replicas = self._client._replicas
        if replicas is None:
            return self._read()[1]
        copies = replicas.read_copies(self._key, GENERATION.size)
        found = [_generation_in(room) if got == GENERATION.size else 0 for got, room in copies if got != NoValue.MISS]
        return min(found, default=0)

    def _store(self, generation: int, *, absent: bool = False) -> bool:
        """Store a generation, or the one that is known by now, in place of what is there, or only where there is none.

        Return whether one is stored.
        """
        caller = threading.get_ident()
        try:
            with self._lock:  # a flush that has begun is seen here, or sees this
                self._storing[caller] = generation = max(generation, self._known)
            return self._put(generation, absent=absent)
        finally:  # an entry that an interrupt leaves keeps flushes of other threads from success
            self._storing.pop(caller, None)

    def _put(self, generation: int, *, absent: bool) -> bool:
        source = source_of(GENERATION.pack(generation))
        if absent:
            if self._client._options.checksum:  # whose put does not look
                got, _ = self._read()
                if got != NoValue.MISS:
                    return got != NoValue.UNAVAILABLE
            return self._client.put_digests([self._key], [source], True) == [Status.OK]
        return replace(self._client, [self._key], [source], refuse=False) == [Status.OK]

    def names(self, generation: str, keys: Sequence[str]) -> list[str]:
        """Return keys of a generation as the client takes them. O(bytes)."""
        head = f"{self.scope}/{generation}/"
        return [short_key(head + key) for key in keys]

    def digests(self, generation: str, keys: Sequence[str]) -> list[bytes]:
        """Return the digests of :meth:`names`. O(bytes)."""
        return list(map(self._client.digest, self.names(generation, keys)))


def _generation_in(value: bytearray) -> int:
    """Return the generation that a value is, 0 for none: any process may have put what is there."""
    number: int = GENERATION.unpack(value)[0]
    return number if number < time.time_ns() + _AHEAD_NS else 0


def _about(seconds: float) -> float:
    """Return a pause of this length, a quarter shorter or longer at random."""
    return seconds * _DICE.uniform(0.75, 1.25)


def replace(
    client: Client, digests: Sequence[bytes], sources: Sequence[memoryview | Span], *, refuse: bool = True
) -> list[int]:
    """Store values in place of those that are there, whatever the client's settings say; return a Status for each.

    UNAVAILABLE for a value of two copies of which an old one may be left. ``refuse``: see ``Replicas.replace``.
    """
    if client._replicas is not None:
        return client._replicas.replace(digests, sources, refuse=refuse)
    if client._options.replicas == 1:
        return client.put_digests(digests, sources, False)
    # A fake's store, which has one copy of each, and keeps what is stored.
    gone = client.delete_digests(digests)
    todo = [at for at, status in enumerate(gone) if status in (Status.OK, Status.NOT_FOUND)]
    statuses: list[int] = [Status.UNAVAILABLE] * len(gone)
    if todo:
        stored = client.put_digests([digests[at] for at in todo], [sources[at] for at in todo], False)
        for at, status in zip(todo, stored):
            statuses[at] = status
    return statuses


def connect(manager: str = "", **options: Any) -> Client:
    """Return a client for an engine, which may be up before its cache: it misses until a manager answers.

    ``manager`` empty: that of the environment. Raises RuntimeError with a sentence for a wrong setting, if the managers
    refuse this client for good, or if the process has no descriptor left.
    """
    try:
        client = Client(manager or None, lazy=True, **options)
        try:
            client.begin()
        except BaseException:
            client.close()
            raise
    except (SimmError, *UNLOADABLE) as exc:
        raise RuntimeError(f"SiMM: {exc}") from exc
    return client


def threads_of(wanted: Any) -> int:
    """Return how many calls run at the same time, as an engine's configuration has it. Raises RuntimeError."""
    if type(wanted) is not int or not 1 <= wanted <= _THREADS_MAX:
        raise RuntimeError(f"SiMM: threads is a number from 1 to {_THREADS_MAX}, not {wanted!r:.{_SHOWN}}")
    return wanted


def options_of(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return ``namespace`` and ``deadline_ms`` as a client takes them. Raises RuntimeError with a sentence."""
    options: dict[str, Any] = {}
    if wanted.get("namespace") not in (None, ""):
        options["namespace"] = str(wanted["namespace"])
    if wanted.get("deadline_ms") not in (None, ""):
        try:
            options["deadline_s"] = float(wanted["deadline_ms"]) / 1000
        except (TypeError, ValueError):
            raise RuntimeError(f"SiMM: deadline_ms is a number, not {wanted['deadline_ms']!r}") from None
    return options
