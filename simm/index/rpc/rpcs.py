"""The index by gRPC: llm-d's service ``indexer.v1.IndexerService``, for questions with tokens (``protobuf``).

It has what ``POST /score`` answers, of endpoints alone: a pool of a shared store is no pod. Bounds are those of HTTP:
a message has ``BODY_BYTES_MAX``, so many calls are taken at a time, and so many connections. A mistake is the status
INVALID_ARGUMENT with a sentence.

A caller may begin a call and never send its message. The library waits for that without a limit of time, in a thread of
its pool, and before anybody can look at the token. So here the token comes first, then the message; there are threads
for all calls; and of too many that have sent no message the oldest gives way. A connection without calls ends after
a minute: else few of them would keep all others out for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import unquote

from ...config.parsers import Address
from ...config.tokens import Token
from ...errors import SimmError, UsageError
from ...net.http import CONNECTIONS_MAX
from ...net.local_users import LocalUsers
from ...net.peer_uid import HasClosed
from ...wire.hello import token_fits
from ..service import BODY_BYTES_MAX, Service
from ..sources import NO_INSTANCES
from .library import grpc
from .protobuf import answer, question

log = logging.getLogger("simm.index.rpc.rpcs")

SERVICE: Final = "indexer.v1.IndexerService"
METHOD: Final = "GetPodScores"
#: Calls at a time; others are refused with RESOURCE_EXHAUSTED. Each may have a message of 8 MiB.
CALLS_MAX: Final = 16
#: Of these so many may have sent no message yet.
WAITING_MAX: Final = 8
_CLOSE_S: Final = 2.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", BODY_BYTES_MAX), ("grpc.max_send_message_length", BODY_BYTES_MAX),
    ("grpc.max_concurrent_streams", CALLS_MAX), ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX), ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0), ("grpc.max_connection_idle_ms", 60_000),
)  # fmt: skip


class Rpcs:
    """The server. Its threads call ``service``.

    Args:
        at: where to listen.
        tokens: one of which callers show, as the metadata ``authorization: Bearer TOKEN``; none: everybody may call.
            Each call asks for what there is then.
        users: whose processes need no token, for a server on loopback; None: nobody's.

    Raises SimmError for an address that cannot be bound.
    """

    def __init__(
        self, service: Service, at: Address, tokens: Sequence[Token] = (), users: LocalUsers | None = None
    ) -> None:
        self._service = service
        self._users = users
        self._tokens = tokens
        self._lock = threading.Lock()
        #: The calls whose message has not come, in order of arrival.
        self._waiting: dict[Any, None] = {}
        pool = ThreadPoolExecutor(CALLS_MAX, "simm-index-grpc")
        self._server = grpc.server(pool, options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        # Without a deserializer: grpc would hide what is wrong with a message.
        handlers = {METHOD: grpc.stream_unary_rpc_method_handler(self._scores)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(str(at))
        except RuntimeError as exc:
            port = 0
            log.debug("%s", exc)
        if not port:
            self._server.stop(None)
            raise SimmError(f"cannot listen on {at}: free it, or choose another --grpc (port 0 is any free one)")
        self.address = at._replace(port=port)
        self._server.start()

    def _scores(self, messages: Iterator[bytes], context: Any) -> bytes:
        if fault := self._fault(context):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)
        raw = self._message(messages, context)
        with self._lock:
            self._service.count(f"{SERVICE}/{METHOD}")
        try:
            if raw is None:
                raise UsageError("the call has no message")
            found = self._service.score(question(raw))["scores"]
            return answer(
                (each["pod"], each["score"]) for each in found if not each["pod"].startswith(NO_INSTANCES)
            )  # fmt: skip
        except UsageError as exc:
            fault, text = grpc.StatusCode.INVALID_ARGUMENT, str(exc)
        except Exception:
            log.exception("a call failed")
            fault, text = grpc.StatusCode.INTERNAL, "internal error"
        context.abort(fault, text)
        raise AssertionError("abort() raises")

    def _message(self, messages: Iterator[bytes], context: Any) -> bytes | None:
        """Return the message of a call, None if it has none. Raises what the library does for a call that has ended."""
        with self._lock:
            self._waiting[context] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > WAITING_MAX else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            oldest.cancel()
        try:
            return next(messages, None)
        finally:
            with self._lock:
                self._waiting.pop(context, None)

    def _fault(self, context: Any) -> str:
        """Return why a call is not answered; empty if it is."""
        if self._tokens and self._allowed(context):
            return ""
        if self._users is None:
            return "authorization: Bearer TOKEN is required" if self._tokens else ""
        host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
        there = host.strip("[]"), int(port)
        here = self.address.host if self.address.host != "localhost" else "::1" if ":" in there[0] else "127.0.0.1"
        try:
            return self._users.fault_of(there, (here, self.address.port), tokens=bool(self._tokens))
        except HasClosed as exc:
            return str(exc)

    def _allowed(self, context: Any) -> bool:
        for key, value in context.invocation_metadata():
            scheme, _, given = str(value).strip().partition(" ")
            if key == "authorization" and scheme.lower() == "bearer":
                tokens = self._tokens[:]  # those of one moment, as another thread follows their file
                return token_fits([token.secret.encode() for token in tokens], given.strip().encode())
        return False

    def close(self) -> None:
        """Take no more calls, and wait for those that run."""
        self._server.stop(_CLOSE_S).wait()
