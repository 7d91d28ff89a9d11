"""Values as people write them: addresses, sizes, durations, names. Each parser raises ConfigError with the right form.

``config.py`` makes settings of them. A parser takes what a file may hold too (a number, a boolean, a list), not
text alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from .constants import DEFAULT_MANAGER_PORT, NAMESPACE_BYTES_MAX
from .errors import ConfigError

NAME_BYTES_MAX: Final = 128



class Address(NamedTuple):
    """Host and port of a TCP endpoint; ``str()`` gives the form that :func:`parse_address` reads."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than ``localhost`` counts as outside."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, default_port: int | None = None) -> Address:
    """``host:port``, ``[v6]:port``, or ``host`` where there is a default port. Raises ConfigError."""
    text = text.strip()
    if "://" in text:
        raise ConfigError(f"{text!r} is a URL; write HOST:PORT, as 127.0.0.1:{DEFAULT_MANAGER_PORT}")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"{text!r} is no address; an IPv6 one is written [::1]:{DEFAULT_MANAGER_PORT}")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ConfigError(f"{host!r} is no IPv6 address (brackets are for those only)") from None
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
    """One or more addresses separated by commas, each once. Raises ConfigError."""
    found = [parse_address(part, default_port) for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError("no address given")
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class CoordinatorUrl:
    """Where several managers agree on who leads; ``str()`` gives the form that :func:`parse_coordinator` reads."""

    tls: bool
    endpoints: tuple[Address, ...]
    #: Of our keys, as ``/simm``: what several clusters on one etcd differ in.
    prefix: str

    def __str__(self) -> str:
        return f"etcd{'s' if self.tls else ''}://{','.join(map(str, self.endpoints))}{self.prefix}"


def parse_coordinator(text: str) -> CoordinatorUrl:
    """``etcd://HOST[:PORT][,HOST[:PORT]...][/PREFIX]``; ``etcds`` for https. Raises ConfigError."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("etcd", "etcds"):
        raise ConfigError(f"{text!r} is no coordinator; write etcd://HOST:{_ETCD_PORT}/PREFIX, or etcds:// for https")
    hosts, _, prefix = rest.partition("/")
    if "@" in hosts:
        raise ConfigError("everybody on this machine can read a password in there; use --coordinator-login FILE")
    prefix = "/" + (prefix.strip("/") or "simm")
    if not re.fullmatch(r"[A-Za-z0-9._/-]{1,200}", prefix) or "//" in prefix:
        raise ConfigError(f"{prefix!r} is no prefix of keys; letters, digits and ._-/ make one")
    return CoordinatorUrl(scheme == "etcds", parse_addresses(hosts, _ETCD_PORT), prefix)


_ETCD_PORT: Final = 2379
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:iB|B)?|B)?", re.IGNORECASE | re.ASCII)
_BYTE_UNITS: Final = {None: 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Bytes from ``8G``, ``512MiB``, ``1.5g`` or a plain number; K to T are powers of 1024. Raises ConfigError."""
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
    scale = _BYTE_UNITS[unit.upper() if unit else None]
    if "." not in number:
        return int(number) * scale
    if scale == 1:
        raise ConfigError(f"{text!r} is no whole number of bytes")
    return int(float(number) * scale)


_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h)?", re.ASCII)
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str | int | float, unit: str | None = None) -> float:
    """Seconds from ``250ms``, ``5s``, ``2m``. A bare number needs ``unit``, the caller's. Raises ConfigError."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ConfigError(f"{text!r} is no duration; write it as 250ms or 5s")
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is no duration; write a number and us, ms, s, m or h, as 250ms or 5s")
    number, given = match.groups()
    given = given or unit
    if given is None:
        raise ConfigError(f"{text!r} has no unit; write {number}s or {number}ms")
    # Divide for the small units: 250 * 1e-3 is not always 0.25's neighbour, 250 / 1000 is.
    scale = _DURATION_UNITS[given]
    return float(number) / round(1 / scale) if scale < 1 else float(number) * scale


def duration_in(unit: str, least: int = 0) -> Callable[[Any], int]:
    """Parser of a whole number of ``unit``, at least ``least``."""

    def parse(value: Any) -> int:
        amount = parse_duration(value, unit) / _DURATION_UNITS[unit]
        if amount < least or abs(amount - round(amount)) > 1e-9 * max(1000.0, amount):
            raise ConfigError(f"{value!r} must be a whole number of {unit}, {least} or more")
        return round(amount)

    return parse


def integer(least: int, most: int) -> Callable[[Any], int]:
    """Parser of a whole number from ``least`` to ``most``."""
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
    """True or false, in the words that people use for it."""
    if isinstance(value, bool):
        return value
    found = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{value!r} is neither true nor false (also: yes/no, on/off, 1/0)")
    return found


def string(value: Any) -> str:
    """Text as it is."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} must be text")
    return value


def choice(*choices: str) -> Callable[[Any], str]:
    """Parser of one of these words."""
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ConfigError(f"{value!r} must be one of {', '.join(choices)}{nearest(value, choices)}")
        return value.lower()

    return parse


#: The data paths, the best one first.
PATHS = ("shm", "rdma", "tcp")


def paths(value: Any) -> str:
    """``auto``, or data paths by commas, of which the best that works is taken. As text. Raises ConfigError."""
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
    """Parser whose ``empty`` word (and the empty text) means None."""
    return lambda value: None if value is None or value in ("", empty) else parse(value)


def path_of(value: Any) -> Path:
    """A path, with ~ for the home folder."""
    return Path(string(value)).expanduser()


def _utf8_bytes(text: str) -> int:
    """Length in UTF-8; a command line's undecodable bytes have none. Raises ConfigError."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8") from None


def node_name(value: Any) -> str:
    """A data server's name."""
    text = string(value).strip()
    if not text or _utf8_bytes(text) > NAME_BYTES_MAX or not re.fullmatch(r"[^\s/\x00-\x1f\x7f]+", text):
        raise ConfigError(f"{value!r} must be 1 to {NAME_BYTES_MAX} bytes without spaces and slashes")
    return text


def namespace_name(value: Any) -> str:
    """A namespace's name."""
    text = string(value)
    if not 1 <= _utf8_bytes(text) <= NAMESPACE_BYTES_MAX:
        raise ConfigError(f"{value!r} must be 1 to {NAMESPACE_BYTES_MAX} bytes of UTF-8")
    return text


def address(value: Any) -> Address:
    """One address with its port."""
    return parse_address(string(value), None)


def coordinator(value: Any) -> CoordinatorUrl:
    """See :func:`parse_coordinator`."""
    return parse_coordinator(string(value))


def managers(value: Any) -> tuple[Address, ...]:
    """Managers' addresses; a file may list them."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    return parse_addresses(string(value), DEFAULT_MANAGER_PORT)


def nearest(name: str, known: Any) -> str:
    """The end of a message about an unknown word: the nearest known one, if one is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.3)
    return f"; did you mean {close[0]!r}?" if close else ""
