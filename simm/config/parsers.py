"""Parsers of values as users write them: addresses, sizes, durations, names.

Each raises ConfigError that shows the right form. ``config/settings.py`` uses them. Most accept text and the values
that a file can have: a number, a boolean, a list.

``simm.client`` imports this module. What only some parsers need (difflib, ipaddress, pathlib: 6 ms) they import
themselves."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..constants import (
    ARENA_BYTES_MIN,
    DEFAULT_MANAGER_PORT,
    EVENTS_BYTES_MAX,
    EVENTS_BYTES_MIN,
    NAMESPACE_BYTES_MAX,
    OTHERS_NAMESPACE,
    OTHERS_REFUSED,
    VALUE_BYTES_MAX,
)
from ..errors import AbsentError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NAME_BYTES_MAX: Final = 128
#: More than any machine has; a typo in a unit exceeds it.
ARENA_BYTES_MAX: Final = 64 << 40
#: Group ids are 32 bits; the highest number means none.
GROUP_ID_MAX: Final = (1 << 32) - 2
USER_ID_MAX: Final = (1 << 32) - 2


class Address(NamedTuple):
    """Host and port of a TCP endpoint; ``str()`` gives the form that :func:`parse_address` reads."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than ``localhost`` does not count as loopback."""
        import ipaddress

        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


class TlsOptions(NamedTuple):
    """PEM files for TLS, as absolute paths, and a name; empty where there is none.

    ``ca``: the authorities that sign the certificates of others. ``cert``: the process's own certificate, with what
    leads from it to an authority. ``key``: its key, if it is not in ``cert``. ``clients``: the authorities that sign
    clients' certificates, for a server. ``name``: what the certificates of others must name, if not the host of their
    address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    clients: str = ""
    name: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """The files among them."""
        return tuple(filter(None, self[:4]))


def parse_address(text: str, default_port: int | None = None) -> Address:
    """Parse ``host:port``, ``[v6]:port``, or ``host`` if there is a default port. Raises ConfigError.

    Brackets may hold an IPv4 address too, so that ``[$(POD_IP)]:30010`` is right in any cluster.
    """
    text = text.strip()
    if "://" in text:
        raise ConfigError(f"{text!r} is a URL; write HOST:PORT, as 127.0.0.1:{DEFAULT_MANAGER_PORT}")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"{text!r} is no address; an IPv6 one is written [::1]:{DEFAULT_MANAGER_PORT}")
        import ipaddress

        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"{host!r} is no IP address (brackets are for those only)") from None
        port = rest[1:] if rest else None
    else:
        host, colon, rest = text.partition(":")
        if ":" in rest:
            raise ConfigError(f"{text!r} has several colons; put an IPv6 address in brackets, as [::1]:5")
        port = rest if colon else None
    if not host:
        raise ConfigError(f"{text!r} names no host; 0.0.0.0 stands for every interface")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", host):
        raise ConfigError(f"{host!r} is no host name")
    if port is None:
        if default_port is None:
            raise ConfigError(f"{text!r} names no port; write HOST:PORT")
        return Address(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ConfigError(f"{port!r} in {text!r} is no port (0 to 65535)")
    return Address(host, int(port))


def parse_addresses(text: str, default_port: int | None = None) -> tuple[Address, ...]:
    """Parse addresses separated by commas; return each once. Raises ConfigError."""
    found = [parse_address(part, default_port) for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError("no address given")
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class CoordinatorUrl:
    """The etcd in which managers elect a leader. ``str()`` gives the form that :func:`parse_coordinator` reads."""

    tls: bool
    endpoints: tuple[Address, ...]
    #: Prefix of the keys, such as ``/simm``, which separates clusters on one etcd.
    prefix: str

    def __str__(self) -> str:
        return f"etcd{'s' if self.tls else ''}://{','.join(map(str, self.endpoints))}{self.prefix}"


def parse_coordinator(text: str) -> CoordinatorUrl:
    """Parse ``etcd://HOST[:PORT][,HOST[:PORT]...][/PREFIX]``, or ``etcds`` for https. Raises ConfigError."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("etcd", "etcds"):
        raise ConfigError(f"{text!r} is no coordinator; write etcd://HOST:{_ETCD_PORT}/PREFIX, or etcds:// for https")
    hosts, _, prefix = rest.partition("/")
    if "@" in hosts:
        raise ConfigError("every user of this machine could read a password there; use --coordinator-login FILE")
    prefix = "/" + (prefix.strip("/") or "simm")
    if not re.fullmatch(r"[A-Za-z0-9._/-]{1,200}", prefix) or "//" in prefix:
        raise ConfigError(f"{prefix!r} is no prefix of keys; letters, digits and ._-/ make one")
    return CoordinatorUrl(scheme == "etcds", parse_addresses(hosts, _ETCD_PORT), prefix)


