"""From settings to connected clients, for all commands."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from ..config.client_options import ClientOptions
from ..config.local_token import find, find_sockets
from ..config.logs import set_up_logging
from ..config.parsers import Address
from ..config.settings import Settings, load_command
from ..config.startup import live_tokens, read_tokens
from ..config.tokens import Token, TokenRole, token_for
from ..errors import TransportError, UsageError
from ..net.channel import Refused
from ..sdk.manager_link import ManagerClient
from .ctl.unit_folders import with_sockets

if TYPE_CHECKING:
    from ..client import Client


#: Origins of a runtime folder that nobody has chosen.
_NOT_NAMED: Final = ("default", "environment XDG_RUNTIME_DIR")
#: Origin of one that ``simm local`` has published with its manager's address.
PUBLISHED: Final = "simm local"


def command_settings(command: str, arguments: argparse.Namespace, *, serves: bool = False) -> Settings:
    """Return a command's settings after setting up logging, which shows errors only by default.

    ``serves``: it runs until it is ended, and so logs what any other server does.
    """
    settings = load_command(command, arguments)
    if settings.origin("log_level") == "default" and not serves:
        settings = replace(settings, log_level="error")
    set_up_logging(settings, command)
    return settings


def runtime_dir_named(settings: Settings) -> bool:
    """Return True if somebody has chosen the runtime folder: by a flag, a variable SIMM_ or a file of settings."""
    return settings.origin("runtime_dir") not in _NOT_NAMED


def on_host(settings: Settings) -> Settings:
    """Return the settings with the runtime folder of the data server at hand.

    It is that of ``simm local``, if that runs. Else, where nobody has named a folder and this user's own has no
    sockets, it is the one that a unit has (``ctl/unit_folders.py``). Of several the error names all. A unit's may be
    of another cluster than the manager (``ctl/whose.py``).
    """
    if (own := find_sockets(settings.runtime_dir, settings.manager)) is not None:
        return replace(settings, runtime_dir=own, origins={**settings.origins, "runtime_dir": PUBLISHED})
    found = None
    if not runtime_dir_named(settings) and not any(settings.runtime_dir.glob("*.sock")):
        units = with_sockets(settings.server_uid)
        found = units[0] if len(units) == 1 else None
    return settings if found is None else replace(settings, runtime_dir=found)


def token_of(settings: Settings) -> str:
    """Return the token to prove: that of the highest role, or an empty string without one. Raises ConfigError."""
    own = token_for(read_tokens(settings.token_file), *reversed(TokenRole))
    return own.secret if own is not None else find(settings.runtime_dir, settings.manager)


def page_tokens(address: Address, flag: str, settings: Settings) -> Sequence[Token]:
    """Return the tokens that a command's page asks for, none on loopback. Raises UsageError if there are none.

    They follow the file (``net/token_watch.py``), which needs no server's token.
    """
    tokens = () if address.loopback else live_tokens(settings.token_file, read_tokens)
    if not address.loopback and not tokens:
        raise UsageError(f"{flag} {address} is not loopback: give --token-file, or an address of 127.0.0.1")
    return tokens


def client_arguments(settings: Settings) -> dict[str, Any]:
    """Return the keyword arguments of :class:`~simm.client.Client`. Raises ConfigError."""
    return asdict(ClientOptions.from_settings(settings))


def manager_client(settings: Settings) -> ManagerClient:
    """Return a connected link to the manager. Raises TransportError, ConfigError.

    An engine's client waits some seconds for a manager. A command reports its absence at once.
    """
    options = ClientOptions.from_settings(settings, token=token_of(settings))
    link = ManagerClient(
        options.managers, deadline_s=options.deadline_s, token=options.token, tls=options.tls,
        trusted=options.server_uids,
    )  # fmt: skip
    try:
        link.connect()
    except Refused:
        raise  # the manager answers and gives the reason
    except TransportError as exc:
        raise TransportError(f"{exc}, or name it with --manager or SIMM_MANAGER") from exc
    return link


@contextlib.contextmanager
def reached_client(settings: Settings) -> Iterator[Client]:
    """Yield a client for a command. Raises TransportError at once without a manager."""
    from ..client import Client

    manager_client(settings).close()
    with Client(**client_arguments(settings)) as client:
        yield client


def require_reached(client: Client) -> None:
    """Raise TransportError if a negative result came from a server that cannot be reached."""
    workers = client.stats()["workers"]
    if not workers:
        raise TransportError("no data server has joined this cluster: start one with `simm dataserver`")
    for each in workers:
        if each["path"] == "down" and each["reason"] != "not connected yet":
            raise TransportError(
                f"data server {each['node']}/{each['worker']} cannot be reached: {each['reason']}; see `simm status`"
            )
