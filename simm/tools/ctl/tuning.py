"""``simm ctl settings``: what can be changed while servers run, by admin sockets, or at the manager by its token."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...cluster.nodes import GONE
from ...config.settings import Settings
from ...errors import SimmError, TransportError, UsageError, printable
from ...host.users import NOT_TRUSTED, trusts
from ...ipc.segments import ADMIN_SUFFIX
from ...net.channel import Channel, Refused
from ...net.peer_uid import credentials
from ...wire.admin_messages import GROW, AskNodeSettings, AskSettings
from ...wire.messages import StatsReply, Status
from ..connect import manager_client
from .unit_folders import elsewhere
from .whose import NOT_KNOWN, Meant
from .workers import ANSWER_S, not_to_be_seen

#: In place of a data server's name: all of them.
EVERY: Final = "*"
#: Settings of data servers, and why others have not told theirs.
Found = tuple[list[dict[str, Any]], list[str]]


def settings_rows(settings: Settings, words: Sequence[str], server: str, *, manager: bool, node: str = "") -> Found:
    """Return the settings of the data servers of this host, after setting one of them, and a line for each silent one.

    Or those of the manager, or of the data server ``node``, wherever it is, by an admin's token; ``*``: of all of them.

    ``words``: list, get NAME, or set NAME VALUE. Raises UsageError, TransportError, SimmError.
    """
    action, *rest = words or ["list"]
    if GROW in rest:
        raise UsageError(f"{GROW} is no setting: `simm ctl grow --memory SIZE`")
    if (action, len(rest)) not in (("list", 0), ("get", 1), ("set", 2)):
        raise UsageError("settings takes list, get NAME, or set NAME VALUE")
    ask = AskSettings(*rest) if action == "set" else AskSettings("", "")
    failed: list[str] = []
    if manager:
        found = _from_afar(settings, ask, "(manager)")
    elif node == EVERY:
        found, failed = _everywhere(settings, ask)
    elif node:
        found = _from_afar(settings, AskNodeSettings(node, *ask), node)
    else:
        found, failed = _servers(settings, server, ask)
    if action == "list":
        return found, failed
    rows = [row for row in found if row["name"] == rest[0]]
    if not rows:
        names = ", ".join(sorted({row["name"] for row in found}))
        raise UsageError(f"{rest[0]} cannot be changed at run time; {names} can")
    return rows, failed


def ask_from_afar(settings: Settings, ask: AskSettings | AskNodeSettings) -> bytes:
    """Return what the manager answers, or a data server by it. Raises UsageError if it refuses, TransportError."""
    with manager_client(settings) as link:
        try:
            answer = link.call(ask, StatsReply)
        except Refused as exc:
            if exc.status in (Status.BAD_REQUEST, Status.UNKNOWN_NODE):
                raise UsageError(str(exc)) from None
            raise
    return answer.json


def _from_afar(settings: Settings, ask: AskSettings | AskNodeSettings, server: str) -> list[dict[str, Any]]:
    return _rows(ask_from_afar(settings, ask), server)


def _everywhere(settings: Settings, ask: AskSettings) -> Found:
    """Ask each data server that the manager knows, without those that are gone, which it says on stderr."""
    with manager_client(settings) as link:
        known = sorted((str(node["name"]), str(node["state"])) for node in link.status()["nodes"])
        away = [f"{name} ({state})" for name, state in known if state in GONE]
        if len(away) == len(known):
            raise UsageError("the manager knows no data server" + (f" but {', '.join(away)}" if away else ""))
        if away:
            print(printable(f"left out: {', '.join(away)}"), file=sys.stderr, flush=True)
        return _ask_each(
            [name for name, state in known if state not in GONE],
            lambda node: link.call(AskNodeSettings(node, *ask), StatsReply).json, sets=bool(ask.name), one_link=True,
        )  # fmt: skip


def _ask_each(
    servers: Sequence[str], ask: Callable[[str], bytes], left: Sequence[str] = (), *, sets: bool, one_link: bool = False
) -> Found:
    """Ask data servers one after another. What one refuses, the others take.

    ``left``: a line for each one that may not be asked. ``one_link``: what ends it for one ends it for all after that.

    Raises SimmError if some have taken a setting and others have not; UsageError if none has answered and one refuses,
    TransportError if none of them can be reached.
    """
    found: list[dict[str, Any]] = []
    failed = list(left)
    error: type[SimmError] = TransportError
    for at, server in enumerate(servers):
        try:
            found += _rows(ask(server), server)
        except Refused as exc:
            error = UsageError
            failed.append(f"{server}: {exc}")
        except TransportError as exc:
            failed.append(f"{server}: {exc}")
            if one_link:
                failed += [f"{each}: not asked" for each in servers[at + 1 :]]
                break
    if failed and not found:
        raise error("; ".join(failed))
    if failed and sets:
        taken = ", ".join(dict.fromkeys(row["server"] for row in found))
        raise SimmError(f"not all servers have taken it: {'; '.join(failed)}; taken by {taken}")
    return found, failed


def _rows(raw: bytes, server: str) -> list[dict[str, Any]]:
    """Return a server's settings. Raises TransportError for what cannot be one's answer."""
    try:
        return [
            {"server": server, **{key: str(row[key]) for key in ("name", "value", "started_with", "about")}}
            for row in json.loads(raw)
        ]
    except (ValueError, TypeError, KeyError) as exc:
        raise TransportError(f"{server} has sent what are no settings") from exc


def admin_sockets(settings: Settings, server: str) -> dict[str, str]:
    """Return the paths of the admin sockets of this host's data servers, by name; ``server``: only of this one."""
    paths = sorted(glob.glob(os.path.join(glob.escape(str(settings.runtime_dir)), "*" + ADMIN_SUFFIX)))
    found = {os.path.basename(path).removesuffix(ADMIN_SUFFIX): path for path in paths}
    return {name: path for name, path in found.items() if server in ("", name)}


