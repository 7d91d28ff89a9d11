"""``from simm.kv import BlockView, Store, register_mr, set_flag``: the API that engines already import.

SGLang's HiCache backend, FlexKV's worker and others were written against it, and must run unmodified. It is a thin
layer over :class:`simm.client.Client`.

    set_flag("cm_primary_node_ip", "10.0.0.5")
    store = Store()
    mr = register_mr(pool)
    store.mput(keys, [BlockView.from_buffer(address, size, mr) for address, size in pages])

Results are codes, never exceptions
-----------------------------------
An operation returns 0, a length, or a negative :class:`~simm.errors.Code`. ``exists`` returns False if it cannot
know. An engine that meets a bad key, a dead server or a closed store goes on without its cache. The keys of a batch
do not affect each other. Only constructors raise: ``Store()`` (RuntimeError with a sentence), and ``register_mr`` and
views of objects that are not memory (TypeError, UsageError).

Pages of another model
----------------------
Engines of different models, layouts or TP widths may make the same keys. A view with an MR therefore takes only a value
of exactly its size. Any other value is a miss, and the store drops it. Sizes do not tell all models apart: set
``SIMM_NAMESPACE`` to a different name for each model. A :class:`Block`, or a view without an MR, may be larger than the
value.

Settings
--------
Flags win over the environment (``SIMM_CLUSTER_MANAGER``, ``SIMM_NAMESPACE`` and the other ``SIMM_*`` names), the
environment over the file ``SIMM_CONFIG``, the file over defaults. ``Store()`` reads them; a later change affects later
stores. A refused host or port makes ``Store()`` fail. Stores with the same settings share one client, which lives until
the last of them is closed or the process ends. Dropping a store closes nothing: a finalizer may run in any thread at
any moment, where I/O could block.

``config/engine_flags.py`` has the flags, ``sdk/kv_memory.py`` registrations, views and blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from .client import Client, NoValue, WrongSize
from .config import engine_flags, startup
from .config.client_options import ClientOptions
from .config.engine_flags import set_flag
from .config.settings import Settings
from .constants import VALUE_BYTES_MAX
from .errors import Code, SimmError, TransportError, UsageError
from .host import fork
from .host.buffers import DEFAULT_COPY_THREADS, Span
from .sdk.kv_memory import Block, BlockView, MrExt, complain, complain_no_more, deregister_mr, register_mr
from .wire.messages import Status

__all__ = ["Block", "BlockView", "Code", "MrExt", "Store", "deregister_mr", "register_mr", "set_flag"]

log = logging.getLogger("simm.kv")

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Plain ints: engines assert that results are, and an IntEnum member is not.
_INVALID: Final = int(Code.INVALID_ARGUMENT)
_NO_ROUTE: Final = int(Code.NO_ROUTE)
_PUT_FAILED: Final = int(Code.PUT_FAILED)
_GET_FAILED: Final = int(Code.GET_FAILED)
_UNAVAILABLE: Final = int(Code.UNAVAILABLE)
_KEY_NOT_FOUND: Final = int(Code.KEY_NOT_FOUND)

#: Logged for a value of another model.
_UNFIT_TEXT: Final = (
    "get: the value under this key has %d bytes, the view wants %d: engines of different models, layouts or TP widths "
    "share these keys; set SIMM_NAMESPACE to a name of its own for each model. The value was dropped: a miss"
)
#: How long interpreter exit waits for clients to close, seconds. Servers notice the rest themselves.
EXIT_S: Final = 1.0
#: Guards the shared clients and the log handler. Held while a client connects.
_lock = threading.Lock()


# --- shared clients ---------------------------------------------------------------------------


class _ClientKey(NamedTuple):
    """What two stores must have in common to share a client."""

    pid: int
    options: ClientOptions


#: Only close() removes a client, so that a forked child finalises none of its parent's.
_clients: dict[_ClientKey, Client] = {}
#: The open stores of each client.
_users: dict[_ClientKey, weakref.WeakSet[Store]] = {}


def _client_for(store: Store) -> tuple[Client, _ClientKey]:
    """Return a client for a new store. Raises RuntimeError with a sentence.

    If no manager answers, the client connects in the background, and misses until then: an engine may be up before its
    cache is.
    """
    with _lock:
        try:
            settings = engine_flags.load(DEFAULT_COPY_THREADS)
            _log_to(settings)
            key = _ClientKey(os.getpid(), ClientOptions.from_settings(settings, lazy=True))
            client = _clients.get(key)
            if client is None:
                client = Client(**asdict(key.options))
                try:
                    client.begin()
                except TransportError as exc:
                    client.close()
                    raise TransportError(
                        f"{exc}; an engine names it by set_flag('cm_primary_node_ip', HOST) or SIMM_CLUSTER_MANAGER"
                    ) from exc
                _clients[key] = client
        except (SimmError, OSError) as exc:
            raise RuntimeError(f"SiMM: {exc}") from exc
        _users.setdefault(key, weakref.WeakSet()).add(store)
        return client, key


def _leave(store: Store, key: _ClientKey) -> None:
    """Note that a store is closed. Close its client if that was the last one."""
    with _lock:
        users = _users.get(key)
        if users is None:
            return
        users.discard(store)
        if users:
            return
        del _users[key]
        client = _clients.pop(key, None)
    if client is not None:
        client.close()


_handler: logging.Handler | None = None
#: The logger's level before this module changed it.
_level_before = logging.NOTSET
_handler_path: Path | None = None


def _log_to(settings: Settings) -> None:
    """Send the client's log to the file of the settings; to stderr, with a warning, if it cannot be opened.

    Without a file the program's own logging decides. Acts once for each change of the flag.
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
    _handler, trouble = startup.log_handler(settings.log_file)
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
    """Close all clients at exit, waiting for ``EXIT_S`` at most, so that servers release what they hold for them."""
    complain_no_more()  # daemon threads may still use a store that closes here; that is no mistake of the caller
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
        return  # CPython 3.12.0 and .1 start no thread at this point: the kernel closes the sockets
    thread.join(EXIT_S)


