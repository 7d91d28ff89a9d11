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

``config/engine_flags.py`` has the flags, ``sdk/ops/kv_memory.py`` registrations, views and blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from .client import Client, NoValue, WrongSize
from .config import engine_flags, logs
from .config.client_options import ClientOptions
from .config.engine_flags import set_flag
from .config.settings import Settings
from .constants import VALUE_BYTES_MAX
from .errors import Code, SimmError, TransportError, UsageError
from .host import fork
from .host.buffers import DEFAULT_COPY_THREADS, Span
from .sdk.batch import UNLOADABLE, Mistake, awaitable
from .sdk.calls.closing import AsyncClosing, carry_out
from .sdk.calls.kv_asks import Asks
from .sdk.calls.kv_groups import KvGroups
from .sdk.calls.kv_keep import Keeps
from .sdk.calls.kv_part import delete_codes, outage, put_code, spread
from .sdk.calls.kv_prefetch import Prefetches
from .sdk.ops.kv_memory import (
    Block,
    BlockView,
    Mixed,
    MrExt,
    PartedViews,
    ViewRanges,
    all_sinks,
    all_sources,
    complain,
    complain_no_more,
    deregister_mr,
    no_sink,
    no_source,
    no_wide,
    problem_of,
    register_mr,
)

if TYPE_CHECKING:
    from .sdk.calls.kv_pins import PinnedKeys

__all__ = ["Block", "BlockView", "Code", "MrExt", "Store", "deregister_mr", "register_mr", "set_flag"]

log = logging.getLogger("simm.kv")

_T = TypeVar("_T")

#: Plain ints: engines assert that results are, and an IntEnum member is not.
_INVALID: Final = int(Code.INVALID_ARGUMENT)
_GET_FAILED: Final = int(Code.GET_FAILED)

#: What a batch asks the client for: the client, or None if there is nothing to ask; digests; memory; the positions of
#: the keys in order, None if all are.
_Checked = tuple[Client | None, list[bytes], list[memoryview | Span], list[int] | None]
#: Turns the client's results into codes: (client, digests, memory, results).
_ToCodes = Callable[[Client, list[bytes], list[Any], list[Any]], list[Any]]

#: Logged for a value of another model.
_UNFIT_TEXT: Final = (
    "get: the value under this key has %d bytes, the view wants %d: engines of different models, layouts or TP widths "
    "share these keys; set SIMM_NAMESPACE to a name of its own for each model. The value was dropped: a miss"
)
#: How long interpreter exit waits for clients to close, seconds. Servers notice the rest themselves.
EXIT_S: Final = 1.0
#: Guards the shared clients and the log handler.
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
#: Clients without a store, until their close() has ended.
_leaving: list[Client] = []
#: Stores whose close() was put off: they count for their client until the next store is closed.
_put_off: list[Store] = []


def _client_for(store: Store) -> tuple[Client, _ClientKey]:
    """Return a client for a new store. Raises RuntimeError with a sentence.

    If no manager answers, the client connects in the background, and misses until then: an engine may be up before its
    cache is.
    """
    key: _ClientKey | None = None
    client: Client | None = None
    advice = ""
    try:
        with _lock:
            from .sdk.calls import kv_pins  # noqa: F401 -- no call loads it, which might lack a descriptor

            settings = engine_flags.load(DEFAULT_COPY_THREADS)
            _log_to(settings)
            key = _ClientKey(os.getpid(), ClientOptions.from_settings(settings, lazy=True))
            _users.setdefault(key, weakref.WeakSet()).add(store)
            client = _clients.get(key)
            if client is None or client in _leaving or client._closed:  # its last close() was interrupted
                client = _clients[key] = Client(**asdict(key.options))
        advice = "; an engine names it by set_flag('cm_primary_node_ip', HOST) or SIMM_CLUSTER_MANAGER"
        client.begin()  # without the lock: it waits, and others close their stores meanwhile
    except BaseException as exc:
        if key is not None:
            _leave(store, key, client)
        if isinstance(exc, TransportError):  # where a client finds no thread, the manager's name is no remedy
            raise RuntimeError(f"SiMM: {exc}{advice}") from exc
        if isinstance(exc, (SimmError, *UNLOADABLE)):
            raise RuntimeError(f"SiMM: {exc}") from exc
        raise
    return client, key


