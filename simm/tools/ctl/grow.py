"""``simm ctl grow``: add memory to a data server that serves, by its admin socket or by the manager."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from ...config.settings import Settings
from ...errors import SimmError, TransportError, UsageError, printable
from ...net.channel import Refused
from ...wire.admin_messages import GROW, AskNodeSettings, AskSettings
from ..nodes import Line
from .tuning import EVERY, ask_admin, ask_from_afar, no_socket, sockets_to_change

#: Between two looks, seconds; and a server that is silent for so long is given up.
POLL_S: Final = 0.2
SILENCE_S: Final = 30.0
_ENDED: Final = ("none", "done", "failed")
#: What a server says of its growing, and of which type it is.
_FIELDS: Final = {
    "server": str, "state": str, "text": str, "worker": int, "numa_node": int, "bytes": int, "done_bytes": int,
    "workers": int, "memory_bytes": int,
}  # fmt: skip


class Target:
    """The data server that is to grow: one of this host, ``server`` if there are several, or ``node`` anywhere.

    Raises UsageError, TransportError; SimmError if it is not known of another one here whether it is meant.
    """

    def __init__(self, settings: Settings, server: str, node: str) -> None:
        self._settings = settings
        self._node = node
        self._path = ""
        if node == EVERY:
            raise UsageError("--of '*': name one data server, as each may have another amount of memory")
        if node:
            self.name = node
            return
        found, left = sockets_to_change(settings, server)
        if not found:
            raise no_socket(settings, server)
        if left:  # one that may be changed is not the one that is meant, just because the others are silent
            raise SimmError(f"nothing has grown: {'; '.join(left)}; name one by --server: {', '.join(found)}")
        if len(found) > 1:
            raise UsageError(f"name one of this host's data servers by --server: {', '.join(found)}")
        ((self.name, self._path),) = found.items()

    def begin(self, size: int, numa: str) -> dict[str, Any]:
        """Ask for so many bytes more, and return what the server says. Raises UsageError if it refuses."""
        return self._ask(f"{size} {numa}".strip())

    def look(self) -> dict[str, Any]:
        """Return how far it is. Raises TransportError."""
        return self._ask("")

    def _ask(self, value: str) -> dict[str, Any]:
        if self._node:
            return _checked(ask_from_afar(self._settings, AskNodeSettings(self._node, GROW, value)), self.name)
        try:
            return _checked(ask_admin(self._settings, self._path, AskSettings(GROW, value)), self.name)
        except Refused as exc:
            raise UsageError(f"{self.name}: {exc}") from None


def _checked(raw: bytes, server: str) -> dict[str, Any]:
    """Return a server's answer. Raises TransportError for what cannot be one."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in _FIELDS.items()):
        raise TransportError(f"{server} has sent what is no answer to this: another version of SiMM?")
    return {name: found[name] for name in _FIELDS}


def text_of(found: dict[str, Any]) -> str:
    """Return an answer as a line."""
    return printable(f"{found['server']}: {found['text']}")


def follow(
    target: Target, found: dict[str, Any], out: TextIO, timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:  # fmt: skip
    """Show how far a server is until it has grown, and return its last answer.

    Raises SimmError if it fails, or at the timeout; TransportError if the server is gone.
    """
    shown = Line(out, clock)
    started = last_seen = clock()
    try:
        state = ""
        while found["state"] not in _ENDED:
            shown.show(text_of(found), urgent=found["state"] != state)
            state = found["state"]
            if timeout_s is not None and clock() - started >= timeout_s:
                raise SimmError(f"{text_of(found)}, after {timeout_s:g} s; it goes on: `simm ctl node list` shows it")
            sleep(POLL_S)
            try:
                found = target.look()
            except TransportError:
                if clock() - last_seen > SILENCE_S:
                    raise
                continue
            last_seen = clock()
    finally:
        shown.end("")
    if found["state"] != "done":
        why = text_of(found) if found["state"] == "failed" else f"{target.name}: it was started anew meanwhile"
        raise SimmError(why)
    return found
