"""Numbers in messages that have names: statuses, roles, paths. docs/protocol.md says what each means.

``wire/messages.py`` has them too. A program that imports the client loads this module and no message.
"""

from __future__ import annotations

from typing import Final


class Status:
    """Outcomes of a request (in the header) and of one key (in bodies). Plain ints; never renumber one."""

    OK: Final = 0
    NOT_FOUND: Final = 1
    NO_SPACE: Final = 2
    WRONG_OWNER: Final = 3
    BAD_REQUEST: Final = 4
    UNAUTHORIZED: Final = 5
    VERSION: Final = 6
    BUSY: Final = 7
    STALE_GRANT: Final = 8
    TOO_LARGE: Final = 9
    INTERNAL: Final = 10
    NAME_TAKEN: Final = 11
    TORN: Final = 12
    CLOSED: Final = 13
    UNKNOWN_NODE: Final = 14
    UNAVAILABLE: Final = 15
    PREVIOUS: Final = 16
    PRESENT: Final = 17
    NOT_LEADER: Final = 18
    OTHER_CLUSTER: Final = 19
    OVER_QUOTA: Final = 20
    OUT_OF_RANGE: Final = 21
    OLD_EPOCH: Final = 22


#: Names of the statuses, for logs and errors.
STATUS_NAMES: Final = {value: name for name, value in vars(Status).items() if name.isupper()}


def status_name(status: int) -> str:
    """Return a status's name, or its number where this build does not know it."""
    return STATUS_NAMES.get(status, str(status))


class Role:
    """Senders of a HELLO."""

    CLIENT: Final = 0
    STREAM: Final = 1
    SUPERVISOR: Final = 2
    ADMIN: Final = 3
    MOVER: Final = 4


class Service:
    """Kinds of servers that a token is shown to."""

    MANAGER: Final = 1
    STREAM: Final = 2
    ENDPOINT: Final = 3
    NAMES: Final = {1: "a manager", 2: "a data server", 3: "a data server"}


class ShardRole:
    """Roles of one worker for a shard, by a shard map."""

    NONE: Final = 0
    #: The worker owns the shard, and no other worker has entries of it.
    OWNER: Final = 1
    #: The worker owns the shard; the previous owner may have entries that it lacks.
    INCOMING: Final = 2
    #: Another worker owns the shard; this one was its owner and keeps it frozen until the map forgets it.
    OUTGOING: Final = 3


class PathBit:
    """Bits of the data paths that a WELCOME offers."""

    SHM: Final = 1
    TCP: Final = 2
    RDMA: Final = 4
    #: Not a path: the server takes TRACED.
    TRACE: Final = 8
