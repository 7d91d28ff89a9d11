"""A descriptor that is not what its message needs costs its sender the connection, and the worker no descriptor."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from simm.rpc import encode
from simm.wire import messages as M
from tests.support.worker_thread import WorkerThread


@pytest.mark.quick
@pytest.mark.parametrize("msg", [M.DataAttach(0), M.RingAttach(1 << 20)], ids=["data", "ring"])
def test_the_worker_keeps_no_foreign_descriptor(msg: M.DataAttach | M.RingAttach) -> None:
    with WorkerThread() as worker, open("/dev/null", "rb") as foreign:
        theirs = os.readlink(f"/proc/self/fd/{foreign.fileno()}")

        def held() -> int:
            count = 0
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    count += os.readlink(f"/proc/self/fd/{name}") == theirs
            return count

        before = held()
        for _ in range(3):
            channel, _ = worker.hello()
            with contextlib.closing(channel):
                socket.send_fds(channel.sock, [encode(msg, 99)], [foreign.fileno()])
                while channel.sock.recv(1 << 16):
                    pass  # the refusal, until the worker closes
        assert held() == before
