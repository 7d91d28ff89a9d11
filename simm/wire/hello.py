"""Open a connection: build the client's HELLO, and check it at a server.

A server accepts a HELLO if a protocol version is common to both sides, and if a token of the server was proven before
(``wire/auth.py``). A server without tokens accepts any; ``config/startup.py`` lets it listen beyond loopback only with
``--insecure``. Each server also checks the HELLO's cluster against its own arena.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final, NamedTuple

from ..errors import RemoteProtocolError
from ..rpc import OPCODES, Frame
from .auth import Gate
from .epoch_messages import Advance
from .messages import PROTOCOL_MAX, PROTOCOL_MIN, Auth, ClusterStatus, Drain, Hello, MapGet, Ping, Prove, Status

#: What a data server answers to requests of clients and commands that were given its port as the manager's.
NOT_A_MANAGER: Final = "a data server listens here"
FOR_MANAGERS: Final = frozenset(OPCODES[each] for each in (MapGet, ClusterStatus, Drain, Advance))
#: Before HELLO a server decodes nothing else.
_OPENING: Final = frozenset((OPCODES[Hello], OPCODES[Ping], OPCODES[Auth], OPCODES[Prove]))


def opens(frame: Frame) -> bool:
    """Return True for a message that may come before HELLO."""
    return frame.opcode in _OPENING


def check_opening(frame: Frame) -> None:
    """Raise RemoteProtocolError for a message that may not come before HELLO, without a look into it."""
    if frame.opcode not in _OPENING:
        raise RemoteProtocolError("the first message must be HELLO")


class Refusal(NamedTuple):
    """The ERROR that answers a HELLO. After UNAUTHORIZED the server closes the connection."""

    status: int
    text: str


def client_hello(role: int, *, namespace: str = "", cluster: int = 0, pid: int = 0) -> Hello:
    """Return the HELLO of a connecting process, which offers all protocol versions of this build.

    Args:
        namespace: of the keys; empty where the server needs none.
        cluster: id in the shard map that named the server; 0 accepts any.
        pid: for the server's log. A worker takes the pid from the kernel instead.
    """
    return Hello(PROTOCOL_MIN, PROTOCOL_MAX, role, 0, pid, namespace, "", [], cluster)


def negotiate(hello: Hello, side: str) -> int | Refusal:
    """Return the highest common protocol version. ``side`` names the answering server in the refusal."""
    proto = min(hello.proto_max, PROTOCOL_MAX)
    if proto >= max(hello.proto_min, PROTOCOL_MIN):
        return proto
    return Refusal(
        Status.VERSION,
        f"peer speaks protocol {hello.proto_min} to {hello.proto_max}, this {side} {PROTOCOL_MIN} to {PROTOCOL_MAX}: "
        "upgrade the older side",
    )


def token_fits(tokens: Iterable[bytes], given: bytes) -> bool:
    """Return True if ``given`` is one of the tokens. Compare it with all, each in constant time."""
    return any([hmac.compare_digest(token, given) for token in tokens])  # noqa: C419


def accept(hello: Hello, side: str, gate: Gate) -> int | Refusal:
    """Return the protocol version to speak, if there is one and ``gate`` is open."""
    proto = negotiate(hello, side)
    fault = gate.fault(hello)
    return Refusal(Status.UNAUTHORIZED, fault) if fault and not isinstance(proto, Refusal) else proto


def other_cluster(hello: Hello, side: str, mine: int) -> Refusal | None:
    """Return a refusal if the HELLO names another cluster than ``mine``, the arena's.

    An arena without a cluster (``mine`` 0) has no entries yet, so it fits every HELLO.
    """
    if hello.cluster and mine not in (0, hello.cluster):
        return Refusal(
            Status.OTHER_CLUSTER, f"this {side} is of cluster {mine:016x}, not of {hello.cluster:016x}"
        )
    return None