_ETCD_PORT: Final = 2379
#: Of a size: more are no bytes of any machine, and too many are no number for Python.
_DIGITS_MAX: Final = 32
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:iB|B)?|B)?", re.IGNORECASE | re.ASCII)
_BYTE_UNITS: Final = {None: 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``8G``, ``512MiB``, ``1.5g`` or a number; K to T are powers of 1024. Raises ConfigError."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ConfigError(f"{text!r} is no size; write it as 8G or 512M")
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"{text} is no size: it is negative")
        return text
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size; write a number and K, M, G or T (powers of 1024), as 8G or 512M")
    number, unit = match.groups()
    if len(number) > _DIGITS_MAX:
        raise ConfigError(f"a size of {len(number)} digits is none")
    scale = _BYTE_UNITS[unit.upper() if unit else None]
    if "." not in number:
        return int(number) * scale
    if scale == 1:
        raise ConfigError(f"{text!r} is no whole number of bytes")
    return int(float(number) * scale)


_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h)?", re.ASCII)
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str | int | float, unit: str | None = None) -> float:
    """Return the seconds of ``250ms``, ``5s``, ``2m``, or of a number of ``unit``. Raises ConfigError."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ConfigError(f"{text!r} is no duration; write it as 250ms or 5s")
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is no duration; write a number and us, ms, s, m or h, as 250ms or 5s")
    number, given = match.groups()
    given = given or unit
    if given is None:
        raise ConfigError(f"{text!r} has no unit; write {number}s or {number}ms")
    # Small units divide: 250 / 1000 is exactly rounded, 250 * 1e-3 is not always.
    scale = _DURATION_UNITS[given]
    return float(number) / round(1 / scale) if scale < 1 else float(number) * scale


def arena_bytes(value: Any) -> int:
    """Parse the size of an arena. Raises ConfigError for one that no machine has, too."""
    size = parse_bytes(value)
    if not ARENA_BYTES_MIN <= size <= ARENA_BYTES_MAX:
        raise ConfigError(
            f"{value!r} is no size of an arena: {ARENA_BYTES_MIN >> 20}M to {ARENA_BYTES_MAX >> 40}T are allowed"
        )
    return size


def events_bytes(value: Any) -> int:
    """Parse the size of a ring of events, 0 for none. Raises ConfigError for one that no ring has, too."""
    size = parse_bytes(value)
    if size and not EVENTS_BYTES_MIN <= size <= EVENTS_BYTES_MAX:
        raise ConfigError(
            f"{value!r} is no size of a ring of events: 0 for none, or {EVENTS_BYTES_MIN >> 20}M to "
            f"{EVENTS_BYTES_MAX >> 30}G"
        )
    return size


def value_bytes(value: Any) -> int:
    """Parse the size of a value. Raises ConfigError for one that no value has, too."""
    size = parse_bytes(value)
    if not 1 <= size <= VALUE_BYTES_MAX:
        raise ConfigError(f"{value!r} is no size of a value: 1 to {VALUE_BYTES_MAX:,} bytes are allowed")
    return size


def duration_in(unit: str, least: int, most: int) -> Callable[[Any], int]:
    """Return a parser of a whole number of ``unit``, from ``least`` to ``most``."""

    def parse(value: Any) -> int:
        amount = parse_duration(value, unit) / _DURATION_UNITS[unit]
        if not least <= amount <= most or abs(amount - round(amount)) > 1e-9 * max(1000.0, amount):
            raise ConfigError(f"{value!r} must be a whole number of {unit} from {least} to {most}")
        return round(amount)

    return parse


def integer(least: int, most: int) -> Callable[[Any], int]:
    """Return a parser of a whole number from ``least`` to ``most``."""

    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{value!r} must be a whole number from {least} to {most}")
        return value

    return parse


_BOOLEANS: Final = {
    "1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False,
}


def boolean(value: Any) -> bool:
    """Parse true or false, in several spellings."""
    if isinstance(value, bool):
        return value
    found = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{value!r} is neither true nor false (also: yes/no, on/off, 1/0)")
    return found


def string(value: Any) -> str:
    """Return text as it is."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} must be text")
    return value


