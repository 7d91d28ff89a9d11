"""Every error SiMM raises, named by whose fault it is and what to do next.

A miss is no error: it is ``None`` (or ``False``). An outage is none either, inside an
engine: the client counts it and answers with a miss. What is left is below.
"""

from __future__ import annotations

from enum import IntEnum


class SimmError(Exception):
    """Root of all errors raised by SiMM."""


class UsageError(SimmError, ValueError):
    """The caller's mistake (wrong type, size, key, closed object). Do not retry; mend the call."""


class ConfigError(SimmError, ValueError):
    """A setting is unknown, malformed or contradicts another. The text names its source and the remedy."""


class LocalProtocolError(SimmError):
    """Our own side asked for a message that the protocol does not allow. A bug in SiMM."""


class RemoteProtocolError(SimmError):
    """The peer sent bytes that are no valid message. The connection is closed."""


class TransportError(SimmError):
    """A link failed or a deadline passed. What was under way has an unknown outcome."""


class CapacityError(SimmError):
    """No room even after eviction: the value is too large, or what it needs is pinned or granted."""


class SegmentError(SimmError):
    """A shared-memory segment is missing, foreign, too small for the machine, or in use."""


class CorruptionError(SimmError):
    """A structure in memory or on disk contradicts itself. Raised by ``check()`` and by recovery."""


class Code(IntEnum):
    """Result codes of ``simm.kv``, as engines know them."""

    OK = 0
    INVALID_ARGUMENT = -1000
    NO_ROUTE = -2002
    PUT_FAILED = -2100
    GET_FAILED = -2101
    UNAVAILABLE = -2300
    KEY_NOT_FOUND = -4003
