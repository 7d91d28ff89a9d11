"""The flags of ``simm.kv``: what ``set_flag`` takes, and the settings that they give a new store.

A flag that names the manager is never ignored. If ``set_flag`` refuses its value, each later ``Store()`` fails with the
reason, until the flag is set again or unset: an engine that does not look at the result of ``set_flag`` would otherwise
use the cluster that the default names.

An address is ``HOST``, ``HOST:PORT``, an IPv6 address with or without brackets, or several of them separated by commas.
The managers that the settings list are kept if the flag names some of them: the flag of an engine can often name one
address only, and the others are there for the time when it does not lead.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..constants import DEFAULT_MANAGER_PORT
from ..errors import ConfigError, SimmError
from . import parsers, settings
from .parsers import Address

log = logging.getLogger("simm.kv")


def _managers(text: str) -> tuple[Address, ...]:
    """Parse addresses; port 0 stands for none given. An empty text is no address."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            ipaddress.IPv6Address(part)
            part = f"[{part}]"
        except ValueError:
            pass
        address = parsers.parse_address(part, 0)
        if not address.port and part.endswith(":0"):
            raise ConfigError(f"{part!r} names port 0, at which no manager can be reached")
        found.append(address)
    if text.strip() and not found:
        raise ConfigError(f"{text!r} names no host")
    return tuple(dict.fromkeys(found))


def _port(text: str) -> int:
    """Parse a port; 0 stands for none given."""
    return parsers.integer(1, 65_535)(text) if text.strip() else 0


def _yes_no(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f"):
        raise ConfigError(f"{text!r} is neither true nor false")
    return word in ("true", "1", "yes", "y", "t")


def _log_file(text: str) -> Path | None:
    """Parse a path; None stands for none given."""
    path: Path | None = parsers.optional(parsers.path_of)(text.strip())
    return path


class Flag(NamedTuple):
    """A flag that :func:`set_flag` knows."""

    parse: Callable[[str], Any]
    #: What the flag does, and what holds while it is unset.
    help: str


FLAGS: Final[dict[str, Flag]] = {
    "cm_primary_node_ip": Flag(
        _managers, "manager's host or HOST:PORT, or several, by commas; unset: the environment's, else 127.0.0.1"
    ),
    "cm_rpc_inter_port": Flag(_port, f"manager's port; unset: {DEFAULT_MANAGER_PORT}"),
    "clnt_log_file": Flag(_log_file, "file to log to; unset: the program's own logging"),
    "clnt_thread_pool_size": Flag(
        parsers.integer(1, 1024), "most threads that share large copies; the machine's cores are a bound of their own"
    ),
    "clnt_sync_req_timeout_ms": Flag(
        parsers.integer(1, 3_600_000), "deadline of each exchange; unset: SIMM_DEADLINE_MS"
    ),
    "clnt_async_req_timeout_ms": Flag(
        parsers.integer(1, 3_600_000), "the same, where clnt_sync_req_timeout_ms is unset: both forms are one code"
    ),
    "clnt_put_if_absent": Flag(
        _yes_no, "leave a stored value alone in puts, as keys are hashes of their values; unset: SIMM_PUT_IF_ABSENT"
    ),
    "clnt_syncreq_enable_retry": Flag(_yes_no, "no effect: the client retries whatever a retry can help"),
    "clnt_syncreq_retry_count": Flag(parsers.integer(0, 1000), "no effect, see clnt_syncreq_enable_retry"),
    "clnt_use_k8s": Flag(_yes_no, "no effect: in Kubernetes give a Service's name as cm_primary_node_ip"),
}
ALIASES: Final = {"cm_primary_node_port": "cm_rpc_inter_port"}
_ADDRESS: Final = ("cm_primary_node_ip", "cm_rpc_inter_port")

_flags: dict[str, Any] = {}
#: Why the last value of a flag that names the manager was refused.
_refused: dict[str, str] = {}


def set_flag(name: str, value: str) -> bool:
    """Set a flag for stores made from now on. Return False, and log the reason, if it is unknown or does not parse.

    Never raises. :data:`FLAGS` lists the flags. An empty text unsets the host, the port or the log file. A ``Store()``
    after a refused host or port fails.
    """
    try:
        known = ALIASES.get(name, name)
        flag = FLAGS.get(known)
    except TypeError:  # not hashable
        known, flag = "", None
    if flag is None:
        log.warning("set_flag: there is no flag %r; known are %s", name, ", ".join([*FLAGS, *ALIASES]))
        return False
    try:
        if not isinstance(value, (str, int)):
            raise ConfigError(f"{value!r} is no text")
        parsed = flag.parse(str(value))
    except (SimmError, ValueError, TypeError) as exc:
        log.warning("set_flag(%r): %s", name, exc)
        if known in _ADDRESS:
            _refused[known] = f"set_flag({name!r}, {value!r}) was refused: {exc}"
        return False
    # One assignment to a dict is atomic. No lock, as a Store() may be connecting while it holds one.
    _flags[known] = parsed
    _refused.pop(known, None)
    return True


def load(copy_threads_max: int) -> settings.Settings:
    """Return a store's settings: flags over environment over file over defaults. Raises ConfigError."""
    for reason in list(_refused.values()):
        raise ConfigError(
            f"{reason}. SIMM_MANAGER in the environment takes every form of address, and several; it holds while the "
            "flags of host and port are empty"
        )
    given: dict[str, Any] = {}
    timeout = _flags.get("clnt_sync_req_timeout_ms", _flags.get("clnt_async_req_timeout_ms"))
    if timeout is not None:
        given["deadline_ms"] = timeout
    threads = _flags.get("clnt_thread_pool_size")
    if threads is not None:
        given["copy_threads"] = min(threads, copy_threads_max)
    if "clnt_put_if_absent" in _flags:
        given["put_if_absent"] = _flags["clnt_put_if_absent"]
    if _flags.get("clnt_log_file") is not None:
        given["log_file"] = _flags["clnt_log_file"]
    loaded = settings.load("client", given)
    named, port = _flags.get("cm_primary_node_ip") or (), _flags.get("cm_rpc_inter_port") or 0
    from_default = loaded.origin("manager") == "default"
    if not named:
        if not port or not from_default:
            return loaded
        named = (Address("127.0.0.1", 0),)
    if port and any(address.port not in (0, port) for address in named):
        raise ConfigError(
            f"cm_primary_node_ip is {','.join(map(str, named))} and cm_primary_node_port is {port}: leave the port out "
            "of one of them"
        )
    if not from_default and all(any(_same(known, each, port) for known in loaded.manager) for each in named):
        return loaded
    managers = tuple(Address(each.host, each.port or port or DEFAULT_MANAGER_PORT) for each in named)
    return settings.load("client", {**given, "manager": managers})


def _same(known: Address, named: Address, port: int) -> bool:
    """Return whether an address of the settings is the one that a flag names, with ``port`` for one without a port."""
    wanted = named.port or port
    return known.host == named.host and wanted in (0, known.port)
