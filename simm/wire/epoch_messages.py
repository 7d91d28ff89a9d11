"""The messages about namespaces: their epochs (``cluster/epochs.py``), and a request for clients of one of them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ..rpc import HEADER_BYTES, OPCODES, encode, message, structure


@structure("s Q")
class NamespaceEpoch(NamedTuple):
    """A namespace whose values have an epoch, and that epoch: of the map that came with its last advance."""

    name: str
    epoch: int


@message(0x30, "Q")
class EpochLease(NamedTuple):
    """Supervisor to worker: values that have an epoch may be read until this CLOCK_BOOTTIME, in ns. Answer: DONE."""

    until_ns: int


@message(0x38, "s H b")
class ForNamespace(NamedTuple):
    """Stream to worker: a request of a client that is bound to this namespace, as its opcode and body.

    The worker judges whose the entries are, in the turn that carries the request out. Answer: the request's own.
    """

    name: str
    opcode: int
    body: bytes


@message(0x6E, "s I")
class Advance(NamedTuple):
    """Make all values of a namespace unreadable, and answer when they are, after so many ms at most.

    Answer: ADVANCED.
    """

    namespace: str
    timeout_ms: int


@message(0x6F, "Q")
class Advanced(NamedTuple):
    """The namespace's new epoch."""

    epoch: int


@message(0x70, "Q Q I [NamespaceEpoch]")
class Epochs(NamedTuple):
    """All namespaces that have an epoch, as of the map of ``epoch`` of this cluster. ``lease_ms`` 0: for ever."""

    epoch: int
    cluster: int
    lease_ms: int
    namespaces: list[NamespaceEpoch]


@message(0x71, "Q Q")
class LeaseAck(NamedTuple):
    """HEARTBEAT_ACK for a server with a lease: it goes on if all workers have a map from ``advanced`` on."""

    epoch: int
    advanced: int


#: Bits of MAP_GET's ``subscribe``: push later maps; before a map, push EPOCHS if a namespace has one;
#: answer HEARTBEAT with LEASE_ACK.
SUBSCRIBE_MAPS: Final = 1
SUBSCRIBE_EPOCHS: Final = 2
SUBSCRIBE_LEASES: Final = 4
#: Namespaces of a cluster that have epochs.
EPOCH_NAMESPACES_MAX: Final = 64


def for_namespace(name: str, request: Any) -> ForNamespace:
    """Return a request of a client that is bound to a namespace."""
    return ForNamespace(name, OPCODES[type(request)], encode(request)[HEADER_BYTES:])
