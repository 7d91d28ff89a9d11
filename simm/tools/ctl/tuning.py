"""``simm ctl settings``: what can be changed while servers run, by admin sockets, or at the manager by its token."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Sequence
from typing import Any, Final

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


def settings_rows(
    settings: Settings, words: Sequence[str], server: str, *, manager: bool, node: str = ""
) -> list[dict[str, Any]]:
    """Return the settings of the data servers of this host, after setting one of them.

    Or those of the manager, or of the data server ``node``, wherever it is, by an admin's token; ``*``: of all of them.

    ``words``: list, get NAME, or set NAME VALUE. Raises UsageError, TransportError, SimmError.
    """
    action, *rest = words or ["list"]
    if GROW in rest:
        raise UsageError(f"{GROW} is no setting: `simm ctl grow --memory SIZE`")
    if (action, len(rest)) not in (("list", 0), ("get", 1), ("set", 2)):
        raise UsageError("settings takes list, get NAME, or set NAME VALUE")
    ask = AskSettings(*rest) if action == "set" else AskSettings("", "")
    if manager:
        found = _from_afar(settings, ask, "(manager)")
    elif node == EVERY:
        found = _everywhere(settings, ask)
    elif node:
        found = _from_afar(settings, AskNodeSettings(node, *ask), node)
    else:
        found = _servers(settings, server, ask)
    if action == "list":
        return found
    rows = [row for row in found if row["name"] == rest[0]]
    if not rows:
        names = ", ".join(sorted({row["name"] for row in found}))
        raise UsageError(f"{rest[0]} cannot be changed at run time; {names} can")
    return rows


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


def _everywhere(settings: Settings, ask: AskSettings) -> list[dict[str, Any]]:
    """Ask each data server that the manager knows. What one refuses, the others have taken. Raises SimmError."""
    found: list[dict[str, Any]] = []
    failed = []
    with manager_client(settings) as link:
        for node in sorted(str(each["name"]) for each in link.status()["nodes"]):
            try:
                answer = link.call(AskNodeSettings(node, *ask), StatsReply)
                found += _rows(answer.json, node)
            except Refused as exc:
                failed.append(f"{printable(node)}: {exc}")
    if failed:
        done = f"{len({row['server'] for row in found})} have answered" if found else "none has answered"
        raise (SimmError if found else UsageError)(f"not all data servers: {done}; {'; '.join(failed)}")
    if not found:
        raise UsageError("the manager knows no data server")
    return found


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


def _servers(settings: Settings, server: str, ask: AskSettings) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    sockets, failed = sockets_to_change(settings, server) if ask.name else (admin_sockets(settings, server), [])
    for name, path in sockets.items():
        try:
            found += _rows(ask_admin(settings, path, ask), name)
        except Refused as exc:
            raise UsageError(f"{name}: {exc}") from None
        except TransportError as exc:
            failed.append(f"{name}: {exc}")
    if failed and found and ask.name:
        raise SimmError(f"not all servers have taken it: {'; '.join(failed)}")
    if not found:
        raise TransportError("; ".join(failed)) if failed else no_socket(settings, server)
    return found