def sockets_to_change(settings: Settings, server: str) -> tuple[dict[str, str], list[str]]:
    """Return those of :func:`admin_sockets` whose servers may be changed (``whose.py``), and a line for each left out.

    Raises UsageError if none may be changed, or if that cannot be told.
    """
    found = admin_sockets(settings, server)
    if not found:
        return {}, []
    may, unknown = Meant(settings).servers_to_change(found)
    return {name: path for name, path in found.items() if name in may}, [f"{name}: {NOT_KNOWN}" for name in unknown]


def ask_admin(settings: Settings, path: str, ask: AskSettings) -> bytes:
    """Return what a data server of this host answers. Raises Refused, TransportError."""
    with contextlib.closing(Channel.unix(path, ANSWER_S)) as channel:
        uid = credentials(channel.sock)[1]
        if not trusts(uid, settings.server_uid):
            raise TransportError(f"it is of uid {uid}, {NOT_TRUSTED}")
        answer = channel.call(ask)
    if not isinstance(answer, StatsReply):
        raise TransportError(f"it answers with {type(answer).__name__}: another version of SiMM?")
    return answer.json


def no_socket(settings: Settings, server: str) -> TransportError:
    """Return the error of a folder without an admin socket."""
    of = f" of the data server {server!r}" if server else ""
    if server and (others := admin_sockets(settings, "")):
        names = ", ".join(sorted(others))
        return TransportError(f"there is no data server {server!r} in {settings.runtime_dir}, but {names}")
    why = not_to_be_seen(settings.runtime_dir) or (
        f"{settings.runtime_dir} has no admin socket{of}: name the folder by --runtime-dir"
    )
    return TransportError(why + elsewhere(settings.runtime_dir, settings.server_uid))


def _servers(settings: Settings, server: str, ask: AskSettings) -> Found:
    sockets, left = sockets_to_change(settings, server) if ask.name else (admin_sockets(settings, server), [])
    if not sockets and not left:
        raise no_socket(settings, server)
    return _ask_each(list(sockets), lambda name: ask_admin(settings, sockets[name], ask), left, sets=bool(ask.name))
