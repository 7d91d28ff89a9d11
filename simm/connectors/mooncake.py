"""Mooncake's Python API for its store, served by SiMM, for programs that import ``mooncake.store``.

    python -m simm.connectors.mooncake -- python -m sglang.launch_server ... --hicache-storage-backend mooncake

runs a command whose processes find SiMM under that name, says so on stderr, and changes nothing else on the machine.
No program gets it otherwise. The calls are those that SGLang's mooncake backend, vLLM's connectors, LMCache and FlexKV
make; their arguments, results and codes are those of Mooncake 0.3.13, as measured. docs/engines.md has the table.

Differences
-----------
* **The cluster** is that of SIMM_MANAGER (or SIMM_CLUSTER_MANAGER, or the settings file); without it,
  ``master_server_addr`` is taken for a SiMM manager. Segments, protocols, devices, replicas and SSDs are the data
  servers' affair: these arguments are accepted and have no effect.
* **Keys** lie in SiMM's namespace (SIMM_NAMESPACE) and in Mooncake's tenant. ``remove_all`` reaches no further: it
  makes all that was stored there before unreadable, for all clients, in one put. It returns 0, not a number of objects.
* **A put of an existing key** returns 0 and stores nothing, as there; ``upsert`` replaces. A value has 1 to 67,088,384
  bytes. A larger one has no room (-200), as one that is larger than Mooncake's segments; an empty one is -600.
* **Memory** is the host's. The CPU copies it, so a GPU's is refused with -600, and the log says what to use instead.
* **A get session** that is unused for a minute may be ended by the next one: its values are pinned until then.
* **An outage** is a miss to reads, and RPC_FAIL (-900) to puts, and so is a failure inside SiMM. No call raises. Before
  ``setup``, where Mooncake would crash, calls return -600.
* **A call that has returned** uses its memory no more, whatever it returned. vLLM's encoder cache ends its engine after
  other codes of a put, as Mooncake may still read the memory then.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from ..client import Client, NoValue, WrongSize, source_of
from ..constants import VALUE_BYTES_MAX
from ..errors import ConfigError, SimmError, UsageError
from ..host import fork
from ..host.buffers import Ranges, Span
from ..schemes.encodings import short_key
from ..sdk.batch import LargeValue
from ..sdk.ops.parts import pieces_of, ranges_of
from ..wire.status import Status
from .complaints import Complaints
from .keyspace import NOT_FLUSHED, Keyspace
from .keyspace import replace as replaced
from .mooncake_sessions import Held, Sessions
from .mooncake_types import (
    FAILED,
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_NOT_FOUND,
    OK,
    RPC_FAIL,
    TRANSFER_FAIL,
    BufferHandle,
    DeviceMemory,
    HostMemory,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    all_invalid,
    all_unreached,
    bind_to_numa_node,
    each_of,
    failure,
    invalid,
    pieces_at,
    put_code,
    ranges_at,
    same_length,
    unreached,
)
from .registration import of_mooncake
from .registration.registrar import Registrar

__all__ = [
    "BufferHandle", "MooncakeDistributedStore", "MooncakeHostMemAllocator", "ObjectDataType", "ReplicaDescriptor",
    "ReplicaStatus", "ReplicateConfig", "SoftPinAction", "bind_to_numa_node",
]  # fmt: skip

log = logging.getLogger("simm.connectors.mooncake")

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: What the name ``mooncake`` stands for in a command's processes.
PATH: Final = Path(__file__).with_name("mooncake_path")


def _guarded(
    instead: Callable[..., _T], failed: Callable[..., _T] | None = None
) -> Callable[
    [Callable[Concatenate[MooncakeDistributedStore, _P], _T]], Callable[Concatenate[MooncakeDistributedStore, _P], _T]
]:
    """Make a method return ``instead(its arguments)`` where it would raise: before setup, for a wrong argument.

    For any other failure it returns what ``failed`` makes of them, if there is one.
    """

    def decorate(
        method: Callable[Concatenate[MooncakeDistributedStore, _P], _T],
    ) -> Callable[Concatenate[MooncakeDistributedStore, _P], _T]:
        @functools.wraps(method)
        def run(store: MooncakeDistributedStore, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return method(store, *arguments, **named)
            except (UsageError, ConfigError) as exc:
                log.warning("%s: %s", method.__name__, exc)
                return instead(*arguments, **named)
            except SimmError as exc:
                log.warning("%s: %s", method.__name__, exc)
            except Exception:
                log.exception("%s failed", method.__name__)
            return (failed or instead)(*arguments, **named)

        return run

    return decorate


class MooncakeDistributedStore:
    """A client of a SiMM cluster with Mooncake's methods. Any thread may call it; no method raises.

    Codes are 0 (or a length, for what is read into buffers), or negative: see the module.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._keys: Keyspace | None = None
        self._registrar: Registrar | None = None
        self._user: of_mooncake.Maker | None = None
        self._hostname = ""
        self._complain = Complaints(log)
        self._lock = threading.Lock()
        #: Registered memory by its address. Replaced with each change, as any thread may read it.
        self._registered: dict[int, Span] = {}
        self._sessions = Sessions(self._complain)
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Take a new lock: another thread, which the child does not have, may hold this one."""
        self._lock = threading.Lock()

    # -- set-up -----------------------------------------------------------------------------------

    @_guarded(invalid, failure)
    def setup(self, local_hostname: str | dict[str, Any], *arguments: Any, **named: Any) -> int:
        """Connect; return 0, -1 if no manager answers or takes this client, or it fails, -600 for a wrong setting.

        Arguments are Mooncake's, or one dict of them. ``local_hostname``, ``master_server_addr`` and ``tenant_id``
        have a meaning here.
        """
        given = local_hostname if isinstance(local_hostname, dict) else dict(zip(_SETUP, (local_hostname, *arguments)))
        named = {**given, **named}
        if "master_server_address" in named:  # as LMCache passes it, from a configuration of that name
            named.setdefault("master_server_addr", named["master_server_address"])
        if "local_hostname" not in named or "master_server_addr" not in named:
            raise UsageError("local_hostname and master_server_addr are needed")
        address, hostname = str(named["master_server_addr"]), str(named["local_hostname"])
        return self._connect(address, hostname, str(named.get("tenant_id") or "default"))

    @_guarded(invalid, failure)
    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect as :meth:`setup` does: SiMM's clients share memory without a process between."""
        return self._connect(server_address, "localhost", "default")

    def _connect(self, address: str, hostname: str, tenant: str) -> int:
        """Connect to the manager that the settings name, else to ``address``."""
        client = Client(None if _managers(os.environ) else address)
        try:
            self.use(client, hostname, tenant)
        except BaseException:
            client.close()
            raise
        self._user = of_mooncake.user()
        log.warning("mooncake.store is SiMM: %r, tenant %r", client, tenant)
        return OK

    def use(self, client: Client, hostname: str = "localhost", tenant: str = "default") -> None:
        """Take a connected client, which :meth:`close` closes. Not one of Mooncake's methods."""
        self.close()
        self._hostname = hostname
        self._keys = Keyspace(client, short_key(f"mooncake/{tenant}"))
        self._registrar, self._client = Registrar(client, self._complain), client

    def close(self) -> int:
        """Close the connection; return 0. Twice is harmless."""
        client, keys, registrar = self._client, self._keys, self._registrar
        if client is None or keys is None or registrar is None:
            return OK
        try:
            self._client = self._keys = self._user = None  # also what it has of its caller
            keys.close()
            registrar.close()
        finally:  # an interrupt of what waits leaves nothing open
            try:
                self._sessions.end_all()
                with self._lock:
                    spans, self._registered = list(self._registered.values()), {}
                for span in spans:
                    with self._complain.ending("a registration"):
                        client.deregister(span)
            finally:
                with self._complain.ending("a client"):
                    client.close()
        return OK

    def get_hostname(self) -> str:
        """Return the name that setup was given."""
        return self._hostname

    @_guarded(lambda *_, **__: 1)
    def health_check(self) -> int:
        """Return 0 if a manager is connected, 1 before setup, 2 if none is reached."""
        client, _ = self._ready()
        return 0 if client.stats()["manager"] == "connected" else 2

    def _ready(self, keys: object = ()) -> tuple[Client, Keyspace]:
        """Return what to ask. Raises UsageError if there is nothing, or ``keys`` are no list of keys."""
        client, space = self._client, self._keys
        if client is None or space is None:
            raise UsageError("the store is not set up, or closed")
        if isinstance(keys, (str, bytes)) or not isinstance(keys, Sized):
            raise UsageError(f"keys is a list of keys, not {keys!r:.40}")
        return client, space

    # -- memory -------------------------------------------------------------------------------------

    @_guarded(invalid)
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory, which RDMA then uses in place; return 0, or -600 for a GPU's, a registered one or none."""
        client, _ = self._ready()
        span = client.register(HostMemory({})(buffer_ptr, size))
        with self._lock:
            if buffer_ptr in self._registered:
                return INVALID_PARAMS
            self._registered = {**self._registered, buffer_ptr: span}
        return OK

    @_guarded(invalid)
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """End a registration; return 0, or -600 if there is none at this address."""
        client, _ = self._ready()
        with self._lock:
            left = dict(self._registered)
            span, self._registered = left.pop(buffer_ptr, None), left
        if span is None:
            return INVALID_PARAMS
        with self._complain.ending("a registration"):  # no call uses it any more, all the same
            client.deregister(span)
        return OK

    def _memory(self) -> HostMemory:
        """Return what makes memory of the addresses of one call."""
        return HostMemory(self._registered)

    def _refused(self, what: str, why: UsageError) -> None:
        """Log why a key fails alone. An engine passes a GPU's memory for each page, so that is not logged each time."""
        if isinstance(why, DeviceMemory):
            self._complain("device memory", "%s: %s", what, str(why))
        else:
            log.warning("%s: %s", what, why)

    # -- put ------------------------------------------------------------------------------------------

    @_guarded(invalid, unreached)
    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Store bytes unless the key exists."""
        return self._put([key], [lambda: source_of(value)])[0]

    @_guarded(invalid, unreached)
    def put_parts(self, key: str, *parts: Any, config: Any = None) -> int:
        """Store the bytes of several buffers as one object unless the key exists."""
        return self._put([key], [lambda: pieces_of(parts)])[0]

    @_guarded(invalid, unreached)
    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Any = None) -> int:
        """:meth:`put` several; return 0, or the first code that is not."""
        same_length(keys, values)
        codes = self._put(keys, [functools.partial(source_of, each) for each in values])
        return next((code for code in codes if code != OK), OK)

    @_guarded(invalid, unreached)
    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        """Store memory by address unless the key exists."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    @_guarded(all_invalid, all_unreached)
    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """Store memory by address, for each key that does not exist; return a code for each."""
        same_length(keys, buffer_ptrs, sizes)
        memory = self._memory()
        return self._put(keys, [functools.partial(memory, *each) for each in zip(buffer_ptrs, sizes)])

    @_guarded(all_invalid, all_unreached)
    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:  # fmt: skip
        """Store what several pieces of memory make up, for each key that does not exist; return a code for each."""
        same_length(keys, all_buffer_ptrs, all_sizes)
        memory = self._memory()
        return self._put(keys, [functools.partial(pieces_at, memory, *one) for one in zip(all_buffer_ptrs, all_sizes)])

    @_guarded(invalid, unreached)
    def upsert(self, key: str, value: Any, config: Any = None) -> int:
        """Store bytes, replacing an old value atomically."""
        return self._put([key], [lambda: source_of(value)], replace=True)[0]

    def _put(
        self, keys: Sequence[str], sources: Sequence[Callable[[], memoryview | Span]], *, replace: bool = False
    ) -> list[int]:
        """Store values unless their keys exist; return a code for each. A value that makes no sense fails alone."""
        client, space = self._ready(keys)
        generation = space.generation()
        if generation is None:
            return [RPC_FAIL] * len(keys)
        if self._user is not None and self._registrar is not None:
            told = {"scope": space.scope, "generation": generation}
            self._registrar.tell(generation, functools.partial(self._user, told))
        codes = [INVALID_PARAMS] * len(keys)
        todo: list[tuple[int, bytes, memoryview | Span]] = []
        for at, (key, source) in enumerate(zip(keys, sources)):
            try:
                if key:
                    made = source()
                    if len(made) > VALUE_BYTES_MAX:
                        raise LargeValue(f"a value has 1 to {VALUE_BYTES_MAX} bytes, this one {len(made)}", made)
                    if len(made) > 0:
                        todo.append((at, space.digests(generation, [key])[0], made))
            except LargeValue as exc:
                log.warning("put: %s", exc)
                codes[at] = NO_AVAILABLE_HANDLE
            except UsageError as exc:
                self._refused("put", exc)
        there = [False] * len(todo)
        if todo and not replace:
            there = client.exists_digests([digest for _, digest, _ in todo])
        for (at, _, _), known in zip(todo, there):
            codes[at] = OK if known else codes[at]
        todo = [each for each, known in zip(todo, there) if not known]
        if todo:
            digests, values = [digest for _, digest, _ in todo], [source for _, _, source in todo]
            statuses = replaced(client, digests, values) if replace else client.put_digests(digests, values, True)
            for (at, _, _), status in zip(todo, statuses):
                codes[at] = put_code(status)
        return codes

    # -- get ------------------------------------------------------------------------------------------

    @_guarded(lambda *_, **__: b"")
    def get(self, key: str) -> bytes:
        """Return the value, empty for a miss."""
        value: bytes = self.get_batch([key])[0]
        return value

    @_guarded(lambda keys, *_, **__: each_of(keys, b""))
    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, empty for misses."""
        client, _ = self._ready()
        names = self._names(keys)
        return [got or b"" for got in client.get_many(names)] if names is not None else [b""] * len(keys)

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return the value as a buffer, None for a miss."""
        found: BufferHandle | None = self.batch_get_buffer([key])[0]
        return found

    @_guarded(lambda keys, *_, **__: each_of(keys, None))
    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """:meth:`get_buffer` for several."""
        return [BufferHandle(got) if got else None for got in self.get_batch(keys)]

    @_guarded(invalid)
    def get_size(self, key: str) -> int:
        """Return the value's length, or -704."""
        head = bytearray(1)
        return self._get([key], [ranges_of([(0, 1, head)])], [None])[0]

    @_guarded(invalid)
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy the value to memory; return its length, -704, or -600 if it is too long."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    @_guarded(all_invalid)
    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """:meth:`get_into` for several."""
        same_length(keys, buffer_ptrs, sizes)
        memory = self._memory()
        sinks = [self._sink(functools.partial(memory, *each)) for each in zip(buffer_ptrs, sizes)]
        return self._get(keys, sinks, [None] * len(keys))

    @_guarded(all_invalid)
    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:  # fmt: skip
        """Copy each value to several pieces of memory, one after the other, which it must fill; return its length.

        A shorter value is -800, a longer one -600. Either is dropped, so that the caller's can be stored.
        """
        same_length(keys, all_buffer_ptrs, all_sizes)
        memory = self._memory()
        wants = [self._sink(functools.partial(ranges_at, memory, *each)) for each in zip(all_buffer_ptrs, all_sizes)]
        return self._get(keys, wants, [want.least if want is not None else None for want in wants])

    def _sink(self, make: Callable[[], Span]) -> Span | None:
        """Return memory, or None for what makes no sense, which then fails alone."""
        try:
            return make()
        except UsageError as exc:
            self._refused("get", exc)
            return None

    def _get(self, keys: Sequence[str], sinks: Sequence[Span | None], wanted: Sequence[int | None]) -> list[int]:
        """Copy values to memory; return a length or a code for each.

        ``wanted``: the length that a value must have; one of another length is dropped. None: any that fits.
        """
        client, space = self._ready(keys)
        codes = [INVALID_PARAMS if sink is None or not key else OBJECT_NOT_FOUND for key, sink in zip(keys, sinks)]
        generation = space.generation()
        good = [at for at, code in enumerate(codes) if code == OBJECT_NOT_FOUND]
        if generation is None or not good:
            return codes
        digests = space.digests(generation, [keys[at] for at in good])
        results = client.get_digests(digests, [sinks[at] for at in good])  # type: ignore[misc]
        wrong: dict[bytes, int] = {}
        for at, digest, got in zip(good, digests, results):
            length = got.length if type(got) is WrongSize else int(got)
            want = wanted[at]
            if got == NoValue.TOO_SMALL:
                codes[at] = INVALID_PARAMS
            elif length > 0:
                codes[at] = length if want in (None, length) else TRANSFER_FAIL if length < want else INVALID_PARAMS
                if codes[at] < 0:
                    wrong[digest] = length
        if wrong:
            self._complain("size", "%d values have another size than their keys promise: dropped", len(wrong))
            client.delete_sized(list(wrong), list(wrong.values()))
        return codes

    # -- sessions: ranges of values that stay as they are -------------------------------------------------

    @_guarded(all_invalid)
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Pin values, to read ranges of them; return 0 for each, or -704 for a miss. Ends sessions that are unused."""
        client, _ = self._ready()
        self._sessions.end_idle()  # whose values may be all that can be pinned
        names = self._names(keys)
        if names is None:
            return [OBJECT_NOT_FOUND] * len(keys)
        pins = client.pin(names)
        self._sessions.begin(keys, pins)
        return [OBJECT_NOT_FOUND if length is None else OK for length in pins.lengths]

    @_guarded(all_invalid)
    def batch_get_into_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:  # fmt: skip
        """Copy ranges of a session's values to memory; return the bytes copied for each, or -600, -704."""
        same_length(keys, all_buffer_ptrs, all_sizes, all_src_offsets)
        memory, codes = self._memory(), [INVALID_PARAMS] * len(keys)
        wants: dict[Held, list[tuple[int, int, Ranges]]] = {}
        with self._sessions.reading(keys) as sessions:
            for at, held in enumerate(sessions):
                places = all_buffer_ptrs[at], all_sizes[at], all_src_offsets[at]
                ranges = self._sink(functools.partial(ranges_at, memory, *places))
                if held is None or not isinstance(ranges, Ranges):
                    continue
                if ranges.least <= (held[0].pins.lengths[held[1]] or 0):
                    wants.setdefault(held[0], []).append((at, held[1], ranges))
            for session, all_ranges in wants.items():
                parts = [[(offset, length, own) for offset, length, _, own in one.parts] for _, _, one in all_ranges]
                try:
                    got = session.pins.get_ranges_many([position for _, position, _ in all_ranges], parts)
                except UsageError as exc:  # it has ended meanwhile: what other sessions have is read all the same
                    log.warning("get ranges: %s", exc)
                    continue
                for (at, _, each), length in zip(all_ranges, got):
                    codes[at] = OBJECT_NOT_FOUND if length is None else each.total
        return codes

    @_guarded(invalid)
    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Release a session's values; return 0, also for keys of none."""
        self._sessions.end(keys)
        return OK

    # -- the rest --------------------------------------------------------------------------------------

    @_guarded(failure)
    def is_exist(self, key: str) -> int:
        """Return 1 if the key is stored, 0 if not, -1 before setup."""
        there: int = self.batch_is_exist([key])[0]
        return there

    @_guarded(lambda keys, *_, **__: each_of(keys, FAILED))
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """:meth:`is_exist` for several."""
        client, _ = self._ready()
        names = self._names(keys)
        return [int(each) for each in client.exists_many(names)] if names is not None else [0] * len(keys)

    @_guarded(lambda *_, **__: {})
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return a copy in memory for each key that is stored."""
        return {key: [ReplicaDescriptor()] for key, there in zip(keys, self.batch_is_exist(keys)) if there == 1}

    @_guarded(invalid, unreached)
    def remove(self, key: str, force: bool = False) -> int:
        """Drop an object; return 0, -704 if it is not stored, -900 if its server cannot be reached."""
        return self.batch_remove([key])[0]

    @_guarded(all_invalid, all_unreached)
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """:meth:`remove` several."""
        client, space = self._ready(keys)
        generation = space.generation()
        if generation is None:
            return [RPC_FAIL] * len(keys)
        statuses = client.delete_digests(space.digests(generation, keys))
        codes: dict[int, int] = {Status.OK: OK, Status.NOT_FOUND: OBJECT_NOT_FOUND}
        return [codes.get(status, RPC_FAIL) for status in statuses]

    @_guarded(invalid, unreached)
    def remove_all(self, force: bool = False) -> int:
        """Make all that was stored in this namespace and tenant unreadable; return 0, or -900 until others know."""
        if not (seen := self._ready()[1].flush_until_seen()):
            log.warning("remove_all has not reached other engines: %s", NOT_FLUSHED)
        return OK if seen else RPC_FAIL

    def _names(self, keys: Sequence[str]) -> list[str] | None:
        """Return the keys as SiMM has them; None if nothing is known of any. Raises UsageError."""
        _, space = self._ready(keys)
        generation = space.generation()
        return None if generation is None else space.names(generation, keys)


def _managers(environment: Mapping[str, str]) -> str:
    """Return the managers that the settings name, by the environment or a file; empty without. Raises ConfigError."""
    from ..config.settings import load  # the table of all settings, 10 ms: who only imports this module has none

    settings = load("client", env=environment)
    return "" if settings.origin("manager") == "default" else ",".join(map(str, settings.manager))


#: The positional arguments of ``setup``.
_SETUP: Final = (
    "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices",
    "master_server_addr", "engine", "enable_ssd_offload", "ssd_offload_path", "tenant_id", "enable_client_http_server",
    "client_http_port",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command whose processes find SiMM as ``mooncake.store``. Returns only if it cannot be started."""
    parser = argparse.ArgumentParser(
        prog="python -m simm.connectors.mooncake",
        description="Run a command whose processes find SiMM under the name mooncake.store. Nothing else is changed.",
    )
    parser.add_argument("--manager", metavar="HOST:PORT", help="SiMM's manager (SIMM_MANAGER)")
    parser.add_argument("--namespace", metavar="NAME", help="SiMM's namespace (SIMM_NAMESPACE)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command, behind --")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("name a command behind --")
    given = {"SIMM_MANAGER": arguments.manager, "SIMM_NAMESPACE": arguments.namespace}
    environment = {**os.environ, **{name: value for name, value in given.items() if value}}
    # SGLang else starts Mooncake's transfer engine beside the store, which must be installed, and which SiMM ignores.
    environment.setdefault("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")
    # SiMM itself too, where it is run out of a checkout.
    paths = [str(PATH), str(PATH.parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        shown = _managers(environment) or "the command's master_server_addr"
    except ConfigError as exc:  # its log will say so when it sets its store up
        shown = f"unknown, {exc}"
    print(f"simm: mooncake.store is SiMM (manager: {shown}) for: {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        print(f"simm: {command[0]}: {exc.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
