"""How a client's connection ends. What it carries is tested with the client."""

from __future__ import annotations

import contextlib
import socket

import pytest

from simm.errors import TransportError
from simm.net.channel import Channel
from simm.wire import messages as M


@pytest.mark.parametrize("fails", [True, False])
def test_a_channel_that_failed_is_reset(fails: bool) -> None:
    """What it has not delivered must not arrive later; a sound one ends in the ordinary way."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        channel = Channel.tcp("127.0.0.1", listener.getsockname()[1], 0.2)
        server, _ = listener.accept()
        with contextlib.closing(server):
            if fails:
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                with pytest.raises(TransportError, match="deadline"):
                    while True:  # until nothing more fits on the way: the rest waits in our kernel
                        channel.send_raw(bytes(1 << 20))
            else:
                channel.submit(M.Ping(1))
            channel.close()
            server.settimeout(10)
            if fails:
                with pytest.raises(ConnectionResetError):
                    while server.recv(1 << 20):
                        pass
            else:
                assert len(server.recv(1000)) > 20 and server.recv(1000) == b""
