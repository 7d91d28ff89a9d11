"""Upstream's ``simmctl`` commands by their names, said in those of ``simm ctl``.

    gflag list | get NAME | set NAME VALUE     settings list | get NAME | set NAME VALUE
    node set SERVER DEAD | RUNNING             node drain SERVER --no-wait | node resume SERVER
    kv exist | get | del KEY                   as simm exists, get and delete

Upstream names a data server by its address, and its states also by 0 and 1. Both are understood here. A server that is
set to DEAD there loses its shards to others; here it gives them away with their values, and goes on answering.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from ...config.logs import CLOSED
from ...config.settings import Settings
from ...errors import UsageError
from ..connect import reached_client, require_reached
from ..console import EXIT_NO, EXIT_OK, require_shown
from .cluster import status

_STATES: Final = {"0": "drain", "dead": "drain", "1": "resume", "running": "resume"}
_KV: Final = ("exist", "get", "del")


def translate(settings: Settings, arguments: argparse.Namespace) -> None:
    """Put the words of ``simm ctl`` in place of upstream's, if these are upstream's. Raises UsageError."""
    if arguments.what == "gflag":
        arguments.what = "settings"
    if arguments.what != "node" or arguments.words[:1] != ["set"]:
        return
    if len(arguments.words) != 3 or arguments.words[2].lower() not in _STATES:
        raise UsageError("node set takes a data server, and DEAD (0) or RUNNING (1)")
    _, server, state = arguments.words
    arguments.words = [_STATES[state.lower()], _name_of(settings, server) if ":" in server else server]
    arguments.no_wait = True


def _name_of(settings: Settings, address: str) -> str:
    """Return the name of the data server at an address. Raises UsageError, TransportError."""
    for node in status(settings)["nodes"]:
        if any(worker["address"] == address for worker in node["workers"]):
            return str(node["name"])
    raise UsageError(f"no data server is at {address}: see `simm ctl node list`")


def values(settings: Settings, words: Sequence[str]) -> int:
    """Carry out ``kv``, and return the exit code: 1 if the key is not stored. Raises UsageError, TransportError."""
    if len(words) != 2 or words[0] not in _KV:
        raise UsageError("kv takes exist KEY, get KEY or del KEY")
    action, key = words
    if action == "get" and "stdout" in CLOSED:
        raise UsageError("stdout is closed: `simm get KEY FILE` writes into a file")
    with reached_client(settings) as client:
        if action == "get":
            value = client.get(key)
            done = value is not None
            if value is not None:
                require_shown(value, "`simm get KEY FILE` writes into a file")
                sys.stdout.flush()
                sys.stdout.buffer.write(value)
        else:
            done = client.exists(key) if action == "exist" else client.delete(key)
        if not done:
            require_reached(client)
    if action != "get" or not done:
        said = "stored" if action != "del" else "deleted"
        print(f"{key}: {said if done else 'not stored'}", file=sys.stderr if action == "get" else sys.stdout)
    return EXIT_OK if done else EXIT_NO
