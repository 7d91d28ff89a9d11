"""Prove on both sides of a new connection that a token is known, without showing it; then hold the peer to its rights.

    client                                            server
    AUTH   role, service, nonce, token's id    ->
                                               <-     CHALLENGE  service, nonce, a proof by that token
    PROVE  proof        HELLO                  ->
                                               <-     DONE       WELCOME

A proof is HMAC-SHA256, keyed with the token, of the side that proves, the service, the client's role, both nonces, and
the server that the client wants to speak with: a worker of one run of a data server (``WorkerInfo.server``), or any
manager.

* *Somebody squats the port of a server that is down.* It must prove first, and cannot. The client sends no proof then.
* *It passes everything on* to another data server, and the answer back. That one is not whom the map names. (A manager
  can be passed on to, as a client knows nothing of it but its address.)
* *A proof is replayed.* Both sides have drawn a nonce, so none fits a second connection.
* *A proof is reflected*, to its sender or to another kind of server. The side and the service are part of it. So is the
  role that the client has in HELLO.
* *The time of a comparison* says nothing: ``hmac.compare_digest``. The id is no secret, see ``config/tokens.py``.

Who has a client's token can pass for a server towards clients with that same token, as a proof is symmetric. It cannot
towards others: servers prove themselves to each other with a server's token, and to each client with that client's.

It authenticates the opening, not what follows: who can change packets between the two can take the connection over.

Then the :class:`Gate` knows the peer's token. ``wire/access.py`` has the role that each message takes.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Any, Final

from ..config.tokens import Token, TokenRole, token_id
from ..errors import RemoteProtocolError
from .access import fault_of_role
from .messages import Auth, Challenge, Done, Error, Hello, Prove, Role, Service, Status

PROOF_BYTES: Final = 32
_NONCE_BYTES: Final = 16
_BOUND: Final = struct.Struct("<HH16s16s")

_CLIENT: Final = b"simm auth client "
_SERVER: Final = b"simm auth server "

_WRONG: Final = "wrong or missing token: see --token-file"
#: What only data servers say that they are.
_OF_SERVERS: Final = frozenset((Role.STREAM, Role.SUPERVISOR, Role.MOVER))


def _proof(token: str, side: bytes, auth: Auth, nonce: bytes) -> bytes:
    bound = side + _BOUND.pack(auth.service, auth.role, auth.nonce, nonce) + auth.server.encode()
    return hmac.digest(token.encode(), bound, "sha256")


class Asker:
    """A client's side: a token, and the service, role and server that it is shown for. ``server``: empty for any."""

    def __init__(self, token: str, service: int, role: int, server: str = "") -> None:
        self._token = token
        self.auth = Auth(role, service, secrets.token_bytes(_NONCE_BYTES), token_id(token), server)

    def prove(self, msg: Any) -> Prove | str:
        """Return the answer to a CHALLENGE, or what is wrong with the server, to which no proof is shown."""
        if not isinstance(msg, Challenge):
            return "it answered AUTH with something else"
        expected = _proof(self._token, _SERVER, self.auth, msg.nonce)
        if not hmac.compare_digest(expected, msg.proof):
            has = "another token than this side" if msg.proof else "no token, and this side has one"
            return f"the server has {has}: see --token-file (SIMM_TOKEN_FILE)"
        return Prove(_proof(self._token, _CLIENT, self.auth, msg.nonce))


class Gate:
    """A server's side, of one connection. Without tokens it is open from the start, for every message."""

    __slots__ = ("_asked", "_auth", "_nonce", "_server", "_service", "_tokens", "open", "token")

    def __init__(self, service: int, tokens: Sequence[Token], server: str = "") -> None:
        self._server = server
        self.open = not tokens
        #: The token that the peer has proven.
        self.token: Token | None = None
        self._service = service
        self._tokens = tokens
        self._auth: Auth | None = None
        self._asked: Token | None = None
        self._nonce = b""

    def take(self, msg: Auth | Prove) -> tuple[Challenge | Done | Error, int]:
        """Return the answer to a message and its status. Close the connection after UNAUTHORIZED.

        Raises RemoteProtocolError for a message out of turn.
        """
        if isinstance(msg, Auth):
            return self._challenge(msg)
        auth, nonce, token = self._auth, self._nonce, self._asked
        if auth is None or not nonce:
            raise RemoteProtocolError("PROVE without a CHALLENGE")
        self._nonce = b""
        known = token is not None and token in self._tokens  # it may have been removed since AUTH
        if token is None or not known or not hmac.compare_digest(_proof(token.secret, _CLIENT, auth, nonce), msg.proof):
            return Error(_WRONG), Status.UNAUTHORIZED
        self.open, self.token = True, token
        return Done(1), Status.OK

    def _challenge(self, msg: Auth) -> tuple[Challenge | Error, int]:
        if self._auth is not None:
            raise RemoteProtocolError("a second AUTH on one connection")
        if msg.service != self._service:
            return Error(f"{Service.NAMES.get(self._service)} listens here"), Status.BAD_REQUEST
        if msg.server != self._server:
            return Error("another data server listens here than the map names"), Status.UNAVAILABLE
        asked = next((token for token in self._tokens if token.id == msg.token), None)
        if asked is None and self._tokens:
            return Error(_WRONG), Status.UNAUTHORIZED
        self._auth, self._asked, self._nonce = msg, asked, secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(asked.secret, _SERVER, msg, self._nonce) if asked is not None else b""
        return Challenge(self._service, self._nonce, proof), Status.OK

    def fault(self, hello: Hello) -> str:
        """Return why a HELLO is not accepted; empty if it is. The text never shows a token."""
        token = self.token
        if not self.open:
            return "tokens no longer travel in HELLO: upgrade the other side" if hello.token else _WRONG
        if self._auth is not None and hello.role != self._auth.role:
            return "HELLO names another role than AUTH"
        if token is None:
            return ""
        if hello.role in _OF_SERVERS and token.role < TokenRole.SERVER:
            return f"{token} is a {token.role}'s, and this peer says that it is a data server's process"
        if self._service == Service.MANAGER and not hello.namespace:
            return ""  # it names none there
        if not self.admits(hello.namespace):
            return f"{token} may not use the namespace {hello.namespace!r}: name one of its own (SIMM_NAMESPACE)"
        return ""

    def admits(self, namespace: str) -> bool:
        """Return True if the peer may use this namespace."""
        token = self.token
        return token is None or token.namespaces is None or namespace in token.namespaces

    @property
    def bound(self) -> bool:
        """Return True if the peer's token is bound to namespaces."""
        return self.token is not None and self.token.namespaces is not None

    def refusal(self, opcode: int) -> str:
        """Return why the peer may not send this message; empty if it may. O(1)."""
        token = self.token
        return fault_of_role(opcode, token.role, str(token)) if token is not None else ""