def choice(*choices: str) -> Callable[[Any], str]:
    """Return a parser of one of these words."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            import difflib

            close = difflib.get_close_matches(value, choices, n=1, cutoff=0.3) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{value!r} must be one of {', '.join(choices)}{hint}")
        return value.lower()

    parse.choices = choices  # type: ignore[attr-defined]  # for completions
    return parse


#: The data paths, best first.
PATHS = ("shm", "rdma", "tcp")


def trace_ratio(value: Any) -> str:
    """Return a share of operations, 0 to 1, as text, or ``off``. Raises ConfigError."""
    if value == "off":
        return "off"
    try:
        ratio = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"{value!r} is no share of the calls to trace: a number from 0 to 1, as 0.01, or off")
    return f"{ratio:.12g}"


def default_runtime_dir(env: Mapping[str, str]) -> tuple[Path, str]:
    """Return the folder of the UNIX sockets where no setting names one, and where that comes from."""
    from pathlib import Path

    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "simm", "environment XDG_RUNTIME_DIR"
    return Path(f"/tmp/simm-{os.getuid()}"), "default"


def paths(value: Any) -> str:
    """Parse ``auto`` or data paths separated by commas; return them as text, best first. Raises ConfigError."""
    text = ",".join(value) if isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value) else value
    if not isinstance(text, str):
        raise ConfigError(f"expected auto, or some of {', '.join(PATHS)}, not {value!r}")
    named = {part.strip().lower() for part in text.split(",")}
    if named == {"auto"}:
        return "auto"
    if not named <= set(PATHS):
        raise ConfigError(f"expected auto, or some of {', '.join(PATHS)} by commas, not {value!r}")
    return ",".join(path for path in PATHS if path in named)


def optional(parse: Callable[[Any], Any], empty: str = "") -> Callable[[Any], Any]:
    """Return a parser that maps ``empty`` and the empty text to None."""
    return lambda value: None if value is None or value in ("", empty) else parse(value)


def path_of(value: Any) -> Path:
    """Parse a path; ~ is the home folder, ~NAME that of another user."""
    from pathlib import Path

    try:
        return Path(string(value)).expanduser()
    except RuntimeError:
        raise ConfigError(f"{value!r}: there is no such user's folder here; write the whole path") from None


def _utf8_bytes(text: str) -> int:
    """Return the length in UTF-8. Raises ConfigError for undecodable bytes of a command line."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8") from None


def node_name(value: Any) -> str:
    """Parse a data server's name, which is part of the names of its arenas and sockets."""
    text = string(value).strip()
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+", text) or len(text) > NAME_BYTES_MAX:
        raise ConfigError(
            f"{text[:200]!r} is no name of a data server: it has 1 to {NAME_BYTES_MAX} letters, digits, '_', '-', '.'"
        )
    return text


def group(value: Any) -> str:
    """Parse a group: its name, or its number."""
    text = string(value).strip()
    if re.fullmatch(r"[0-9]+", text) and int(text[:20]) > GROUP_ID_MAX:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ConfigError(f"{shown!r} is no group: a group's number has 32 bits")
    return text


def users(value: Any) -> tuple[int, ...]:
    """Parse users by name or number, separated by commas; return their numbers, each once.

    Raises ConfigError, AbsentError for a name that this host does not know.
    """
    parts = value if isinstance(value, list) else [value] if isinstance(value, int) else string(value).split(",")
    return tuple(dict.fromkeys(_user(part) for part in parts if part != ""))


def _user(value: Any) -> int:
    text = str(value).strip() if type(value) in (str, int) else ""
    if re.fullmatch(r"[0-9]{1,10}", text) and int(text) <= USER_ID_MAX:
        return int(text)
    import pwd

    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        # A directory that has the name may answer later. No number becomes a user.
        kind = AbsentError if text.strip("-0123456789") else ConfigError
        raise kind(f"{str(value)[:40]!r} is no user of this system, nor a user's number") from None


def namespace_name(value: Any) -> str:
    """Parse a namespace's name."""
    text = string(value)
    if not 1 <= _utf8_bytes(text) <= NAMESPACE_BYTES_MAX:
        raise ConfigError(f"{value!r} must be 1 to {NAMESPACE_BYTES_MAX} bytes of UTF-8")
    if text == OTHERS_NAMESPACE:
        raise ConfigError(OTHERS_REFUSED)
    return text


def address(value: Any) -> Address:
    """Parse an address with a port."""
    return parse_address(string(value), None)


def address_or(default_port: int) -> Callable[[Any], Address]:
    """Return a parser of an address, which has this port if it names none."""
    return lambda value: parse_address(string(value), default_port)


def coordinator(value: Any) -> CoordinatorUrl:
    """Parse a coordinator, see :func:`parse_coordinator`."""
    return parse_coordinator(string(value))


def managers(value: Any) -> tuple[Address, ...]:
    """Parse the managers' addresses, which a file may list."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    return parse_addresses(string(value), DEFAULT_MANAGER_PORT)
