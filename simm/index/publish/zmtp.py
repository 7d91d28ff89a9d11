"""ZMTP 3.0 as a publisher speaks it: what a PUB and a ROUTER socket of ZMQ send, and what their peers may send them.

Connections have no security (mechanism NULL). Each side sends a greeting of 64 bytes and the command READY, which names
its kind of socket. Then come frames:

    flags, 1 byte: 1 more frames follow, 2 the length has 8 bytes, 4 a command | length, 1 or 8 big-endian bytes | body

Peers of ZMTP 3.1 subscribe by commands, older ones by messages that begin with 1. Both are taken. Peers ask us for
signs of life (PING); we ask for none, as the kernel notices a peer that is gone.

Nothing here does I/O. A peer may send anything, in pieces of any size: what is kept of it is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4

GREETING_BYTES: Final = 64
_SIGNATURE: Final = b"\xff" + (1).to_bytes(8, "big") + b"\x7f"
GREETING: Final = (_SIGNATURE + b"\x03\x00" + b"NULL").ljust(GREETING_BYTES, b"\0")
#: Of a frame that comes in: a question has 8 bytes, a topic some more.
FRAME_BYTES_MAX: Final = 1 << 10
#: Frames of a message that comes in; a question has 2.
FRAMES_MAX: Final = 8
_TEXT_MAX: Final = 255
#: The kinds of peers that each kind of socket has.
PEERS_OF: Final = {"PUB": frozenset((b"SUB", b"XSUB")), "ROUTER": frozenset((b"REQ", b"DEALER", b"ROUTER"))}


class BadPeer(Exception):
    """What a peer said is no ZMTP, or too much. The text says why."""


class Subscription(NamedTuple):
    """A peer wants messages whose topic begins so, or does so no more."""

    wanted: bool
    topic: bytes


class Pong(NamedTuple):
    """The frame that answers a peer's PING."""

    frame: bytes


#: What a peer says: a whole message, or one of the above.
Said = list[bytes] | Subscription | Pong


def header(length: int, flags: int = 0) -> bytes:
    """Return what comes before the body of a frame."""
    if length <= _TEXT_MAX:
        return bytes((flags, length))
    return bytes((flags | _LONG,)) + length.to_bytes(8, "big")


def frames(*bodies: bytes) -> bytes:
    """Return a message of these frames."""
    last = len(bodies) - 1
    return b"".join(header(len(body), MORE if at < last else 0) + body for at, body in enumerate(bodies))


def command(body: bytes) -> bytes:
    """Return the frame of a command."""
    return header(len(body), _COMMAND) + body


def ready(kind: str) -> bytes:
    """Return the command READY of a socket of this kind."""
    properties = ((b"Socket-Type", kind.encode()), (b"Identity", b""))
    body = b"\x05READY"
    for name, value in properties:
        body += bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return command(body)


def properties_of(body: bytes) -> dict[bytes, bytes]:
    """Return the properties in a command READY, behind its name; names in lower case. Raises BadPeer."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        end = at + 1 + body[at]
        name, size = body[at + 1 : end].lower(), body[end : end + 4]
        at = end + 4 + int.from_bytes(size, "big")
        if len(size) != 4 or at > len(body):
            raise BadPeer("a property is cut short")
        found[name] = body[end + 4 : at]
    return found


class Decoder:
    """Takes what a peer sends, piece by piece.

    Args:
        kind: of our socket, PUB or ROUTER.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._left = bytearray()
        self._greeted = False
        #: True once the handshake is over.
        self.open = False
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Said]:
        """Yield what is complete now. Raises BadPeer; then the connection is of no more use."""
        self._left += data
        if not self._greeted and not self._greeting():
            return
        while (frame := self._frame()) is not None:
            flags, body = frame
            if not self.open:
                self._ready(flags, body)
            elif flags & _COMMAND:
                yield from self._command(body)
            else:
                yield from self._message(flags, body)

    def _greeting(self) -> bool:
        """Take the peer's greeting, as far as it is there. Return False before all of it is."""
        head = self._left
        if head[:1] != _SIGNATURE[:1] or (len(head) > 9 and head[9] != _SIGNATURE[9]):
            raise BadPeer("it does not greet as ZMTP does")
        if len(head) > 10 and head[10] < 3:
            raise BadPeer("its ZMTP is older than 3.0")
        if len(head) < GREETING_BYTES:
            return False
        mechanism = bytes(head[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise BadPeer(f"it wants the security {mechanism!r}, and there is none here")
        del self._left[:GREETING_BYTES]
        self._greeted = True
        return True

    def _frame(self) -> tuple[int, bytes] | None:
        """Return the next frame, None before all of it is there."""
        left = self._left
        if len(left) < 2:
            return None
        flags = left[0]
        start = 9 if flags & _LONG else 2
        if flags > (MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & MORE):
            raise BadPeer(f"a frame with the flags {flags}")
        if len(left) < start:
            return None
        length = int.from_bytes(left[1:start], "big")
        if length > FRAME_BYTES_MAX:
            raise BadPeer(f"a frame of {length} bytes")
        if len(left) < start + length:
            return None
        body = bytes(left[start : start + length])
        del left[: start + length]
        return flags, body

    def _ready(self, flags: int, body: bytes) -> None:
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise BadPeer("it does not say READY")
        kind = properties_of(body[6:]).get(b"socket-type", b"")
        if kind not in PEERS_OF[self._kind]:
            raise BadPeer(f"its socket is a {kind[:16]!r}, which has nothing to do with a {self._kind}")
        self.open = True

    def _command(self, body: bytes) -> Iterator[Said]:
        name = body[1 : 1 + body[0]] if body else b""
        rest = body[1 + len(name) :]
        if name == b"PING":
            # Two bytes of a time to live, and up to 16 that come back.
            yield Pong(command(b"\x04PONG" + rest[2:18]))
        elif name in (b"SUBSCRIBE", b"CANCEL") and self._kind == "PUB":
            yield Subscription(name == b"SUBSCRIBE", rest)
        elif name == b"ERROR":
            raise BadPeer(f"it says: {rest[1:100]!r}")
        # Others are of later versions.

    def _message(self, flags: int, body: bytes) -> Iterator[Said]:
        self._parts.append(body)
        if len(self._parts) > FRAMES_MAX:
            raise BadPeer(f"a message of more than {FRAMES_MAX} frames")
        if flags & MORE:
            return
        parts, self._parts = self._parts, []
        if self._kind != "PUB":
            yield parts
        elif len(parts) == 1 and parts[0][:1] in (b"\0", b"\1"):
            yield Subscription(parts[0][0] == 1, parts[0][1:])
        # What else a subscriber says is nothing to a publisher.
