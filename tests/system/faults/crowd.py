"""Very many connections, held by a few processes: ``python -m tests.system.faults.crowd '{"kind": "manager", ...}'``.

    manager   TCP connections that subscribe to the map and read what is pushed; ``again``: once more when they break
    sessions  sessions with one worker over its UNIX socket, each with its mapping, its commit ring and a value put
    busy      clients, each with a thread that puts and gets a value of its own without end, half of them by TCP
    churn     connections to all of these, made and closed at once, ``rate`` a second

Commands come on stdin, one a line; each is answered by a line of JSON: ``epoch N`` when every connection has a map of
epoch N or later, ``put`` when every session has put once more, ``count`` by the clients' calls so far, ``close``, and
at the end of the input the process ends, in an orderly way. A churn runs on its own and says at its end what it did.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import select
import socket
import sys
import threading
import time
from typing import Any

from simm.arena.hashing import Hasher
from simm.client import Client
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.rpc import Connection, encode
from simm.wire import messages as M
from tests.support.seen_maps import SeenMaps

#: A bound for what hangs, seconds; less than whoever asks waits for an answer.
WAIT_S = 150.0


class Subscribers:
    """Connections to a manager."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.poller = select.epoll()
        self.socks: dict[int, socket.socket] = {}
        self.conns: dict[int, Connection] = {}
        self.epochs: dict[int, int] = {}
        self.maps = SeenMaps()
        self.address = settings["host"], settings["port"]
        #: Connections that are lost and not yet made again, and whether they are made again.
        self.lost = 0
        self.again = settings.get("again", False)
        for number in range(settings["count"]):
            self.connect()
            if number % 16 == 0:
                self.read(0)
        self.await_epoch(1)

    def connect(self) -> None:
        """Make one connection, and subscribe."""
        sock = socket.create_connection(self.address, WAIT_S)
        sock.sendall(encode(M.MapGet(0, 1), 1))
        sock.setblocking(False)
        self.socks[sock.fileno()] = sock
        self.conns[sock.fileno()] = Connection()
        self.epochs[sock.fileno()] = 0
        self.poller.register(sock, select.EPOLLIN)

    def reconnect(self) -> None:
        """Make some of the lost connections again, if the manager accepts them."""
        with contextlib.suppress(OSError):
            for _ in range(min(self.lost, 16)):
                self.connect()
                self.lost -= 1

    def read(self, timeout_s: float) -> None:
        """Take what there is: answers and pushes, all of them maps."""
        for fd, _ in self.poller.poll(timeout_s):
            try:
                data = self.socks[fd].recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self.poller.unregister(fd)
                self.socks.pop(fd).close()
                self.lost += 1
                continue
            conn = self.conns[fd]
            conn.receive_data(data)
            while (frame := conn.next_frame()) is not None:
                self.epochs[fd] = self.maps.see(frame)

    def await_epoch(self, epoch: int) -> dict[str, Any]:
        """Until all have it."""
        until = time.monotonic() + WAIT_S
        while (self.lost and self.again) or any(self.epochs[fd] < epoch for fd in self.socks):
            if time.monotonic() > until:
                break
            self.read(0.05)
            if self.again:
                self.reconnect()
        late = sum(self.epochs[fd] < epoch for fd in self.socks)
        seen = {"maps": self.maps.sums, "faults": self.maps.faults}
        return {"at": time.monotonic(), "late": late, "lost": self.lost, "open": len(self.socks), **seen}

    def command(self, words: list[str]) -> dict[str, Any]:
        """See the module."""
        return self.await_epoch(int(words[1]) if words[0] == "epoch" else 0)

    def close(self) -> None:
        """All of them."""
        for sock in self.socks.values():
            sock.close()


class Sessions:
    """Sessions with a worker."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.digest = Hasher("crowd")
        self.first = settings["first"]
        self.sessions = [
            WorkerSession(settings["uds"], "crowd", WAIT_S, ring=settings.get("ring", True))
            for _ in range(settings["count"])
        ]
        self.put()

    def put(self) -> dict[str, Any]:
        """One value by each: a grant, a copy, a commit."""
        statuses: dict[int, int] = {}
        for number, session in enumerate(self.sessions):
            session.ask([(100, 1)])
            grant = session.pool.take(100)
            assert grant is not None
            start = grant[1] - session.reader.data_offset
            session.begin_copy()
            session.reader.data[start : start + 100] = bytes([number & 255]) * 100
            session.end_copy()
            entry = (self.digest(f"{self.first + number}"), grant[0], 100, 0, 0, 0)
            (status,) = session.exchange(M.Commit([entry], [])).statuses
            statuses[status] = statuses.get(status, 0) + 1
        return {"at": time.monotonic(), "statuses": statuses, "open": len(self.sessions)}

    def command(self, words: list[str]) -> dict[str, Any]:
        """See the module."""
        return self.put()

    def close(self) -> None:
        """All of them."""
        for session in self.sessions:
            session.close()


class Busy:
    """Clients in the middle of calls."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.counts = {"done": 0, "wrong": 0, "raised": 0}
        self.over = threading.Event()
        paths = itertools.cycle(("shm", "tcp"))
        self.clients = [Client(settings["manager"], path=next(paths)) for _ in range(settings["count"])]
        self.threads = [threading.Thread(target=self.run, args=each) for each in enumerate(self.clients)]
        for thread in self.threads:
            thread.start()

    def run(self, number: int, client: Client) -> None:
        """Put and get. A put may fail and a get may miss; nothing else may happen."""
        value = b"%d " % number * 10_000
        while not self.over.is_set():
            try:
                client.put(f"busy/{number}", value)
                if client.get(f"busy/{number}") not in (None, value):
                    self.counts["wrong"] += 1
            except Exception:
                self.counts["raised"] += 1
            self.counts["done"] += 1
            time.sleep(0.03)  # a hundred of them leave a processor to the servers

    def command(self, words: list[str]) -> dict[str, Any]:
        """See the module."""
        return self.counts

    def close(self) -> None:
        """All of them."""
        self.over.set()
        for thread in self.threads:
            thread.join()
        for client in self.clients:
            client.close()


def churn(settings: dict[str, Any]) -> dict[str, Any]:
    """Connections that come and go, by turns to each target, half of them without a word."""
    targets = settings["targets"]
    rate, seconds = settings["rate"], settings["seconds"]
    done = failed = 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if done > (now - began) * rate:
            time.sleep(0.001)
            continue
        target = targets[done % len(targets)]
        done += 1
        try:
            if isinstance(target, str):
                channel = Channel.unix(target, WAIT_S)
            else:
                channel = Channel.tcp(target[0], target[1], WAIT_S)
            with contextlib.closing(channel):
                if done // len(targets) % 2:
                    channel.call(M.Ping(done))
        except Exception:
            failed += 1
    return {"done": done, "failed": failed, "seconds": time.monotonic() - began}


def main() -> int:
    """See the module."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = json.loads(sys.argv[1])
    if settings["kind"] == "churn":
        print(json.dumps(churn(settings)), flush=True)
        return 0
    crowd = {"manager": Subscribers, "sessions": Sessions, "busy": Busy}[settings["kind"]](settings)
    print(json.dumps({"open": settings["count"]}), flush=True)
    for line in sys.stdin:
        words = line.strip('"\n').split()
        if words[0] == "close":
            crowd.close()
            print(json.dumps({"open": 0, **(crowd.counts if isinstance(crowd, Busy) else {})}), flush=True)
        else:
            print(json.dumps(crowd.command(words)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
