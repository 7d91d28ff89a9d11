"""The small HTTP server when all its places are taken. What it answers is tested with the manager's pages."""

from __future__ import annotations

import contextlib
import socket

import psutil
import pytest

from simm.net.http import CONNECTIONS_MAX, Page, Web, process_samples, prometheus
from simm.net.loop import Loop


def test_a_newcomer_gets_the_place_of_the_oldest() -> None:
    """Idle connections in all places do not keep a probe out, and what they held is closed."""
    loop = Loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        web = Web(loop, listener, {"/healthz": lambda: Page("ok")})
        stack.callback(web.close)
        idle = [
            stack.enter_context(contextlib.closing(socket.create_connection(listener.getsockname())))
            for _ in range(CONNECTIONS_MAX)
        ]
        while web.connections < CONNECTIONS_MAX:
            loop.run_once(0.1)
        assert web.displaced == 0
        with contextlib.closing(socket.create_connection(listener.getsockname())) as probe:
            probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            probe.setblocking(False)
            answer = b""
            for _ in range(100):
                loop.run_once(0.1)
                with contextlib.suppress(BlockingIOError):
                    answer += probe.recv(4096)
                if answer.endswith(b"ok"):
                    break
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")
        assert web.displaced == 1 and web.connections == CONNECTIONS_MAX - 1
        with pytest.raises(ConnectionResetError):  # the oldest had to go, at once
            idle[0].recv(1)
        idle[1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert idle[1].recv(1), "the others stay"


def test_the_process_is_reported_as_prometheus_expects() -> None:
    found = {name: (kind, value) for name, kind, _, labels, value in process_samples() if not labels}
    own = psutil.Process()
    assert found["process_start_time_seconds"] == ("gauge", own.create_time())
    assert found["process_resident_memory_bytes"][1] > 1 << 20
    assert found["process_virtual_memory_bytes"][1] >= found["process_resident_memory_bytes"][1]
    assert 0 < found["process_open_fds"][1] <= found["process_max_fds"][1]
    assert found["process_cpu_seconds_total"][0] == "counter" and found["process_cpu_seconds_total"][1] > 0
    assert found["process_threads"][1] >= 1
    text = prometheus(process_samples())
    assert text.count("# TYPE process_") == len(found) == 7


def test_a_system_that_does_not_tell_costs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "num_fds", denied)
    assert process_samples() == []
