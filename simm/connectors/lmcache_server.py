"""SiMM as an L2 adapter of ``lmcache server``, for ``--l2-adapter '{"type": "plugin", ...}'``.

``simm engine lmcache-server`` prints the flag. LMCache's two controllers submit tasks, which run in threads here, and
wait for one of three event descriptors. Objects are read straight into LMCache's L1 arena, which is registered once,
and put straight out of it.

Locks
-----
A lookup *pins* what it finds (``Client.pin``): the values stay as they were found, whatever is evicted, replaced or
deleted meanwhile, until LMCache has loaded and unlocked them. A lookup that finds many values holds them by one set of
pins, which is released with the last of its locks. Pins are bounded (docs/pins.md). Values beyond that are held by
their version alone, and a load of one that was evicted is a miss. A load reads from the oldest lock of a key, whose it
may not be, and keeps it until it has read.

Keys and values
---------------
A key is LMCache's own text: model, rank, object group, chunk hash and salt, in SiMM's namespace;
``simm.schemes.lmcache.object_keys`` makes it. With the parameters ``weight_version`` or ``salt``, a digest of both
precedes it. It names no data type and no shape. So the value does (``lmcache_values.py``), and a load into an object of
another layout is a miss.

Failures
--------
A task that fails has an empty result. None hangs longer than the client's deadline allows. When a task's result is
there, nothing uses its objects any more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from ..client import Client
from ..constants import VALUE_BYTES_MAX
from ..errors import UsageError
from ..host import fork
from ..host.buffers import Span
from ..host.threads import Pool
from ..schemes.encodings import short_key
from ..schemes.lmcache import object_keys
from ..schemes.scheme import Scheme
from ..wire.status import STATUS_NAMES, Status
from .complaints import Complaints
from .keyspace import connect, options_of, threads_of
from .lmcache_values import Arena, Slot, head_of, length_of, reachable, too_large
from .registration.callers import caller
from .registration.of_lmcache import all_server_schemes
from .registration.registrar import Registrar

__all__ = ["SimmL2Adapter"]

log = logging.getLogger("simm.connectors.lmcache")

_THREADS: Final = 4
_OPTIONS: Final = ("manager_address", "namespace", "deadline_ms", "threads", "weight_version", "salt")
#: Models whose keys are registered, each with its number of ranks.
_MODELS_MAX: Final = 64


class _Held:
    """What a lookup found: pinned, until nothing uses it any more. The adapter's lock guards ``users``."""

    def __init__(self, pins: Any) -> None:
        self.pins = pins
        #: Its locks, and the loads that read from it now.
        self.users = 0


