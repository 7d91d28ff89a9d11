"""A server of frames in threads: what listens, accepts, reads frames and answers as a test likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from simm.rpc import Connection, Frame


class FrameServer:
    """Listens on loopback from the start, and serves each connection in a thread of its own.

    Subclasses answer in :meth:`on_frame`. ``state`` there is what :meth:`on_connect` has returned for the connection.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.links: list[socket.socket] = []
        #: For ``links``, and for what subclasses change in several threads.
        self.lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def on_connect(self) -> Any:
        """Return the state of a new connection."""

    def on_data(self, data: bytes) -> None:
        """Note bytes as they arrive."""

    def on_frame(self, sock: socket.socket, frame: Frame, state: Any) -> None:
        """Answer a frame. An OSError ends the connection."""
        raise NotImplementedError

    def cut(self) -> None:
        """Break all connections; accept new ones."""
        with self.lock:
            links, self.links = self.links, []
        for sock in links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def stop(self) -> None:
        """Stop: connections are refused."""
        with self.lock:
            self._open = False
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                sock = self.listener.accept()[0]
            except OSError:
                return
            with self.lock:
                if not self._open:
                    sock.close()
                    return
                self.links.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        conn, state = Connection(), self.on_connect()
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                self.on_data(data)
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    self.on_frame(sock, frame, state)