fork.in_child(_after_fork_in_child)
atexit.register(_close_all)


# --- the store --------------------------------------------------------------------------------


def _awaitable(
    method: Callable[Concatenate[Store, _P], _T],
) -> Callable[Concatenate[Store, _P], Coroutine[Any, Any, _T]]:
    """Return the awaitable form of a method. A cancellation is delivered when the views are no longer in use."""
    name = method.__name__

    async def run(store: Store, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        answer: _T = await store._in_thread(functools.partial(getattr(store, name), *arguments, **named))
        return answer

    functools.update_wrapper(run, method)
    run.__name__, run.__doc__ = f"{name}_async", f":meth:`{name}`, awaitable."
    return run


class Store:
    """A connection to the cluster that the flags and the environment name.

    A process may have any number, and any thread may call them, before and after a fork. While no manager answers,
    which is logged, gets miss and puts fail. Raises RuntimeError, with a sentence, if a setting is wrong or a manager
    refuses this client.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._client, self._key = _client_for(self)
        #: Keys and views refused as INVALID_ARGUMENT.
        self.rejected = 0
        #: Values dropped because their size was not that of the registered view.
        self.unfit = 0

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self._client!r}>" if self._client is not None else "<Store, closed>"

    def close(self) -> None:
        """Close the store: operations return INVALID_ARGUMENT or False from now on. Twice is harmless."""
        client, self._client = self._client, None
        if client is not None:
            _leave(self, self._key)

    def stats(self) -> dict[str, Any]:
        """Return the shared client's :meth:`~simm.client.Client.stats`, with ``rejected`` and ``unfit``."""
        client = self._client
        return {**(client.stats() if client is not None else {}), "rejected": self.rejected, "unfit": self.unfit}

    def allocate(self, block_size: int) -> Block:
        """Allocate a block of ``block_size`` bytes. Raises TypeError, UsageError below 1, MemoryError."""
        return Block(block_size)

    # -- single keys ------------------------------------------------------------------------------

    def put(self, key: str, block: BlockView) -> int:
        """Store the view's bytes, replacing a value atomically; return 0 or a negative code."""
        return self.mput([key], [block])[0]

    def get(self, key: str, block: BlockView) -> int:
        """Copy the value to the view's head; return its length in bytes, or a negative code, GET_FAILED for a miss.

        A view smaller than the value stays untouched: GET_FAILED. So does a view made with an MR whose size is not
        exactly the value's; the value is another model's then, and is dropped.
        """
        return self.mget([key], [block])[0]

    def exists(self, key: str) -> bool:
        """Return whether the key is stored; False also if its server cannot be asked, which is counted and logged."""
        return self.mexists([key])[0]

    def delete(self, key: str) -> int:
        """Drop the key; return 0, KEY_NOT_FOUND, or another negative code."""
        return self.mdelete([key])[0]

    # -- many keys --------------------------------------------------------------------------------

    def mput(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`put` for many keys; return a code for each. Of a duplicate key the later view is stored."""
        client, digests, spans, positions = self._checked(keys, blocks, _sources, _no_source)
        if client is None:
            return [_INVALID] * len(keys)
        statuses = self._call(client.put_digests, digests, spans)
        if statuses is None:
            return [_INVALID] * len(keys)
        if any(statuses):
            for at, status in enumerate(statuses):
                if status == Status.UNAVAILABLE:
                    statuses[at] = _outage(client, digests[at])
                elif status > 0:
                    statuses[at] = _PUT_FAILED
        return statuses if positions is None else _spread(statuses, positions, [_INVALID] * len(keys))

    def mget(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`get` for many keys; return a length or code for each."""
        client, digests, spans, positions = self._checked(keys, blocks, _sinks, _no_sink)
        if client is None:
            return [_INVALID] * len(keys)
        results = self._call(client.get_digests, digests, spans)
        if results is None:
            return [_INVALID] * len(keys)
        if min(results) <= 0:
            unfit: dict[bytes, int] = {}
            for at, got in enumerate(results):
                if got > 0:
                    continue
                results[at] = _GET_FAILED
                if got == NoValue.UNAVAILABLE:
                    results[at] = _outage(client, digests[at])
                elif got == NoValue.TOO_SMALL:
                    complain("get: a value does not fit its view of %d bytes", len(spans[at]))
                elif type(got) is WrongSize:
                    unfit[digests[at]] = got.length
                    complain(_UNFIT_TEXT, got.length, len(spans[at]))
            if unfit:
                self._drop(client, unfit)
        return results if positions is None else _spread(results, positions, [_INVALID] * len(keys))

    def mexists(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many keys."""
        client, digests, _, positions = self._checked(keys)
        if client is None:
            return [False] * len(keys)
        hits = self._call(client.exists_digests, digests)
        if hits is None:
            return [False] * len(keys)
        return hits if positions is None else _spread(hits, positions, [False] * len(keys))

    def mdelete(self, keys: Sequence[str]) -> list[int]:
        """:meth:`delete` for many keys; return a code for each."""
        client, digests, _, positions = self._checked(keys)
        if client is None:
            return [_INVALID] * len(keys)
        statuses = self._call(client.delete_digests, digests)
        if statuses is None:
            return [_INVALID] * len(keys)
        for at, status in enumerate(statuses):
            if status == Status.NOT_FOUND:
                statuses[at] = _KEY_NOT_FOUND
            elif status > 0:
                statuses[at] = _outage(client, digests[at])
        return statuses if positions is None else _spread(statuses, positions, [_INVALID] * len(keys))

    # -- asyncio ------------------------------------------------------------------------------------

    put_async = _awaitable(put)
    get_async = _awaitable(get)
    exists_async = _awaitable(exists)
    delete_async = _awaitable(delete)
    mput_async = _awaitable(mput)
    mget_async = _awaitable(mget)
    mexists_async = _awaitable(mexists)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        client = self._client
        if client is None:
            return call()  # refuses at once
        try:
            return await client.in_thread(call)
        except UsageError:
            return call()  # the client was closed meanwhile: the same

    # -- shared pieces ------------------------------------------------------------------------------

    def _checked(
        self, keys: Sequence[str], blocks: Sequence[BlockView] | None = None,
        all_good: Callable[[Any], bool] = bool, trouble: Callable[[Any], str] = str,
    ) -> tuple[Client | None, list[bytes], list[memoryview | Span], list[int] | None]:  # fmt: skip
        """Return the client, and the digests, memory and batch positions of the keys that it can be asked for.

        The positions are None if that is every key. The client is None if it is none.
        """
        client = self._client
        digests: list[bytes] = []
        spans: list[memoryview | Span] = []
        positions: list[int] = []
        if client is None:
            self._refuse(len(keys), "the store is closed")
        elif isinstance(keys, str):
            self._refuse(len(keys), "keys is a list of keys, not the one text %r", keys[:40])
        elif blocks is not None and len(blocks) != len(keys):
            self._refuse(len(keys), "%d keys and %d views", len(keys), len(blocks))
        else:
            digest = client._digest
            # Without a bug in the engine all are valid: three comprehensions. Else key by key.
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
                    problem = trouble(block)
                    if problem:
                        self._refuse(1, "%s", problem)
                        continue
                    spans.append(block._piece)  # type: ignore[arg-type]
                digests.append(named)
                positions.append(position)
        if not digests:
            return None, digests, spans, None
        return client, digests, spans, None if len(digests) == len(keys) else positions

    def _call(self, call: Callable[..., list[_T]], digests: list[bytes], *arguments: Any) -> list[_T] | None:
        """Return the client's results, or None, with the keys refused, if another thread has just closed it."""
        try:
            return call(digests, *arguments)
        except UsageError as exc:
            self._refuse(len(digests), "%s", exc)
            return None

    def _drop(self, client: Client, unfit: dict[bytes, int]) -> None:
        """Drop values that do not fit their keys' views. Otherwise the keys would exist, and no engine would put them.

        The request names their sizes, so that a right value that was put in between stays. The next get refuses a value
        that cannot be dropped now.
        """
        self.unfit += len(unfit)
        client.counters["misses"] += len(unfit)
        try:
            client.delete_sized(list(unfit), list(unfit.values()))
        except SimmError as exc:
            log.info("a value of another size could not be dropped: %s", exc)

    def _refuse(self, count: int, problem: str, *arguments: Any) -> None:
        if count:
            self.rejected += count
            complain("invalid argument: " + problem, *arguments)


def _sources(spans: Sequence[Span]) -> bool:
    """Return whether all can be put. Raises AttributeError for a None."""
    return max([span.size for span in spans], default=0) <= VALUE_BYTES_MAX


def _sinks(spans: Sequence[Span]) -> bool:
    """Return whether all can be written. Raises AttributeError for a None."""
    return all([span.writable for span in spans])  # noqa: C419 -- a generator costs three times as much


def _no_source(block: Any) -> str:
    """Return why a view cannot be put, or an empty string."""
    if not isinstance(block, BlockView):
        return f"put takes a BlockView, not {type(block).__name__}"
    if block._piece is None or block.size > VALUE_BYTES_MAX:
        return f"a value has 1 to {VALUE_BYTES_MAX} bytes and an address, unlike {block!r}"
    return ""


def _no_sink(block: Any) -> str:
    """Return why no value can be copied into a view, or an empty string."""
    if not isinstance(block, BlockView):
        return f"get takes a BlockView, not {type(block).__name__}"
    if block._piece is None:
        return f"{block!r} names no memory"
    return "" if block._piece.writable else f"{block!r} is read-only memory"


def _outage(client: Client, digest: bytes) -> int:
    """Return NO_ROUTE if the shard map names no owner, else UNAVAILABLE."""
    try:
        return _UNAVAILABLE if client.owned(digest) else _NO_ROUTE
    except UsageError:  # another thread has just closed it
        return _UNAVAILABLE


def _spread(answers: Sequence[_T], positions: Sequence[int], results: list[_T]) -> list[_T]:
    """Write the answers to their positions in the whole batch, and return it."""
    for position, answer in zip(positions, answers):
        results[position] = answer
    return results
