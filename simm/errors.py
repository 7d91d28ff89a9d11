"""Every error that SiMM raises, by whose fault it is and what to do next.

A miss is not an error: it is ``None`` (or ``False``). Nor is an outage, inside an engine: the client counts it and
answers with a miss.
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Final

#: What the system says of a path that is wrong, or that this user may not use.
_OF_THE_PATH: Final = frozenset((
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL,
    errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV,
))  # fmt: skip


class SimmError(Exception):
    """Root of all errors raised by SiMM."""


class UsageError(SimmError, ValueError):
    """The caller's mistake: wrong type, size or key, closed object. Correct the call; a retry fails again."""


class ConfigError(SimmError, ValueError):
    """A setting is unknown, malformed or contradicts another. The text names its source and the remedy."""


class AbsentError(ConfigError):
    """A setting names what this host does not know, and may know later: a user of a directory service, a device."""


class LocalProtocolError(SimmError):
    """This side built a message that the protocol does not allow. A bug in SiMM."""


class PeerError(SimmError):
    """The peer or the link to it failed. Drop the connection; a new one may succeed."""


class RemoteProtocolError(PeerError):
    """The peer sent bytes that are not a valid message. The connection is closed."""


class TransportError(PeerError):
    """A link failed or a deadline passed. Requests in flight have an unknown outcome."""


class DeadlineError(TransportError):
    """A deadline passed before the peer had answered, or taken what was sent."""


class NotSentError(DeadlineError):
    """The peer takes nothing more just now, and nothing of the request has been sent."""


class DeviceError(TransportError):
    """A GPU's driver failed, or there is none. The paths to the servers are unaffected."""


class UnfinishedCopy(DeviceError):
    """The driver cannot say that a copy has ended: host memory that it may still write must not be used again."""


class CapacityError(SimmError):
    """No room even after eviction: the value is too large, or what it needs is pinned or granted."""


class SegmentError(SimmError):
    """A shared-memory segment is missing, foreign, too small for the machine, or in use."""


class CorruptionError(SimmError):
    """A structure in memory or on disk is inconsistent."""


def may_pass(exc: BaseException) -> bool:
    """Return whether an error, or the OSError that it was raised from, may pass without a change of the settings.

    So it is with an AbsentError, a disk that is full, broken or read-only, a server of files that does not answer, and
    descriptors or memory that are used up. It is not so with a path that is wrong, and with files that OpenSSL refuses,
    whose numbers are its own.
    """
    if isinstance(exc, AbsentError):
        return True
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    if not isinstance(cause, OSError) or hasattr(cause, "library"):
        return False
    return cause.errno is not None and cause.errno not in _OF_THE_PATH


class Code(IntEnum):
    """Result codes of ``simm.kv``, as engines know them."""

    OK = 0
    INVALID_ARGUMENT = -1000
    NO_ROUTE = -2002
    PUT_FAILED = -2100
    GET_FAILED = -2101
    UNAVAILABLE = -2300
    KEY_NOT_FOUND = -4003


def printable(text: str, most: int = 2000) -> str:
    """Return text of a peer or a file as a terminal or a log may show it, ``most`` characters of it.

    Control characters, line ends and characters that change the direction or the look of others become escapes.
    """
    if len(text) <= most and text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])


def line_about(session: int = 0, trace_id: bytes = b"") -> dict[str, str]:
    """Return what a log line is about, as ``extra`` of it: JSON lines have both as fields (``config/logs.py``)."""
    found = {"session": f"{session:#x}"} if session else {}
    return {**found, "trace_id": trace_id.hex()} if trace_id else found