class SimmL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]
    """Stores the objects of ``lmcache server`` in SiMM. Any thread may call it; no call but the constructor raises.

    Args:
        params: ``adapter_params`` of the flag: ``manager_address`` (``"host:port"``, several separated by commas;
            default SIMM_MANAGER), ``namespace`` (default SIMM_NAMESPACE), ``deadline_ms``, ``threads`` (how many tasks
            run at the same time), ``weight_version``, ``salt``.
        l1_memory_desc: where LMCache's arena is.
        client: for tests, and for programs that have one. Otherwise a client is made, and closed by :meth:`close`.

    Raises RuntimeError with a sentence for a wrong setting, or if the managers refuse this client.
    """

    def __init__(
        self, params: Mapping[str, Any] | None = None, l1_memory_desc: Any = None, *, client: Client | None = None
    ) -> None:
        super().__init__()
        wanted = dict(params or {})
        unknown = set(wanted) - set(_OPTIONS)
        if unknown:
            raise RuntimeError(f"SiMM: adapter_params are {', '.join(_OPTIONS)}; not {sorted(map(str, unknown))}")
        threads = threads_of(wanted.get("threads", _THREADS))
        self._head = head_of(wanted)
        self._owns = client is None
        self._client = client or connect(str(wanted.get("manager_address", "")), **options_of(wanted))
        self._complain = Complaints(log)
        self._registrar = Registrar(self._client, self._complain)
        #: What hashes prompts in this server.
        self._context = caller("lmcache.v1.multiprocess", "MPCacheServerContext")
        #: Object groups of each model and number of ranks that were stored.
        self._groups: dict[tuple[str, int], set[int]] = {}
        try:
            self._arena = Arena(self._client, _registered(l1_memory_desc))
        except Exception as exc:  # its objects still go, by copies
            log.info("LMCache's arena is not registered: %s", str(exc))
            self._arena = Arena(self._client, None)
        self._stored_notifier, self._found_notifier, self._loaded_notifier = (create_event_notifier() for _ in range(3))
        self._threads = Pool(threads, "simm-lmcache")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        #: For each locked key the lookups that hold it, and its number among the keys of each.
        self._locked: dict[str, deque[tuple[_Held, int]]] = {}
        self._closed = False
        fork.in_child(self._after_fork)
        log.info("SiMM's L2 adapter for LMCache: %r, keys behind %r", self._client, self._head)

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable when a store has ended."""
        return int(self._stored_notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when a lookup has ended."""
        return int(self._found_notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when a load has ended."""
        return int(self._loaded_notifier.fileno())

    def _after_fork(self) -> None:
        """Give up what only the parent has: the lock's holder, and its pins. Its tasks do not end here."""
        self._lock = threading.Lock()
        self._locked = {}

    # -- tasks ------------------------------------------------------------------------------------

    def _submit(self, what: str, results: dict[int, Any], notifier: Any, nothing: Any, call: Callable[[], Any]) -> int:
        """Run a call in a thread; note its result, or ``nothing`` where it raises, and signal. Return its number."""
        number = next(self._numbers)
        #: The result, until it is told.
        result = [nothing]

        def run() -> None:
            try:
                result[0] = call()
            except Exception as exc:
                self._complain(what, "%s failed, LMCache goes on without it: %s", what, str(exc), trace=True)
            end()

        def end(_job: Any = None) -> None:
            with self._lock:
                if result:
                    results[number] = result[0]
                    if not self._closed:
                        notifier.notify()
                    result.clear()

        job = self._threads.hand_over(run)
        if job is None:  # closed, or no thread can be started
            end()
        else:
            job.add_done_callback(end)  # it may end without the call: cancelled, or for want of memory
        return number

    # -- store --------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store the objects that are not stored; return the task."""
        return self._submit("store", self._stored, self._stored_notifier, L2StoreResult(False, 0),
                            lambda: self._store(keys, objects))  # fmt: skip

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        digests = self._digests(keys)
        self._tell(keys)
        there = self._client.exists_digests(digests) if digests else []
        missing = [at for at, known in enumerate(there) if not known]
        fits = [at for at in missing if not too_large(objects[at])]
        if len(fits) < len(missing):
            self._complain("large", "%d objects have, with their layouts, more than the %d bytes of a value: make "
                           "--chunk-size smaller", len(missing) - len(fits), VALUE_BYTES_MAX)  # fmt: skip
        sources = [self._arena.source(objects[at]) for at in fits]
        statuses = self._client.put_digests([digests[at] for at in fits], sources) if fits else []
        good = [at for at, status in zip(fits, statuses) if status == Status.OK]
        if len(good) < len(fits):
            first = next(status for status in statuses if status != Status.OK)
            self._complain("put", "%d objects were not stored: %s", len(fits) - len(good), STATUS_NAMES[first])
        sizes = [objects[at].get_size() for at in good]
        if good:
            self._notify_keys_stored([keys[at] for at in good], sizes)
        return L2StoreResult(len(good) == len(missing), sum(sizes))

    def _tell(self, keys: Iterable[Any]) -> None:
        """Register how the keys of these models are made, for routers."""
        with self._lock:
            for key in keys:
                of = key.model_name, key.kv_rank >> 24
                if of in self._groups or len(self._groups) < _MODELS_MAX:
                    self._groups.setdefault(of, set()).add(key.object_group_id)
            told = tuple((*of, max(groups) + 1) for of, groups in self._groups.items())
        self._registrar.tell(told, lambda: self._schemes(told))

    def _schemes(self, told: Iterable[tuple[str, int, int]]) -> list[Scheme]:
        context = self._context() if self._context is not None else None
        return all_server_schemes(context, told, head=self._head)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores that have ended since the last call."""
        with self._lock:
            done = dict(self._stored)
            self._stored.clear()
        return done

    # -- lookup and lock ------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begin to look for objects, and to pin those that are there; return the task."""
        return self._submit("lookup", self._found, self._found_notifier, Bitmap(len(keys)),
                            lambda: self._lookup(keys))  # fmt: skip

    def _lookup(self, keys: list[Any]) -> Any:
        bits = Bitmap(len(keys))
        names = self._names(keys)
        if not names:
            return bits
        held = _Held(self._client.pin(names))
        found = [at for at, length in enumerate(held.pins.lengths) if length is not None]
        locked: list[int] = []
        with self._lock:
            if not self._closed:
                locked = found
                for at in found:
                    held.users += 1
                    self._locked.setdefault(names[at], deque()).append((held, at))
        if not locked:
            self._release(held)
        for at in locked:
            bits.set(at)
        return bits

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a lookup's bitmap, once; None while it runs."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Give up one lock of each key. Keys that are not locked are left alone."""
        with self._lock:
            given_up = []
            for name in self._names(keys):
                holders = self._locked.get(name)
                if not holders:
                    continue
                given_up.append(holders.popleft()[0])
                if not holders:
                    del self._locked[name]
            free = _without_users(given_up)
        self._release_later(free)

    def _release_later(self, free: Iterable[_Held]) -> None:
        for held in free:
            job = self._threads.hand_over(self._release, held)
            if job is None:
                self._release(held)
            else:
                job.add_done_callback(functools.partial(self._release_lost, held))

    def _release_lost(self, held: _Held, job: Future[None]) -> None:
        """Release what a job was to release that has ended without its call."""
        if job.cancelled() or job.exception() is not None:
            self._release(held)

    def _release(self, held: _Held) -> None:
        with self._complain.ending("a lock"):
            held.pins.release()

    # -- load ---------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to read values into objects; return the task."""
        return self._submit("load", self._loaded, self._loaded_notifier, Bitmap(len(keys)),
                            lambda: self._load(keys, objects))  # fmt: skip

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        bits = Bitmap(len(keys))
        names = self._names(keys)
        slots: dict[int, Slot] = {}
        for at, each in enumerate(objects[: len(names)]):
            with contextlib.suppress(UsageError):  # more than a value: none is stored
                slots[at] = self._arena.slot(each)
        with self._lock:
            locks = [self._locked[name][0] if name in self._locked else None for name in names]
            # They may be another request's, and unlocked by it meanwhile: this load keeps them until it has read.
            used = {lock[0] for lock in locks if lock is not None}
            for held in used:
                held.users += 1
        try:
            good, foreign = self._read_all(locks, names, slots)
        finally:
            with self._lock:
                free = _without_users(used)
            self._release_later(free)
        for at in good:
            bits.set(at)
        if good:
            self._notify_keys_accessed([keys[at] for at in good])
        self._drop(foreign)
        return bits

    def _read_all(
        self, locks: Sequence[tuple[_Held, int] | None], names: Sequence[str], slots: Mapping[int, Slot]
    ) -> tuple[list[int], dict[str, int]]:
        """Read values; return the places of those that were read, and the lengths of those that have another layout."""
        foreign: dict[str, int] = {}
        groups: dict[_Held | None, list[int]] = {}
        for at in slots:
            lock = locks[at]
            groups.setdefault(lock[0] if lock is not None else None, []).append(at)
        good: list[int] = []
        for held, places in groups.items():
            for at, got in self._read(held, places, locks, names, slots):
                if slots[at].filled(got):
                    good.append(at)
                elif length_of(got):
                    foreign[names[at]] = length_of(got)
        return good, foreign

    def _read(
        self, held: _Held | None, places: list[int], locks: Sequence[tuple[_Held, int] | None], names: Sequence[str],
        slots: Mapping[int, Slot],
    ) -> list[tuple[int, Any]]:  # fmt: skip
        """Read values that one lookup holds, or that none does; return for each its place and what came of it."""
        if held is None:
            results = self._client.get_digests(list(map(self._client.digest, (names[at] for at in places))),
                                               [slots[at].sink for at in places])  # fmt: skip
            return list(zip(places, results))
        lengths = held.pins.lengths
        wants, fits, other = [], [], []
        for at in places:
            lock = locks[at]
            assert lock is not None
            length = lengths[lock[1]]
            if length == slots[at].sink.least:
                fits.append(at)
                wants.append((lock[1], slots[at].sink))
            else:
                other.append((at, length or 0))
        got = held.pins.read_wants(wants) if wants else []
        return [*zip(fits, (each or 0 for each in got)), *other]

    def query_load_result(self, task_id: int) -> Any:
        """Return a load's bitmap, once; None while it runs."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # -- the rest -----------------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Delete objects. Those that are locked can still be loaded."""
        try:
            names = self._names(keys)
            if not names:
                return
            with self._client.pin(names) as pins:
                lengths = list(pins.lengths)
            statuses = self._client.delete_digests(self._digests(keys))
            gone = [at for at, status in enumerate(statuses) if status == Status.OK and lengths[at]]
            if gone:
                self._notify_keys_deleted([keys[at] for at in gone], [lengths[at] or 0 for at in gone])
        except Exception as exc:
            self._complain("delete", "delete failed, LMCache goes on without it: %s", str(exc), trace=True)

    def report_status(self) -> dict[str, Any]:
        """Return whether a worker or a manager is reached, with the client's counters."""
        with self._lock:
            locked = sum(map(len, self._locked.values()))
        try:
            stats: dict[str, Any] = {"simm": self._client.stats(), "is_healthy": reachable(self._client)}
        except Exception as exc:
            stats = {"is_healthy": False, "reason": str(exc)}
        return {**stats, "type": "SimmL2Adapter", "locked": locked}

    def close(self) -> None:
        """End the tasks, give up all locks, close the connection. Twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = {each for holders in self._locked.values() for each, _ in holders}
            self._locked.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for each in held:
            self._release(each)
        with self._complain.ending("a registration"):
            self._arena.close()
        self._registrar.close()
        if self._owns:
            with self._complain.ending("a client"):
                self._client.close()
        for notifier in (self._stored_notifier, self._found_notifier, self._loaded_notifier):
            notifier.close()

    def _names(self, keys: Sequence[Any]) -> list[str]:
        return [
            short_key(self._head + name)
            for key in keys
            for name in object_keys([key.chunk_hash], key.model_name, kv_rank=key.kv_rank, group=key.object_group_id,
                                    cache_salt=key.cache_salt)
        ]  # fmt: skip

    def _digests(self, keys: Sequence[Any]) -> list[bytes]:
        return list(map(self._client.digest, self._names(keys)))

    def _drop(self, foreign: Mapping[str, int]) -> None:
        """Delete values of another layout, so that this server's can be stored."""
        if foreign:
            self._complain("layout", "%d objects have another layout than this server's under its keys: dropped. Give"
                           " servers with one model name and other layouts a namespace each", len(foreign))  # fmt: skip
            self._client.delete_sized(list(map(self._client.digest, foreign)), list(foreign.values()))


def _without_users(held: Iterable[_Held]) -> list[_Held]:
    """Take a user from each; return those that have none left. The caller has the adapter's lock."""
    free = []
    for each in held:
        each.users -= 1
        if not each.users:
            free.append(each)
    return free


def _registered(desc: Any) -> Span | None:
    """Return LMCache's arena, as far as it stays where it is."""
    if desc is None:
        return None
    size = desc.size if desc.stable_registration_size is None else desc.stable_registration_size
    try:
        return Span(int(desc.ptr), int(size))
    except UsageError as exc:
        log.info("LMCache's arena is not registered: %s", str(exc))
        return None
