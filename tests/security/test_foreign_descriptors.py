"""A descriptor that is not what its message needs costs its sender the connection, and the worker no descriptor.

Nor does it cost the worker the time that it takes to close, which its sender chooses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from simm.host.threads import CLOSER, WAITING_MAX, Closer
from simm.net.channel import Refused
from simm.rpc import encode
from simm.wire import messages as M
from tests.support.child import Child
from tests.support.other_user import command_as, let_through, needs_root
from tests.support.waiting import wait_until
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
        wait_until(lambda: held() == before, "the worker closes them")


#: Sends descriptors that take an hour to close, as the last who has them, and prints what it has sent; ends with stdin.
LINGER = """if True:
    import socket, struct, sys
    from simm.net.channel import Channel
    from simm.rpc import encode
    from simm.wire import messages as M
    from simm.wire.hello import client_hello
    path, what = sys.argv[1:]
    kept = []

    def lingering():
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        kept.append(listener.accept()[0])
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        ours.setblocking(False)
        try:
            while True:
                ours.send(bytes(1 << 16))
        except BlockingIOError:
            return ours

    def send(sock, data, count=1):
        made = [lingering() for _ in range(count)]
        socket.send_fds(sock, [data], [each.fileno() for each in made])
        for each in made:
            each.close()

    sock = socket.socket(socket.AF_UNIX)
    if what in ("data", "ring", "kick"):
        kept.append(Channel.unix(path, 60.0))
        sock = kept[-1].sock
        kept[-1].call(client_hello(M.Role.CLIENT, namespace="default", pid=os.getpid()))
    else:
        sock.connect(path)
    kept.append(sock)
    print("ready", flush=True)
    sys.stdin.readline()
    if what == "unread":  # behind what ends the connection
        sock.sendall(b"no frame of SiMM's")
        send(sock, b"x")
    elif what in ("data", "ring", "kick"):
        send(sock, encode({"data": M.DataAttach(0), "ring": M.RingAttach(1 << 20), "kick": M.Kick(1)}[what], 5))
    else:
        send(sock, b"S", 20 if what == "many" else 1)
        if what == "gone":
            sock.close()
    print("sent", flush=True)
    sys.stdin.read()
"""


@needs_root
@pytest.mark.parametrize("what", ["stranger", "many", "unread", "gone", "data", "ring", "kick"])
def test_descriptors_that_take_an_hour_to_close_hold_nobody_up(what: str) -> None:
    """Of another user, who may use the worker's socket by --group."""
    with WorkerThread() as worker:
        worker.worker.settings.any_uid = True
        let_through(Path(worker.folder))
        os.chmod(worker.path, 0o666)
        with Child(command_as(LINGER, worker.path, what), name="lingering", talks=True) as intruder:
            assert intruder.read_line().strip() == "ready"
            with worker.frozen():  # so that it is the last one who has them
                intruder.tell("go")
                assert intruder.read_line().strip() == "sent"
            for _ in range(3):
                with contextlib.closing(worker.session()) as session:
                    assert session.exchange(M.Exists([bytes(range(16))])).statuses == [M.Status.NOT_FOUND]
        wait_until(lambda: not CLOSER.waiting, "their owner has ended, and they are closed")


@pytest.mark.quick
@pytest.mark.parametrize("foreign", [True, False], ids=["foreign", "own"])
def test_one_connection_does_not_use_up_the_descriptors_of_a_worker(
    foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the data again and again, and none of its sockets is closed. The control is of the worker's user."""
    go_on = threading.Event()

    class Stuck(Closer):
        def _run(self) -> None:
            go_on.wait()
            super()._run()

    closer = Stuck()
    monkeypatch.setattr("simm.server.worker.CLOSER", closer)
    try:
        with WorkerThread() as worker:
            channel, welcome = worker.hello()
            with worker.frozen():
                worker.worker.peers[welcome.session].distrusted = foreign
            passed = 0
            refused = pytest.raises(Refused) if foreign else contextlib.nullcontext()
            with contextlib.closing(channel), refused as said:
                for _ in range(2 * WAITING_MAX):
                    ours, theirs = socket.socketpair()
                    with ours, theirs:
                        assert channel.call(M.DataAttach(0), fds=(theirs.fileno(),)) == M.Done(1)
                        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
                        for fd in fds:
                            os.close(fd)
                        passed += len(fds)
            assert said is None or said.value.status == M.Status.UNAVAILABLE, "it may come again"
            wait_until(lambda: not worker.worker.peers, "the connection is closed")
            assert not worker.loop.protocol_errors, "it has kept to the protocol"
            assert passed == closer.waiting == (WAITING_MAX + 1 if foreign else 2 * WAITING_MAX)
            go_on.set()
            wait_until(lambda: not closer.waiting, "they are closed")
    finally:
        go_on.set()