def _leave(store: Store, key: _ClientKey, client: Client | None) -> bool:
    """Note that a store is closed. Close its client if that was the last one; return whether nothing is left of it.

    Twice is harmless. Clients whose close() was interrupted are closed, too, and stores whose close() was put off.
    """
    last: list[Client | None] = [client]
    with _lock:
        for gone, where in [*((each, each._key) for each in _put_off), (store, key)]:
            users = _users.get(where)
            if users is not None:
                users.discard(gone)
                if not users:
                    if (unused := _clients.get(where)) is not None:
                        last.append(unused)
                        _leaving.append(unused)
                        del _clients[where]
                    del _users[where]
            with contextlib.suppress(ValueError):  # it is not one of those
                _put_off.remove(gone)
    for each in _leaving[:]:
        if each in last or each._unfinished:
            each.close()
        if each._over:  # else another thread is at it, which may be interrupted
            with contextlib.suppress(ValueError):  # another thread has done the same
                _leaving.remove(each)
    return client not in _leaving


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
    _handler, trouble = logs.log_handler(settings, "engine")
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
    clients = [*_clients.values(), *_leaving]
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


class Store(Asks, KvGroups, Keeps, Prefetches, AsyncClosing):
    """A connection to the cluster that the flags and the environment name.

    A process may have any number, and any thread may call them, before and after a fork. While no manager answers,
    which is logged, gets miss and puts fail. Raises RuntimeError, with a sentence, if a setting is wrong or a manager
    refuses this client.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        #: Its client until close() has ended.
        self._held: Client | None = None
        self._client, self._key = _client_for(self)
        self._held = self._client
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
        """Close the store: operations return INVALID_ARGUMENT or False from now on. Twice is harmless.

        A second call ends what was interrupted. In a signal's handler see :meth:`simm.client.Client.close`.
        """
        self._client = None
        if self._held is not None:
            within = ("simm.kv._client_for", "simm.kv._leave")
            carry_out(self._close_now, within, put_off=lambda: _put_off.append(self))

    def _close_now(self) -> None:
        if _leave(self, self._key, self._held):
            self._held = None

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
        client = self._client
        try:
            digest, span = client._digest(key), block._piece  # type: ignore[union-attr]
            good = span.size <= VALUE_BYTES_MAX  # type: ignore[union-attr]
        except (UsageError, AttributeError):
            return self.mput([key], [block])[0]  # which says what is wrong
        if client is None or span is None or not good:
            return self.mput([key], [block])[0]
        try:
            status = client.put_digest(digest, span)
        except UsageError as exc:  # another thread has just closed it
            self._refuse(1, "%s", exc)
            return _INVALID
        return put_code(client, digest, status) if status else 0

    def get(self, key: str, block: BlockView) -> int:
        """Copy the value to the view's head; return its length in bytes, or a negative code, GET_FAILED for a miss.

        A view smaller than the value stays untouched: GET_FAILED. So does a view made with an MR whose size is not
        exactly the value's; the value is another model's then, and is dropped.
        """
        client = self._client
        try:
            digest, span = client._digest(key), block._piece  # type: ignore[union-attr]
            good = span.writable  # type: ignore[union-attr]
        except (UsageError, AttributeError):
            return self.mget([key], [block])[0]  # which says what is wrong
        if client is None or span is None or not good:
            return self.mget([key], [block])[0]
        try:
            got = client.get_digest(digest, span)
        except UsageError as exc:  # another thread has just closed it
            self._refuse(1, "%s", exc)
            return _INVALID
        return got if got > 0 else self._get_codes(client, [digest], [span], [got])[0]

    def put_gather(self, key: str, blocks: Sequence[BlockView]) -> int:
        """Store a value that consists of these views' bytes, in their order; return 0 or a negative code."""
        return self.mput_gather([key], [blocks])[0]

    def get_ranges(self, key: str, ranges: ViewRanges) -> int:
        """Copy ranges of the value, (offset, length, view) each, to their views' heads; return the value's length.

        All are parts of one value. A negative code otherwise: GET_FAILED for a miss, and for a range that ends beyond
        the value, when nothing is written. The length tells a page of another model; an MR does not.
        """
        return self.mget_ranges([key], [ranges])[0]

    def exists(self, key: str) -> bool:
        """Return whether the key is stored; False also if its server cannot be asked, which is counted and logged."""
        client = self._client
        try:
            digest = client._digest(key)  # type: ignore[union-attr]
        except (UsageError, AttributeError):
            return self.mexists([key])[0]  # which says what is wrong
        try:
            return client.exists_digest(digest)  # type: ignore[union-attr]
        except UsageError as exc:  # another thread has just closed it
            self._refuse(1, "%s", exc)
            return False

    def delete(self, key: str) -> int:
        """Drop the key; return 0, KEY_NOT_FOUND, or another negative code."""
        return self.mdelete([key])[0]

    # -- many keys --------------------------------------------------------------------------------

    def mput(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`put` for many keys; return a code for each. Of a duplicate key the later view is stored."""
        return self._many(_put_all, _put_codes, len(keys), self._checked(keys, blocks, all_sources, no_source))

    def mput_gather(self, keys: Sequence[str], blocks: Sequence[Sequence[BlockView]]) -> list[int]:
        """:meth:`put_gather` for many keys, each with a list of views; return a code for each."""
        pieces = PartedViews.to_put(blocks)
        return self._many(_put_all, _put_codes, len(keys), self._checked(keys, pieces, all_sources, problem_of))

    def mget(self, keys: Sequence[str], blocks: Sequence[BlockView]) -> list[int]:
        """:meth:`get` for many keys; return a length or code for each."""
        checked = self._checked(keys, blocks, all_sinks, no_sink)
        return self._many(_get_all, self._get_codes, len(keys), checked)

    def mget_ranges(self, keys: Sequence[str], ranges: Sequence[ViewRanges]) -> list[int]:
        """:meth:`get_ranges` for many keys, each with a list of ranges; return a length or code for each.

        No two views of the call may share memory: of two keys whose views do, the later one is refused.
        """
        checked = self._checked(keys, PartedViews.to_get(ranges, wide=True), no_wide, problem_of)
        return self._many(_get_all, self._ranges_codes, len(keys), checked)

    prepare_ranges = staticmethod(PartedViews.prepared)

    def mpin(self, keys: Sequence[str]) -> PinnedKeys:
        """Keep these values as they are, to read ranges of them as often as wanted, and to release (docs/pins.md).

        Its ``lengths`` has a length or code for each key: GET_FAILED for a miss.
        """
        from .sdk.calls.kv_pins import PinnedKeys  # loads with the first store

        client, digests, _, positions = self._checked(keys)
        if client is None:
            return PinnedKeys(keys, None, None, self._refuse)
        try:
            pins = client.pin(keys if positions is None else [keys[position] for position in positions])
        except UsageError as exc:  # another thread has just closed it
            self._refuse(len(digests), "%s", exc)
            return PinnedKeys(keys, None, None, self._refuse)
        return PinnedKeys(keys, pins, positions, self._refuse)

    def mexists(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many keys."""
        return self._many(_ask_all, None, len(keys), self._checked(keys), False)

    def mdelete(self, keys: Sequence[str]) -> list[int]:
        """:meth:`delete` for many keys; return a code for each."""
        checked = self._checked(keys)
        return self._many(lambda client, each, _: client.delete_digests(each), delete_codes, len(keys), checked)

    # -- asyncio ------------------------------------------------------------------------------------

    put_async = awaitable(put)
    get_async = awaitable(get)
    exists_async = awaitable(exists)
    delete_async = awaitable(delete)
    mput_async = awaitable(mput)
    mget_async = awaitable(mget)
    mexists_async = awaitable(mexists)
    mdelete_async = awaitable(mdelete)
    mpin_async = awaitable(mpin)
    put_gather_async = awaitable(put_gather)
    get_ranges_async = awaitable(get_ranges)
    mput_gather_async = awaitable(mput_gather)
    mget_ranges_async = awaitable(mget_ranges)

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Run a call of this store in a thread. A cancellation is delivered when its views are no longer in use."""
        client = self._client
        if client is None:
            return call()  # refuses at once
        try:
            return await client.in_thread(call)
        except UsageError:
            return call()  # the client was closed meanwhile: the same

    # -- shared pieces ------------------------------------------------------------------------------

    def _checked(
        self, keys: Sequence[str], blocks: Sequence[BlockView | PartedViews] | None = None,
        all_good: Callable[[Any], bool] = bool, trouble: Callable[[Any], str] = str,
    ) -> _Checked:  # fmt: skip
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
            digests, spans = [], Mixed()
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
                    spans.append(block._piece)
                digests.append(named)
                positions.append(position)
        if not digests:
            return None, digests, spans, None
        return client, digests, spans, None if len(digests) == len(keys) else positions

    def _many(
        self, do: Callable[[Client, list[bytes], list[Any]], list[Any]], to_codes: _ToCodes | None, count: int,
        checked: _Checked, refused: int = _INVALID,
    ) -> list[Any]:  # fmt: skip
        """Do with the client what :meth:`_checked` has checked, of ``count`` keys; return a code for each.

        ``refused`` is that of the others, and of all if another thread has just closed the client.
        """
        client, digests, spans, positions = checked
        if client is None:
            return [refused] * count
        try:
            results = do(client, digests, spans)
        except UsageError as exc:
            self._refuse(len(digests), "%s", exc)
            return [refused] * count
        if to_codes is not None:
            results = to_codes(client, digests, spans, results)
        return results if positions is None else spread(results, positions, [refused] * count)

    def _get_codes(
        self, client: Client, digests: Sequence[bytes], spans: Sequence[memoryview | Span], results: list[Any]
    ) -> list[int]:
        """Replace what is no length by a code, and drop values of another size than their views."""
        if min(results) > 0:
            return results
        unfit: dict[bytes, int] = {}
        for at, got in enumerate(results):
            if got > 0:
                continue
            results[at] = _GET_FAILED
            if got == NoValue.UNAVAILABLE:
                results[at] = outage(client, digests[at])
            elif got == NoValue.TOO_SMALL:
                complain("get: a value does not fit its view of %d bytes", len(spans[at]))
            elif type(got) is WrongSize:
                unfit[digests[at]] = got.length
                complain(_UNFIT_TEXT, got.length, len(spans[at]))
        if unfit:
            self._drop(client, unfit)
        return results

    def _ranges_codes(self, client: Client, digests: list[bytes], _: list[Any], results: list[Any]) -> list[int]:
        for at, got in enumerate(results):
            if got <= 0:
                results[at] = outage(client, digests[at]) if got == NoValue.UNAVAILABLE else _GET_FAILED
                if type(got) is WrongSize:
                    complain("get_ranges: a range ends beyond its value, which has %d bytes", got.length)
                elif type(got) is Mistake:
                    self._refuse(1, "%s", got.text)
                    results[at] = _INVALID
        return results

    def _drop(self, client: Client, unfit: dict[bytes, int]) -> None:
        """Drop values that do not fit their keys' views. Otherwise the keys would exist, and no engine would put them.

        The request names their sizes, so that a right value that was put in between stays, unless both are in parts.
        The next get refuses a value that cannot be dropped now.
        """
        count = len(unfit)
        self.unfit += count
        client._counters["misses"] += count
        try:
            client.delete_sized(list(unfit), list(unfit.values()))
        except SimmError as exc:
            log.info("a value of another size could not be dropped: %s", exc)

    def _refuse(self, count: int, problem: str, *arguments: Any) -> None:
        if count:
            self.rejected += count
            complain("invalid argument: " + problem, *arguments)


# --- batches: what the client does, and the codes for its results --------------------------------------


def _put_all(client: Client, digests: list[bytes], spans: list[Any]) -> list[int]:
    return (client.put_digests if type(spans) is list else client.put_mixed)(digests, spans)


def _put_codes(client: Client, digests: list[bytes], _: list[Any], statuses: list[int]) -> list[int]:
    if any(statuses):
        return [put_code(client, digest, status) for digest, status in zip(digests, statuses)]
    return statuses


def _get_all(client: Client, digests: list[bytes], spans: list[Any]) -> list[Any]:
    return (client.get_digests if type(spans) is list else client.get_mixed)(digests, spans)


def _ask_all(client: Client, digests: list[bytes], _: list[Any]) -> list[bool]:
    return client.exists_digests(digests)
