"""Malformed frames from a seed, made of real ones by mutations that know the format, and what a server does with them.

    python -m tests.system.faults.frames '{"kind": "manager", "address": ["::1", 30001], "seed": 1, "count": 7000}'

One frame, sometimes after a proper greeting and some proper requests, goes out on a connection of its own, whose
writing end is then closed. A server must close its end too, whatever it answers first: an orderly end, and no silence.
Frames that are whole and would change the cluster (a JOIN of a made-up server) are not sent: those are
no mistakes that a server could see. Prints a line of JSON: how many were sent, and what went wrong.

With a ``token`` in the settings (and ``service`` and ``server``, whom it is shown to) the frame comes before any
opening, or in its midst after AUTH, or after all of it. Whoever has not proven a token hears nothing but why, and PONG.

The kind ``pages`` is a server's port for pages: what goes out are HTTP requests, damaged in the same ways.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
from collections import Counter
from typing import Any, Final

from simm.constants import FRAME_BYTES_MAX
from simm.errors import RemoteProtocolError, SimmError
from simm.rpc import HEADER, HEADER_BYTES, Connection, decode, encode
from simm.wire import epoch_messages as E
from simm.wire import messages as M
from simm.wire.auth import Asker
from tests.support.wire_samples import TYPES, sample

ANSWER_S: Final = 60.0
#: What a peer of a kind says first.
_GREETING: Final = encode(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "frames", "", []), 1)
_PINGS: Final = encode(M.Ping(1), 2) + encode(M.Ping(2), 3)
#: Whole ones of these are taken at their word.
_BELIEVED: Final = (M.Join, M.Leave, M.Moved, M.MapOffer, M.Drain, M.Heartbeat, E.Advance, E.Epochs, E.EpochLease)
_EDGES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """One frame, damaged once or a few times."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        what = rng.randrange(11)
        at = rng.randrange(len(data)) if data else 0
        if what == 0 and data:  # a bit
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1 and data:  # a byte
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif what == 2 and len(data) >= HEADER_BYTES:  # a field of the header
            fields = list(HEADER.unpack_from(data))
            number = rng.randrange(len(fields))
            width = struct.calcsize("<" + HEADER.format.strip("<=@")[number])
            fields[number] = rng.choice(_EDGES) & ((1 << 8 * width) - 1)
            HEADER.pack_into(data, 0, *fields)
        elif what == 3:  # an integer of the body, or its counts and lengths, at an extreme
            width, code = rng.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
            if len(data) >= HEADER_BYTES + width:
                place = rng.randrange(HEADER_BYTES, len(data) - width + 1)
                struct.pack_into(code, data, place, rng.choice(_EDGES) & ((1 << 8 * width) - 1))
        elif what == 4:  # cut, with a header that admits it
            del data[HEADER_BYTES + rng.randrange(max(1, len(data) - HEADER_BYTES)) :]
            set_length(data)
        elif what == 5:  # longer, with a header that says so
            data += rng.randbytes(rng.choice((1, 4, 100, 5000)))
            set_length(data)
        elif what == 6:  # cut, with a header that does not
            del data[rng.randrange(len(data) + 1) :]
        elif what == 7 and len(data) > HEADER_BYTES:  # a piece twice
            end = rng.randrange(at, min(len(data), at + 64) + 1)
            data[at:at] = data[at:end]
            set_length(data)
        elif what == 8 and len(data) > HEADER_BYTES:  # a piece less
            del data[max(HEADER_BYTES, at) : max(HEADER_BYTES, at) + rng.randrange(1, 9)]
            set_length(data)
        elif what == 9:  # text that is no UTF-8, digests of nothing
            data += rng.choice((b"\xff\xfe\x80", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n"))
        else:
            rng.shuffle(view := list(data[HEADER_BYTES:]))
            data[HEADER_BYTES:] = bytes(view)
    return bytes(data)


def set_length(data: bytearray) -> None:
    """Make a frame's header say how long its body is."""
    if len(data) >= HEADER_BYTES:
        fields = list(HEADER.unpack_from(data))
        fields[-1] = len(data) - HEADER_BYTES
        HEADER.pack_into(data, 0, *fields)


def harmless(data: bytes) -> bool:
    """Would no server take it at its word?"""
    conn = Connection()
    conn.receive_data(data)
    try:
        while (frame := conn.next_frame()) is not None:
            if isinstance(decode(frame), _BELIEVED):
                return False
    except RemoteProtocolError:
        pass
    return True


def make(rng: random.Random) -> bytes:
    """What goes out on one connection."""
    message = sample(rng.choice(TYPES), rng)
    frame = encode(message, rng.randrange(1 << 32), flags=rng.choice((0, 0, 0, 1, 2)))
    if rng.random() < 0.9:
        frame = mutate(rng, frame)
    if rng.random() < 0.02:
        frame = rng.randbytes(rng.randrange(1, 2000))
    if rng.random() < 0.002:  # as large as a frame may be, and larger
        size = FRAME_BYTES_MAX + rng.choice((-1000, 0, 1, 100_000))
        frame = HEADER.pack(*HEADER.unpack_from(encode(M.Ping(1), 1))[:-1], size) + bytes(min(size, FRAME_BYTES_MAX))
    return frame


_PATHS: Final = ("/", "/metrics", "/healthz", "/readyz", "/leader", "/none", "/..%2f", "*", "/" + "a" * 5000)
_HEADERS: Final = (
    "Host: localhost", "Host: evil.example", "Host:", "Authorization: Bearer ", "Authorization: Bearer \xe9",
    "Content-Length: 18446744073709551616", "Transfer-Encoding: chunked", "Accept: application/openmetrics-text;q=x",
    "Expect: 100-continue", ": no name", "No colon",
)  # fmt: skip


def make_request(rng: random.Random) -> bytes:
    """An HTTP request, as often as not one that makes no sense."""
    lines = [f"{rng.choice(('GET', 'GET', 'HEAD', 'POST', ''))} {rng.choice(_PATHS)} {rng.choice(('HTTP/1.1', 'x'))}"]
    lines += rng.choices(_HEADERS, k=rng.choice((0, 1, 3, 300)))
    data = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1"))
    for _ in range(rng.choice((0, 0, 1, 5))):
        at = rng.randrange(len(data))
        what = rng.randrange(4)
        if what == 0:
            data[at] = rng.randrange(256)
        elif what == 1:
            del data[at : at + rng.randrange(1, 20)]
            data += b" "
        elif what == 2:
            data[at:at] = rng.choice((b"\0", b"\r\n", b"\n", b"%", rng.randbytes(50)))
        else:
            del data[at + 1 :]
    return bytes(data) if rng.random() < 0.98 else rng.randbytes(rng.randrange(1, 1 << 15))


def ask(address: Any, data: bytes) -> str:
    """Send a request, and wait for the end; "" when that was orderly: nothing, or a status that is no fault of ours."""
    said = b""
    try:
        with socket.create_connection(tuple(address), ANSWER_S) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed in the middle of more than it wanted to read
            while piece := sock.recv(1 << 16):
                said += piece
    except ConnectionResetError:
        pass  # what was sent beyond the mistake was not read
    except TimeoutError:
        return "no end"
    except OSError as exc:
        return f"no connection: {exc}"
    if said and not said.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4", b"HTTP/1.1 503 ")):
        return f"a malformed answer: {said[:40]!r}"
    return ""


class Opening:
    """How a connection to a server with tokens begins, up to one of ``STAGES``, and what may be heard there."""

    STAGES: Final = ("nothing", "asked", "proven")
    BEFORE: Final = (M.Error, M.Pong, M.Challenge)

    def __init__(self, stage: str, token: str, service: int, server: str) -> None:
        self.stage = stage
        self._asker = Asker(token, service, M.Role.CLIENT, server)

    def begin(self, sock: socket.socket) -> None:
        """Say it. Raises OSError."""
        if self.stage == "nothing":
            return
        sock.sendall(encode(self._asker.auth, 1))
        if self.stage == "asked":
            return
        conn = Connection()
        while (frame := conn.next_frame()) is None:
            conn.receive_data(sock.recv(1 << 16))
        prove = self._asker.prove(decode(frame))
        assert isinstance(prove, M.Prove), prove
        sock.sendall(encode(prove, 2) + _GREETING)

    def may_be_heard(self, msg: Any) -> bool:
        return self.stage == "proven" or isinstance(msg, self.BEFORE)


def send(address: Any, data: bytes, opening: Opening | None = None) -> str:
    """Send it and wait for the end; "" when that was orderly."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.settimeout(ANSWER_S)
    try:
        sock.connect(address if isinstance(address, str) else tuple(address))
        if opening is not None:
            opening.begin(sock)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass  # closed in the middle of more than it wanted to read
        conn = Connection()
        while True:
            try:
                answer = sock.recv(1 << 16)
            except ConnectionResetError:
                return ""  # what we sent beyond the mistake was not read
            if not answer:
                return ""
            conn.receive_data(answer)
            while (frame := conn.next_frame()) is not None:
                msg = decode(frame)
                if opening is not None and not opening.may_be_heard(msg):
                    return f"{type(msg).__name__} was answered to a stranger"
    except TimeoutError:
        return "no end"
    except SimmError as exc:
        return f"a malformed answer: {exc}"
    except OSError as exc:
        return f"no connection: {exc}"
    finally:
        sock.close()


def main() -> int:
    """See the module."""
    settings = json.loads(sys.argv[1])
    address = settings["address"]
    rng = random.Random(f"frames {settings['kind']} {settings['seed']}")
    sent = 0
    wrong: Counter[str] = Counter()
    first: list[str] = []
    while sent < settings["count"]:
        if settings["kind"] == "pages":
            sent += 1
            request = make_request(rng)
            if said := ask(address, request):
                wrong[said] += 1
                first.append(f"{said}: {request[:300].hex()}")
            continue
        frame = make(rng)
        if not harmless(frame):
            continue
        before = b""
        if rng.random() < 0.7:
            before = _GREETING
        if rng.random() < 0.2:
            before += _PINGS
        sent += 1
        opening = None
        if "token" in settings:
            opening = Opening(rng.choice(Opening.STAGES), settings["token"], settings["service"], settings["server"])
            if opening.stage == "proven":
                before = before.removeprefix(_GREETING)
        said = send(address, before + frame, opening)
        if said:
            wrong[said] += 1
            if len(first) < 5:
                first.append(f"{said}: {(before + frame)[:300].hex()}")
    print(json.dumps({"sent": sent, "wrong": dict(wrong), "first": first[:5]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
