"""A client tells the manager which map it has, so that a manager that has lost its state goes beyond it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.cluster.machine import Cluster
from simm.config.client_options import ClientOptions
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.manager import Manager
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rpc import Frame, decode, reply
from simm.sdk.manager_link import Subscription
from simm.sdk.routing import Router
from simm.wire import messages as M
from simm.wire.shard_set import EPOCHS_AHEAD
from tests.support.frame_server import FrameServer
from tests.support.machine import join, offer, run
from tests.support.ports import reserve_port
from tests.support.waiting import WAIT_S, wait_until

OWNERS = NO_OWNER.to_bytes(2, "little") * SHARD_COUNT


class CountingManager(FrameServer):
    """Answers each request for the map with one of the next epoch, and notes which epoch the client says it has."""

    def __init__(self, step: int) -> None:
        self.step, self.epoch = step, 100
        self.named: list[int] = []
        super().__init__()

    def on_frame(self, sock: socket.socket, frame: Frame, state: Any) -> None:
        msg = decode(frame)
        answer: Any = M.Welcome(1, 0, 0, 0, 0, 0, 0, "")
        if isinstance(msg, M.MapGet):
            self.named.append(msg.known_epoch)
            self.epoch += self.step
            answer = M.MapReply(self.epoch, 1, [], OWNERS)
        elif isinstance(msg, M.Ping):
            answer = M.Pong(msg.cookie)
        sock.sendall(reply(answer, frame.request_id))


@pytest.mark.parametrize(("step", "named"), [(1, [0, 101, 102, 103]), (-1, [0, 99, 99, 99])], ids=["newer", "older"])
def test_issue_each_request_names_the_epoch_of_the_newest_map(step: int, named: list[int]) -> None:
    """By the same link and by the next one. A map that is no news does not count."""
    manager, newest = CountingManager(step), 0

    def on_map(msg: M.MapReply) -> bool:
        nonlocal newest
        news = msg.epoch > newest
        newest = max(newest, msg.epoch)
        return news

    subscription = Subscription([manager.address], WAIT_S, "", on_map)
    try:
        subscription.connect(WAIT_S)
        subscription.start()
        subscription.refresh()
        wait_until(lambda: len(manager.named) == 2, "it asks again")
        manager.cut()
        wait_until(lambda: len(manager.named) == 3, "it asks by another link")
        subscription.refresh()
        wait_until(lambda: len(manager.named) == 4, "it asks again")
        assert manager.named[:4] == named
    finally:
        subscription.close()
        subscription.join(WAIT_S)
        manager.stop()


@contextlib.contextmanager
def serving(port: int, known: M.MapReply, chance: int) -> Iterator[Manager]:
    """A manager that has lost its state, and got it back from a server with an old map. It serves in a thread."""
    loop = Loop()
    with contextlib.closing(loop):
        manager = Manager(loop)
        manager.cluster = Cluster(chance + 1, loop.now, chance=lambda _bits: chance)
        manager.cluster.join(loop.now, join("b", 1, epoch=known.epoch))
        manager.cluster.offer(loop.now, offer(known))
        run(manager.cluster, loop.now, loop.now + 2.5)
        assert not manager.cluster.rebuilding and manager.cluster.cluster == known.cluster
        loop.listen(listen_tcp("127.0.0.1", port), manager)
        stop, far = socket.socketpair()
        with stop, far:
            loop.watch(far, lambda _mask: loop.stop())
            thread = threading.Thread(target=loop.run, daemon=True)
            thread.start()
            try:
                yield manager
            finally:
                stop.send(b"x")
                thread.join(WAIT_S)


def test_issue_a_manager_whose_epochs_went_back_goes_beyond_the_client_s() -> None:
    """Its state is lost twice. The server that comes back has the same map both times; chance takes it less far."""
    old = Cluster(77, 0.0)
    for name in "ab":
        old.join(0.0, join(name, 1))
    port = reserve_port()
    with serving(port, old.map_reply(), EPOCHS_AHEAD // 8 - 1) as manager:
        router = Router(ClientOptions(f"127.0.0.1:{port}", path="tcp", deadline_s=WAIT_S))
        before = manager.cluster.epoch
    try:
        assert router.epoch == before > EPOCHS_AHEAD // 8
        with serving(port, old.map_reply(), 0) as manager:
            assert manager.cluster.epoch < before
            wait_until(lambda: router.epoch > before, "the client takes a map of the second manager")
            assert router.epoch == manager.cluster.epoch and router.cluster == 77
    finally:
        router.close()
