"""What peers of a publisher may say: in pieces of any size, cut short, damaged, too much, and by a real library."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index.publish import zmtp  # noqa: E402
from simm.index.publish.zmtp import BadPeer, Decoder, Pong, Subscription, command, frames, header  # noqa: E402

QUESTION = [b"", (7).to_bytes(8, "big")]
SUBSCRIBER = zmtp.GREETING + zmtp.ready("SUB") + frames(b"\1kv@") + command(b"\x09SUBSCRIBEab")
SUBSCRIBER += command(b"\x04PING\0\1context") + frames(b"\0kv@") + command(b"\x06CANCELab") + command(b"\x05LATERx")
ASKER = zmtp.GREETING + zmtp.ready("DEALER") + frames(*QUESTION) + frames(b"x" * 300)
SAID = [
    Subscription(True, b"kv@"), Subscription(True, b"ab"), Pong(command(b"\x04PONGcontext")),
    Subscription(False, b"kv@"), Subscription(False, b"ab"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_what_is_said_in_pieces(size: int) -> None:
    for kind, raw, wanted in (("PUB", SUBSCRIBER, SAID), ("ROUTER", ASKER, [QUESTION, [b"x" * 300]])):
        decoder = Decoder(kind)
        said = [each for at in range(0, len(raw), size) for each in decoder.feed(raw[at : at + size])]
        assert said == wanted and decoder.open


@pytest.mark.parametrize(("kind", "raw"), [("PUB", SUBSCRIBER), ("ROUTER", ASKER)])
def test_what_is_cut_short_is_waited_for(kind: str, raw: bytes) -> None:
    whole = list(Decoder(kind).feed(raw))
    for end in range(1, len(raw)):
        decoder = Decoder(kind)
        said = list(decoder.feed(raw[:end]))
        assert said == whole[: len(said)] and said + list(decoder.feed(raw[end:])) == whole


@pytest.mark.parametrize(("kind", "raw"), [("PUB", SUBSCRIBER), ("ROUTER", ASKER)])
def test_what_is_damaged_is_refused_or_means_something_else(kind: str, raw: bytes) -> None:
    """Never another exception, and never more than a frame that is kept."""
    rng = random.Random(3)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(len(raw))] = rng.randrange(256)
        decoder = Decoder(kind)
        try:
            for at in range(0, len(damaged), 50):
                list(decoder.feed(bytes(damaged[at : at + 50])))
        except BadPeer:
            refused += 1
        assert len(decoder._left) <= zmtp.FRAME_BYTES_MAX + 9 and len(decoder._parts) <= zmtp.FRAMES_MAX + 1
    assert refused > 500


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "does not greet"), (b"\xff" + bytes(9) + b"\3", "does not greet"),
        (zmtp.GREETING[:10] + b"\1", "older than 3.0"), (zmtp.GREETING.replace(b"NULL", b"CURV"), "security"),
        (zmtp.GREETING + frames(b"x"), "does not say READY"), (zmtp.GREETING + zmtp.ready("PUB"), "nothing to do with"),
        (zmtp.GREETING + command(b"\x05READY\x0bSocket-Type\0\0\0\x09SUB"), "cut short"),
        (SUBSCRIBER + header(1 << 40), f"a frame of {1 << 40} bytes"), (SUBSCRIBER + b"\xff\x01a", "the flags 255"),
        (SUBSCRIBER + b"\x05\x01a", "the flags 5"), (SUBSCRIBER + command(b"\x05ERROR\x03bad"), "it says"),
        (SUBSCRIBER + frames(*[b"x"] * 9), "more than 8 frames"),
    ],
)  # fmt: skip
def test_who_speaks_wrong_is_told_apart(raw: bytes, why: str) -> None:
    with pytest.raises(BadPeer, match=why):
        list(Decoder("PUB").feed(raw))


def test_frames_as_the_standard_has_them() -> None:
    assert frames(b"ab", b"") == b"\1\2ab\0\0"
    assert frames(b"x" * 256) == b"\2" + (256).to_bytes(8, "big") + b"x" * 256
    assert len(zmtp.GREETING) == zmtp.GREETING_BYTES
