"""A manager that answers as told, and a data server without anything in it, for tests of the session between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Callable
from typing import Any

from simm.cluster.assignment import Member
from simm.cluster.shard_map import pack_since
from simm.constants import SHARD_COUNT
from simm.net.loop import Loop
from simm.rpc import Connection, Flag, decode, encode, reply
from simm.server.membership import Membership
from simm.wire import messages as M
from simm.wire.auth import Gate
from simm.wire.epoch_messages import NamespaceEpoch
from simm.wire.messages import MapReply, WorkerInfo
from tests.support.tokens import old_tokens

INFO = WorkerInfo(0, 0, 1, 7, 1 << 30, "n", "", "127.0.0.1", 1)


def make_map(epoch: int, since: int = 1) -> MapReply:
    owners = array("H", [0] * SHARD_COUNT)
    return MapReply(epoch, 5, [INFO], owners.tobytes(), (), pack_since(array("Q", [since] * SHARD_COUNT)))


class Manager:
    """Answers as told: ``answers`` maps a message's type to (answer, status), None for silence."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.heard: list[Any] = []
        self.token = ""
        self.answers: dict[type, Any] = {
            M.Hello: (M.Welcome(1, 0, 0, 0, 0, 0, 0, ""), 0),
            M.Ping: (M.Pong(0), 0),
            M.Join: (M.Joined(3, 50, 0), 0),
            M.Heartbeat: (M.HeartbeatAck(3), 0),
            M.MapGet: (make_map(3), 0),
            **dict.fromkeys((M.MapOffer, M.Moved, M.Leave), (M.Done(1), 0)),
        }
        self.links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = self.listener.accept()[0]
                self.links.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        conn = Connection()
        gate = Gate(M.Service.MANAGER, old_tokens(self.token) if self.token else ())
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    msg = decode(frame)
                    self.heard.append(msg)
                    said = gate.take(msg) if isinstance(msg, M.Auth | M.Prove) else self.answers[type(msg)]
                    if said is not None:
                        sock.sendall(reply(said[0], frame.request_id, said[1]))

    def push(self, msg: Any) -> None:
        self.links[-1].sendall(encode(msg, 0, flags=Flag.PUSH))

    def of(self, kind: type) -> list[Any]:
        return [msg for msg in self.heard if isinstance(msg, kind)]

    def hang_up(self) -> None:
        for sock in self.links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.links.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.hang_up()


class House:
    """A data server without anything in it; drives the loop."""

    def __init__(self, managers: list[tuple[str, int]], *, start: bool = True, **arguments: Any) -> None:
        self.loop, self.member, self.up = Loop(), Member("n", 7, [0]), True
        self.orders: list[M.Shards] = []
        self.gave_up, self.frozen_by = "", 0
        self.reports: list[M.Moved] = []
        self.known: list[NamespaceEpoch] = []
        self.stored_epoch = 0
        self.leases: list[int] = []
        self.resolved: dict[str, str] = {}
        self.membership = Membership(self.loop, self.member, self, managers, **arguments)
        if start:
            self.membership.start()

    def infos(self) -> list[WorkerInfo] | None:
        return [INFO] if self.up else None

    def taken(self) -> int:
        return self.member.epoch

    def stored(self) -> int:
        return self.stored_epoch

    def loads(self) -> list[M.WorkerLoad]:
        return [M.WorkerLoad(1, 2, 3, 4)]

    def moved(self) -> list[M.Moved]:
        return self.reports

    def frozen(self) -> int:
        return self.frozen_by

    def epochs(self, cluster: int) -> list[NamespaceEpoch]:
        return self.known

    def on_lease(self) -> None:
        self.leases.append(self.membership.lease.until(1000))

    def on_map(self) -> None:
        self.orders.append(self.member.order(0))

    def on_abandoned(self) -> None:
        self.orders.append(self.member.order(0))
        self.up = False

    def give_up(self, why: str) -> None:
        self.gave_up = why

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        self.loop.call_later(0.0, lambda: callback(self.resolved.get(host, "")))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
        end = self.loop.clock() + timeout_s
        while not condition():
            assert self.loop.clock() < end, f"not in time: {what}; {self.membership!r}"
            self.loop.run_once(0.02)
