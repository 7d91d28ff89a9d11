"""``from simm.kv import BlockView, Store, register_mr, set_flag``: the face that engines already import.

SGLang's HiCache backend, FlexKV's worker and others were written against this surface; it must hold for them
unmodified. It is a thin layer over :class:`simm.client.Client` and adds no behaviour of its own.

    set_flag("cm_primary_node_ip", "10.0.0.5")
    store = Store()
    mr = register_mr(pool)
    store.mput(keys, [BlockView.from_buffer(address, size, mr) for address, size in pages])

Results are codes, never exceptions
-----------------------------------
An operation answers 0, a length, or a negative :class:`~simm.errors.Code`; ``exists`` answers False for
whatever keeps it from knowing. An engine that meets a bad key, a dead server or a closed store goes on
without its cache. In a batch each key stands alone. What raises is building things:
``Store()`` (RuntimeError with a sentence), ``register_mr`` and views of things that are no memory
(TypeError, UsageError).

Settings
--------
Flags win over the environment (``SIMM_CLUSTER_MANAGER``, ``SIMM_NAMESPACE`` and the other ``SIMM_*`` names), that
over the file ``SIMM_CONFIG``, that over defaults. They are read by ``Store()``: a later change affects later stores.
Stores with the same settings share one client; it lives until the last of them is closed or the process
ends. Dropping a store closes nothing: a finalizer may run in any thread at any moment, and is no place for I/O.

Memory is named by ``blocks.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from . import config, quantities
from .blocks import Block, BlockView, MrExt, complain, complain_no_more, deregister_mr, register_mr
from .buffers import DEFAULT_COPY_THREADS, Span
from .client import DOWN, MISS, SMALL, Client
from .constants import DEFAULT_MANAGER_PORT, VALUE_BYTES_MAX
from .errors import Code, ConfigError, SimmError, TransportError, UsageError
from .messages import Status
from .startup import read_tokens

__all__ = ["Block", "BlockView", "Code", "MrExt", "Store", "deregister_mr", "register_mr", "set_flag"]

log = logging.getLogger("simm.kv")

_T = TypeVar("_T")

#: Plain ints: engines assert that results are, and an IntEnum member is not.
_INVALID: Final = int(Code.INVALID_ARGUMENT)
_NO_ROUTE: Final = int(Code.NO_ROUTE)
_PUT_FAILED: Final = int(Code.PUT_FAILED)
_GET_FAILED: Final = int(Code.GET_FAILED)
_UNAVAILABLE: Final = int(Code.UNAVAILABLE)
_KEY_NOT_FOUND: Final = int(Code.KEY_NOT_FOUND)

#: Interpreter exit waits so long for clients to say goodbye; what they leave out the servers find out themselves.
EXIT_S: Final = 1.0
_LOG_FORMAT: Final = "%(asctime)s %(levelname).1s %(process)d %(name)s: %(message)s"


# --- flags ------------------------------------------------------------------------------------


def _host(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    if text.count(":") == 1:
        raise ConfigError(f"{text!r} is a host and a port: set the port by cm_primary_node_port")
    if ":" in text and not text.startswith("["):
        text = f"[{text}]"  # IPv6, as the parser wants it
    return quantities.parse_address(text, DEFAULT_MANAGER_PORT).host


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise ConfigError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


def _yes_no(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f"):
        raise ConfigError(f"{text!r} is neither true nor false")
    return word in ("true", "1", "yes", "y", "t")


class Flag(NamedTuple):
    """A flag that :func:`set_flag` knows."""

    parse: Callable[[str], Any]
    #: What holds while it is not set, and what it does here.
    help: str


FLAGS: Final[dict[str, Flag]] = {
    "cm_primary_node_ip": Flag(_host, "manager's host; unset: the environment's, else 127.0.0.1"),
    "cm_rpc_inter_port": Flag(_number(1, 65_535), f"manager's port; unset: {DEFAULT_MANAGER_PORT}"),
    "clnt_log_file": Flag(str.strip, "file to log to; unset: the program's own logging"),
    "clnt_thread_pool_size": Flag(
        _number(1, 1024), "most threads that share one large copy; the machine's cores are a bound of their own"
    ),
    "clnt_sync_req_timeout_ms": Flag(_number(1, 3_600_000), "deadline of each exchange; unset: SIMM_DEADLINE_MS"),
    "clnt_async_req_timeout_ms": Flag(
        _number(1, 3_600_000), "the same, where clnt_sync_req_timeout_ms is unset: both forms are one code"
    ),
    "clnt_syncreq_enable_retry": Flag(_yes_no, "no effect: the client retries by itself what a retry can help"),
    "clnt_syncreq_retry_count": Flag(_number(0, 1000), "no effect, see clnt_syncreq_enable_retry"),
    "clnt_use_k8s": Flag(_yes_no, "no effect: in Kubernetes give a Service's name as cm_primary_node_ip"),
}
ALIASES: Final = {"cm_primary_node_port": "cm_rpc_inter_port"}

_flags: dict[str, Any] = {}
#: Guards the flags, the shared clients and the log handler. Held while a client connects.
_lock = threading.Lock()


def set_flag(name: str, value: str) -> bool:
    """Set a flag for stores made from now on. False, and a logged reason, if it is unknown or does not parse.

    Never raises. :data:`FLAGS` lists them; an empty text for the host or the log file unsets it.
    """
    try:
        flag = FLAGS.get(ALIASES.get(name, name))
        if flag is None:
            log.warning("set_flag: there is no flag %r; known are %s", name, ", ".join([*FLAGS, *ALIASES]))
            return False
        parsed = flag.parse(value if isinstance(value, str) else str(value))
    except (SimmError, ValueError, TypeError) as exc:
        log.warning("set_flag(%r): %s", name, exc)
        return False
    # One store to a dict is atomic; no lock, as a Store() may be connecting under it.
    _flags[ALIASES.get(name, name)] = parsed
    return True


# --- shared clients ---------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """All that two stores must have in common to share a client."""

    pid: int
    manager: str
    namespace: str
    path: str
    deadline_s: float
    checksum: bool
    copy_threads: int
    token: str
    replicas: int
    rdma_devices: str


#: Never shrunk but by close(), so that nothing of the parent's is finalised in a forked child.
_clients: dict[_Wanted, Client] = {}
#: Stores that use each client and are not closed.
_users: dict[_Wanted, weakref.WeakSet[Store]] = {}


def _settings() -> config.Settings:
    """Flags over environment over file over defaults. Raises ConfigError."""
    given: dict[str, Any] = {}
    timeout = _flags.get("clnt_sync_req_timeout_ms", _flags.get("clnt_async_req_timeout_ms"))
    if timeout is not None:
        given["deadline_ms"] = timeout
    threads = _flags.get("clnt_thread_pool_size")
    if threads is not None:
        given["copy_threads"] = min(threads, DEFAULT_COPY_THREADS)
    if _flags.get("clnt_log_file"):
        given["log_file"] = Path(_flags["clnt_log_file"]).expanduser()
    host, port = _flags.get("cm_primary_node_ip"), _flags.get("cm_rpc_inter_port")
    if host:
        given["manager"] = (quantities.Address(host, port or DEFAULT_MANAGER_PORT),)
    settings = config.load("client", given)
    if not host and port and settings.origin("manager") == "default":
        settings = config.load("client", {**given, "manager": (quantities.Address("127.0.0.1", port),)})
    return settings


def _wanted(settings: config.Settings) -> _Wanted:
    tokens = read_tokens(settings.token_file)
    return _Wanted(
        os.getpid(), ",".join(map(str, settings.manager)), settings.namespace, settings.path,
        settings.deadline_ms / 1000, settings.checksum, settings.copy_threads, tokens[0] if tokens else "",
        settings.replicas, settings.rdma_devices,
    )  # fmt: skip


def _client_for(store: Store) -> tuple[Client, _Wanted]:
    """The client for a new store, connected. Raises RuntimeError with a sentence."""
    with _lock:
        try:
            settings = _settings()
            _log_to(settings)
            wanted = _wanted(settings)
            client = _clients.get(wanted)
            if client is None:
                client = Client(**{name: value for name, value in wanted._asdict().items() if name != "pid"})
                _clients[wanted] = client
        except TransportError as exc:
            raise RuntimeError(
                f"SiMM: {exc}; an engine names it by set_flag('cm_primary_node_ip', HOST) or SIMM_CLUSTER_MANAGER"
            ) from exc
        except (SimmError, OSError) as exc:
            raise RuntimeError(f"SiMM: {exc}") from exc
        _users.setdefault(wanted, weakref.WeakSet()).add(store)
        return client, wanted


def _leave(store: Store, wanted: _Wanted) -> None:
    """The store is closed: its client too if it was the last."""
    with _lock:
        users = _users.get(wanted)
        if users is None:
            return
        users.discard(store)
        if users:
            return
        del _users[wanted]
        client = _clients.pop(wanted, None)
    if client is not None:
        client.close()


_handler: logging.Handler | None = None
#: The logger's level before there was one.
_level_before = logging.NOTSET
_handler_path: Path | None = None


def _log_to(settings: config.Settings) -> None:
    """Send what the client logs to the wanted file; to stderr, and say so, where it cannot be opened.

    With no file wanted the program's own logging decides. Once for each change of the flag.
    """
    global _handler, _handler_path, _level_before
    if settings.log_file == _handler_path:
        return
    root = logging.getLogger("simm")
    if _handler is not None:
        root.removeHandler(_handler)
        _handler.close()
        _handler, root.propagate = None, True
        root.setLevel(_level_before)
    _handler_path = settings.log_file
    if settings.log_file is None:
        return
    trouble = ""
    try:
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        _handler = logging.FileHandler(settings.log_file, encoding="utf-8")
    except OSError as exc:
        trouble = f"cannot log to {settings.log_file} ({exc.strerror or exc}): logging to stderr"
        _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    root.addHandler(_handler)
    root.propagate = False
    _level_before = root.level
    root.setLevel(settings.log_level.upper())
    if trouble:
        root.warning("%s", trouble)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


def _close_all() -> None:
    """At exit: hand back what the servers hold for us, for a second at most."""
    complain_no_more()  # daemon threads may still be at work; that their store closes is not their mistake
    clients = list(_clients.values())
    if not clients:
        return

    def goodbye() -> None:
        for client in clients:
            client.close()

    thread = threading.Thread(target=goodbye, name="simm-exit", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return  # CPython 3.12.0 and .1 start no thread any more at this point: the kernel closes the sockets
    thread.join(EXIT_S)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_all)


# --- the store --------------------------------------------------------------------------------


class Store:
    """A connection to the cluster that the flags and the environment name.

    Any number per process, used from any number of threads, before and after a fork. Raises RuntimeError, with
    a sentence, when no manager answers or a setting is wrong.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._client, self._wanted = _client_for(self)
        #: Keys and views refused as INVALID_ARGUMENT.
        self.rejected = 0

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self._client!r}>" if self._client is not None else "<Store, closed>"

    def close(self) -> None:
        """Operations answer INVALID_ARGUMENT or False from now on. Twice is harmless; never is, too."""
        client, self._client = self._client, None
        if client is not None:
            _leave(self, self._wanted)

    def stats(self) -> dict[str, Any]:
        """The shared client's counters and paths (see :meth:`simm.client.Client.stats`), and ``rejected``."""
        client = self._client
        return {**(client.stats() if client is not None else {}), "rejected": self.rejected}

    def allocate(self, block_size: int) -> Block:
        """Memory of its own for ``block_size`` bytes. Raises TypeError, UsageError below 1, MemoryError."""
        return Block(block_size)

    # -- single keys ------------------------------------------------------------------------------

    def put(self, key: str, block: BlockView) -> int:
        """Store the view's bytes, replacing a value atomically: 0, or a negative code."""
        return self.mput([key], [block])[0]

    def get(self, key: str, block: BlockView) -> int:
        """Copy the value to the view's head: its length in bytes, or a negative code, GET_FAILED for a miss.

        Into a view smaller than the value not one byte is written: GET_FAILED.
        """
        return self.mget([key], [block])[0]

    def exists(self, key: str) -> bool:
        """Is the key stored? False also where its server cannot be asked; that is counted and logged."""
        return self.mexists([key])[0]

    def delete(self, key: str) -> int:
        """Drop the key: 0, KEY_NOT_FOUND, or another negative code."""
        return self.mdelete([key])[0]

    # -- many keys --------------------------------------------------------------------------------

    def mput(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`put` for many; a code for each. Of a key that comes twice the later view is stored."""
        client, digests, spans, positions = self._checked(keys, blocks, _sources, _no_source)
        if client is None:
            return [_INVALID] * len(keys)
        statuses = self._call(client.put_digests, digests, spans)
        if any(statuses):
            for at, status in enumerate(statuses):
                if status == Status.UNAVAILABLE:
                    statuses[at] = _outage(client, digests[at])
                elif status > 0:
                    statuses[at] = _PUT_FAILED
        return statuses if positions is None else _spread(statuses, positions, [_INVALID] * len(keys))

    def mget(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`get` for many; a length or code for each."""
        client, digests, spans, positions = self._checked(keys, blocks, _sinks, _no_sink)
        if client is None:
            return [_INVALID] * len(keys)
        results = self._call(client.get_digests, digests, spans)
        if min(results) <= 0:
            for at, got in enumerate(results):
                if got == DOWN:
                    results[at] = _outage(client, digests[at])
                elif got in (MISS, SMALL):
                    results[at] = _GET_FAILED
                    if got == SMALL:
                        complain("get: a value does not fit its view of %d bytes", len(spans[at]))
        return results if positions is None else _spread(results, positions, [_INVALID] * len(keys))

    def mexists(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many."""
        client, digests, _, positions = self._checked(keys)
        if client is None:
            return [False] * len(keys)
        try:
            hits = client.exists_digests(digests)
        except UsageError as exc:  # closed by another thread a moment ago
            self._refuse(len(digests), "%s", exc)
            return [False] * len(keys)
        return hits if positions is None else _spread(hits, positions, [False] * len(keys))

    def mdelete(self, keys: Sequence[str]) -> list[int]:
        """:meth:`delete` for many; a code for each."""
        client, digests, _, positions = self._checked(keys)
        if client is None:
            return [_INVALID] * len(keys)
        statuses = self._call(client.delete_digests, digests)
        for at, status in enumerate(statuses):
            if status == Status.NOT_FOUND:
                statuses[at] = _KEY_NOT_FOUND
            elif status > 0:
                statuses[at] = _outage(client, digests[at])
        return statuses if positions is None else _spread(statuses, positions, [_INVALID] * len(keys))

    # -- asyncio ------------------------------------------------------------------------------------

    async def put_async(self, key: str, block: BlockView) -> int:
        """:meth:`put`, awaitable. A cancellation is delivered when the view is out of use; so for all of these."""
        return await self._in_thread(self.put, key, block)

    async def get_async(self, key: str, block: BlockView) -> int:
        """:meth:`get`, awaitable: the view is not written after a cancellation has been delivered."""
        return await self._in_thread(self.get, key, block)

    async def exists_async(self, key: str) -> bool:
        """:meth:`exists`, awaitable."""
        return await self._in_thread(self.exists, key)

    async def delete_async(self, key: str) -> int:
        """:meth:`delete`, awaitable."""
        return await self._in_thread(self.delete, key)

    async def mput_async(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`mput`, awaitable."""
        return await self._in_thread(self.mput, keys, blocks)

    async def mget_async(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`mget`, awaitable."""
        return await self._in_thread(self.mget, keys, blocks)

    async def mexists_async(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`mexists`, awaitable."""
        return await self._in_thread(self.mexists, keys)

    async def _in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        client = self._client
        if client is None:
            return call(*arguments)  # refuses at once
        try:
            return await client.in_thread(call, *arguments)
        except UsageError:
            return call(*arguments)  # the client was closed meanwhile: the same

    # -- shared pieces ------------------------------------------------------------------------------

    def _checked(
        self, keys: Sequence[str], blocks: Sequence[BlockView] | None = None,
        all_good: Callable[[Any], bool] = bool, trouble: Callable[[Any], str] = str,
    ) -> tuple[Client | None, list[bytes], list[memoryview | Span], list[int] | None]:  # fmt: skip
        """What can be asked of the client: its digests, its memory, and where each stands in the batch.

        No positions: each key is where it was. No client: there is nothing to ask.
        """
        client = self._client
        digests: list[bytes] = []
        spans: list[memoryview | Span] = []
        positions: list[int] = []
        if client is None:
            self._refuse(len(keys), "the store is closed")
        elif blocks is not None and len(blocks) != len(keys):
            self._refuse(len(keys), "%d keys and %d views", len(keys), len(blocks))
        else:
            digest = client._digest
            # All good, as ever but for bugs: three comprehensions. Else one by one.
            with contextlib.suppress(UsageError, AttributeError):
                digests = [digest(key) for key in keys]
                if blocks is None:
                    return (client if digests else None), digests, spans, None
                spans = [block._piece for block in blocks]  # type: ignore[misc]
                if all_good(spans):
                    return (client if digests else None), digests, spans, None
            digests, spans = [], []
            for position, key in enumerate(keys):
                try:
                    named = digest(key)
                except UsageError as exc:
                    self._refuse(1, "%s", exc)
                    continue
                if blocks is not None:
                    block = blocks[position]
                    why = trouble(block)
                    if why:
                        self._refuse(1, "%s", why)
                        continue
                    spans.append(block._piece)  # type: ignore[arg-type]
                digests.append(named)
                positions.append(position)
        if not digests:
            return None, digests, spans, None
        return client, digests, spans, None if len(digests) == len(keys) else positions

    def _call(self, call: Callable[..., list[int]], digests: list[bytes], *arguments: Any) -> list[int]:
        try:
            return call(digests, *arguments)
        except UsageError as exc:  # closed by another thread a moment ago
            self._refuse(len(digests), "%s", exc)
            return [_INVALID] * len(digests)

    def _refuse(self, count: int, why: str, *arguments: Any) -> None:
        if count:
            self.rejected += count
            complain("invalid argument: " + why, *arguments)


def _sources(spans: Sequence[Span]) -> bool:
    """Can all be put? AttributeError if there is a None."""
    return max([span.size for span in spans], default=0) <= VALUE_BYTES_MAX


def _sinks(spans: Sequence[Span]) -> bool:
    """Can all be written? AttributeError if there is a None."""
    return all([span.writable for span in spans])  # noqa: C419 -- a generator costs three times as much


def _no_source(block: Any) -> str:
    """Why a view cannot be put; empty if it can."""
    if not isinstance(block, BlockView):
        return f"put takes a BlockView, not {type(block).__name__}"
    if block._piece is None or block.size > VALUE_BYTES_MAX:
        return f"a value has 1 to {VALUE_BYTES_MAX} bytes and an address, unlike {block!r}"
    return ""


def _no_sink(block: Any) -> str:
    """Why nothing can be got into a view; empty if it can."""
    if not isinstance(block, BlockView):
        return f"get takes a BlockView, not {type(block).__name__}"
    if block._piece is None:
        return f"{block!r} names no memory"
    return "" if block._piece.writable else f"{block!r} is read-only memory"


def _outage(client: Client, digest: bytes) -> int:
    """NO_ROUTE where the shard map names no owner, else UNAVAILABLE."""
    try:
        return _UNAVAILABLE if client.owned(digest) else _NO_ROUTE
    except UsageError:  # closed by another thread a moment ago
        return _UNAVAILABLE


def _spread(answers: Sequence[_T], positions: Sequence[int], results: list[_T]) -> list[_T]:
    """The answers at their places in the whole batch."""
    for position, answer in zip(positions, answers):
        results[position] = answer
    return results
