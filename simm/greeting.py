"""What every server decides about a HELLO: which protocol is spoken, and whether the token is one of ours."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from . import messages as M


def agreed_protocol(hello: M.Hello, who: str) -> tuple[int, str]:
    """(highest common protocol, "") or (0, the refusal's text); ``who`` names the side that answers."""
    proto = min(hello.proto_max, M.PROTOCOL_MAX)
    if proto >= max(hello.proto_min, M.PROTOCOL_MIN):
        return proto, ""
    return 0, (
        f"peer speaks protocol {hello.proto_min} to {hello.proto_max}, this {who} {M.PROTOCOL_MIN} to "
        f"{M.PROTOCOL_MAX}: upgrade the older side"
    )


def token_fits(tokens: Iterable[bytes], given: bytes) -> bool:
    """Is ``given`` one of the tokens? All are compared, so that the time says nothing about which one was near."""
    return any([hmac.compare_digest(token, given) for token in tokens])  # noqa: C419
