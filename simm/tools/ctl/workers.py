"""What the workers of this host say of themselves, asked by their UNIX sockets, and what lies in their arenas.

Sockets are found in the runtime folder. The arenas are read as clients do, in place: that costs their workers nothing.
A worker that does not answer is a row with the reason. So is one of a user that this one does not trust: anybody can
make a folder in /tmp that has this user's number in its name, and an arena in it that ends who maps it.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import select
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...arena.reader import ArenaReader
from ...errors import SegmentError, SimmError, TransportError, UsageError
from ...host.users import NOT_TRUSTED, trusts
from ...ipc.arena_files import passed_data
from ...ipc.arena_lister import Lister
from ...net.channel import Channel
from ...net.peer_uid import credentials
from ...wire import messages as M
from ...wire.hello import client_hello
from .unit_folders import elsewhere

#: A worker that takes longer is shown as silent, seconds. All are asked at once, so it is the bound for all of them.
ANSWER_S: Final = 3.0
#: Slots that are read at a time: 16 MiB.
_PAGE: Final = 1 << 18


@dataclass(frozen=True)
class Asked:
    """A worker: its data server's name, its number, its answer, or why there is none. ``uid``: who answered."""

    server: str
    worker: int
    path: str
    stats: dict[str, Any]
    why: str = ""
    uid: int = -1

    @property
    def name(self) -> str:
        return f"{self.server}/{self.worker}"

    @functools.cached_property
    def reader(self) -> ArenaReader | None:
        """A reader of the worker's arena, opened at the first use; None if it cannot be read.

        Data that has no name (with a group, or in reserved huge pages) is passed by the worker, to a session's holder.
        """
        if not self.stats:
            return None
        name, trusted = str(self.stats.get("segment")), (self.uid,)
        with contextlib.suppress(OSError, SegmentError):
            return ArenaReader(name, trusted=trusted)
        with contextlib.suppress(OSError, SimmError), contextlib.closing(Channel.unix(self.path, ANSWER_S)) as channel:
            channel.call(client_hello(M.Role.CLIENT, namespace="default", pid=os.getpid()))
            with passed_data(channel, self.path) as data_fd:
                return ArenaReader(name, data_fd=data_fd, trusted=trusted)
        return None


def ask_all(runtime_dir: Path, server: str = "", trusted: Container[int] = ()) -> list[Asked]:
    """Ask all workers, or those of one data server, for ``ANSWER_S`` in all. Raises UsageError if there is no socket.

    ``trusted``: users besides this process's own and root whose workers are believed.
    """
    places = []
    others = set()
    for path in sorted(glob.glob(os.path.join(glob.escape(str(runtime_dir)), "*.sock"))):
        name, _, number = os.path.basename(path).removesuffix(".sock").rpartition(".")
        if name and number.isdigit() and server in ("", name):
            places.append((name, int(number), path))
        elif name and number.isdigit():
            others.add(name)
    if not places and others:
        raise UsageError(f"there is no data server {server!r} in {runtime_dir}, but {', '.join(sorted(others))}")
    if not places:
        of = f" of the data server {server!r}" if server else ""
        why = not_to_be_seen(runtime_dir) or (
            f"{runtime_dir} has no socket of a worker{of}: name the folder with --runtime-dir, and be its user or root"
        )
        raise UsageError(why + elsewhere(runtime_dir, trusted))
    return _ask(places, trusted)


def not_to_be_seen(runtime_dir: Path) -> str:
    """Return why this user sees no socket in a folder, whatever is there; empty if it sees what there is."""
    try:
        os.listdir(runtime_dir)
    except PermissionError:
        return f"this user may not look into {runtime_dir}, the folder of a data server's sockets: be its user or root"
    except FileNotFoundError:
        return f"there is no {runtime_dir}, the folder of a data server: start one, or name it with --runtime-dir"
    except OSError as exc:
        return f"{runtime_dir}: {exc.strerror}: name the folder of a data server's sockets with --runtime-dir"
    return ""


#: A worker's data server, its number, and the path of its socket.
_Place = tuple[str, int, str]


def _ask(places: Sequence[_Place], trusted: Container[int]) -> list[Asked]:
    """Ask workers all at once, so that those that hang are waited for together, and return what each says."""
    found: dict[_Place, Asked] = {}
    waiting: dict[int, tuple[_Place, Channel, int, int]] = {}
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        for place in places:
            try:
                channel = stack.enter_context(contextlib.closing(Channel.unix(place[2], ANSWER_S)))
                uid = credentials(channel.sock)[1]
                if not trusts(uid, trusted):
                    raise TransportError(f"it is of uid {uid}, {NOT_TRUSTED}")
                waiting[channel.fileno()] = place, channel, channel.submit(M.Stats(1)), uid
            except TransportError as exc:
                found[place] = Asked(*place, {}, str(exc))
            else:
                poller.register(channel, select.POLLIN)
        until = time.monotonic() + ANSWER_S
        while waiting:
            ready = [fd for fd, _ in poller.poll(max(0.0, until - time.monotonic()) * 1e3)]
            for fd in ready or list(waiting):  # nobody in time: each says so
                poller.unregister(fd)
                place, channel, number, uid = waiting.pop(fd)
                found[place] = _answer(place, channel, number, uid)
    return [found[place] for place in places]


def _answer(place: _Place, channel: Channel, number: int, uid: int) -> Asked:
    try:
        stats: dict[str, Any] = json.loads(channel.result(channel.wait(number)).json)
    except (TransportError, AttributeError, ValueError) as exc:
        return Asked(*place, {}, str(exc))
    except RecursionError:
        return Asked(*place, {}, "its answer is nested too deeply")
    if not isinstance(stats, dict) or "clients" not in stats:
        return Asked(*place, {}, "it is an older version of SiMM, which does not tell this")
    return Asked(*place, stats, uid=uid)


def require_one(asked: Sequence[Asked]) -> None:
    """Raise TransportError if no worker has answered."""
    if not any(each.stats for each in asked):
        raise TransportError(f"{asked[0].name} does not answer: {asked[0].why}")


class Stored(NamedTuple):
    """Entries and bytes of values, by namespace and by size of chunk."""

    namespaces: dict[str, tuple[int, int]]
    chunks: dict[int, tuple[int, int]]


def stored_in(asked: Asked) -> Stored | None:
    """Return what an arena holds now; None if it cannot be read. O(slots), by numpy."""
    reader = asked.reader
    if reader is None:
        return None
    lister = Lister(reader)
    namespaces: dict[int, tuple[int, int]] = {}
    chunks: dict[int, tuple[int, int]] = {}
    for start in range(0, reader.geometry.slots, _PAGE):
        rows = lister.at_rest(start, min(start + _PAGE, reader.geometry.slots))
        rows = rows[rows["offset"] != 0]
        for found, column in ((namespaces, "namespace"), (chunks, "chunk")):
            keys, places = np.unique(rows[column], return_inverse=True)
            counts, sizes = np.bincount(places, minlength=len(keys)), np.bincount(places, rows["length"], len(keys))
            for key, count, size in zip(keys.tolist(), counts.tolist(), sizes.tolist()):
                before = found.get(key, (0, 0))
                found[key] = before[0] + count, before[1] + int(size)
    names = lister.names(list(namespaces))
    return Stored({names.get(number, f"#{number}"): counts for number, counts in namespaces.items()}, chunks)
