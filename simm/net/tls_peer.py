"""Connections of the event loop with TLS. Without TLS this module loads no ``ssl``.

A :class:`TlsPeer` is a stranger from its first byte: the handshake and HELLO together have the time and the place that
a HELLO has (``net/admission.py``). OpenSSL may keep a part of a record that it has decrypted, which no selector
reports. So a peer that has been read, or that may be read again, looks whether there is such a part.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from typing import TYPE_CHECKING, Final, cast

from ..config.parsers import TlsOptions
from ..rpc import reply
from ..wire import messages as M
from .loop import Loop, PeerMaker
from .peer import Peer, Service

if TYPE_CHECKING:
    from .tls import Context, Handshake, LoopSocket

log = logging.getLogger("simm.net.loop")

#: What clients without TLS are told.
TLS_ONLY: Final = "this port takes TLS only: give --tls-ca (SIMM_TLS_CA), the authority that signed its certificate"


class ServerTls:
    """A server's contexts: for its ports, for its pages, and for its way to a manager. Raises ConfigError.

    The last one does not show the server's certificate: a token proves who a client is.
    """

    def __init__(self, options: TlsOptions) -> None:
        from .tls import Context, for_loops, for_pages, for_ports  # only a server with TLS has need of it

        self.ports = Context(options, for_ports)
        self.pages = Context(options, for_pages)
        #: What its movers need.
        self.movers = TlsOptions(options.ca, name=options.name)
        self.manager = for_loops(self.movers) if options.ca else None

    def certificate_ends(self) -> float | None:
        """Return when the certificate ends that new connections are shown, seconds since 1970; None if it is odd."""
        return self.ports.ends()


def server_tls(options: TlsOptions | None) -> ServerTls | None:
    """Return what a server with these options needs, None without any. Raises ConfigError."""
    return None if options is None else ServerTls(options)


def accepting(tls: ServerTls | None) -> PeerMaker:
    """Return what makes a peer of an accepted socket."""
    if tls is None:
        return Peer
    from .tls import ServerHandshake

    context = tls.ports

    def make(loop: Loop, sock: socket.socket, service: Service, address: str) -> Peer:
        return TlsPeer(loop, service, address, ServerHandshake(sock, context), server=True)

    return make


def connecting(context: Context | None, host: str) -> PeerMaker:
    """Return what makes a peer of a socket that is connected to ``host``, as its address names it."""
    if context is None:
        return Peer
    from .tls import ClientHandshake

    def make(loop: Loop, sock: socket.socket, service: Service, address: str) -> Peer:
        return TlsPeer(loop, service, address, ClientHandshake(sock, context, host), server=False)

    return make


class TlsPeer(Peer):
    """One connection with TLS. What its service sends during the handshake follows it."""

    __slots__ = ("_due", "_early", "_handshake", "_server")

    def __init__(self, loop: Loop, service: Service, address: str, handshake: Handshake, *, server: bool) -> None:
        super().__init__(loop, handshake.sock, service, address)
        self._handshake: Handshake | None = handshake
        self._server = server
        self._early: list[bytes | memoryview] = []
        #: A look at what OpenSSL keeps is due in the next turn.
        self._due = False
        if not server:
            loop.call_later(0.0, self._begin)

    def send(self, data: bytes | memoryview) -> None:
        """Send as much as the socket accepts and queue the rest; everything during the handshake."""
        if self._handshake is None:
            super().send(data)
        elif not self.closed:
            self._early.append(data)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading this peer."""
        super().pause(paused)
        self._look_again()

    def close(self, reason: str = "closed") -> None:
        """Close now and discard queued output."""
        self._early.clear()
        super().close(reason)

    # -- loop side --------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.closed and self._handshake is not None:
            self._shake(self._handshake)

    def _flush(self) -> None:
        if self._handshake is not None:
            self._shake(self._handshake)
            return
        self._tls.new_turn()
        super()._flush()
        self._look_again()

    def _readable(self) -> None:
        if self._handshake is not None:
            self._shake(self._handshake)
            return
        self._tls.new_turn()
        super()._readable()
        self._look_again()

    def _parse(self) -> None:
        super()._parse()
        self._look_again()

    @property
    def _tls(self) -> LoopSocket:
        return cast("LoopSocket", self.sock)

    def _look_again(self) -> None:
        """Read in the next turn what OpenSSL keeps, if this peer is read at all, and all that was read is parsed."""
        if self.closed or self._due or self._handshake is not None or not self.wants & selectors.EVENT_READ:
            return
        if self.parse_more:
            return  # _parse() looks again
        if self._tls.pending():
            self._due = True
            self.loop.call_later(0.0, self._read_on)

    def _read_on(self) -> None:
        self._due = False
        if self.closed or not self.wants & selectors.EVENT_READ:
            return
        self.attempt(self._readable)

    def _shake(self, handshake: Handshake) -> None:
        """Go on with the handshake."""
        from .tls import PlainText, SaidNothing

        try:
            wants = handshake.step()
        except PlainText as exc:
            self._refuse(exc.head, str(exc))
            return
        except SaidNothing as exc:  # a probe of the port is no mistake of a peer
            log.debug("closing %s: %s", self.address, exc)
            self.close(str(exc))
            return
        except OSError as exc:
            self.sock = handshake.sock
            self._failed(exc.strerror or str(exc))
            return
        self.sock = handshake.sock
        if wants:
            self._wait_for(wants)
            return
        self._handshake = None
        self._tls.new_turn()
        self.loop.update(self)
        early, self._early = self._early, []
        for data in early:
            super().send(data)

    def _wait_for(self, wants: int) -> None:
        if wants != self.wants:
            self.loop.selector.modify(self.sock, wants, self)
            self.wants = wants

    def _failed(self, why: str) -> None:
        if self._server:
            self.loop.protocol_errors += 1
            self.loop.noise(logging.WARNING, "closing %s: %s", self.address, why)
        self.close(why)

    def _refuse(self, head: bytes, why: str) -> None:
        """Tell a client of SiMM in plain text what is wrong: it waits for an answer."""
        if head[:4] == b"SiMM"[: len(head)]:
            with contextlib.suppress(OSError):
                self.sock.recv(1 << 16)  # unread input would turn the answer into a reset
                self.sock.send(reply(M.Error(TLS_ONLY), 0, M.Status.BAD_REQUEST))
                self.sock.shutdown(socket.SHUT_WR)
        self._failed(why)
