"""Whom a data server takes orders from, and that it shows signs of life while its workers change."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from simm.rpc import Flag, encode
from simm.wire import admin_messages as A
from simm.wire import epoch_messages as E
from simm.wire import messages as M
from tests.support.fake_manager import House, Manager

ORDERS = E.Epochs(9, 5, 0, [E.NamespaceEpoch("team", 1 << 40)]), A.OrderSettings(5, A.GROW, "64M")


@pytest.fixture
def world() -> Iterator[tuple[Manager, ExitStack]]:
    with ExitStack() as stack:
        made = stack.enter_context(closing(Manager()))
        yield made, stack


class Impostor(Manager):
    """Gives orders at once, and answers nothing."""

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError):
            for msg in ORDERS:
                sock.sendall(encode(msg, 0, flags=Flag.PUSH))
            while sock.recv(1 << 16):
                pass


@pytest.mark.parametrize("token", ["", "a token of ours"])
@pytest.mark.parametrize("kind", [Manager, Impostor])
def test_orders_of_who_has_not_shown_who_it_is(token: str, kind: type[Manager]) -> None:
    """Any process can listen where the manager is down, and say something before it is asked who it is."""
    with closing(kind()) as manager:
        manager.token = token
        manager.answers[A.SettingsDone] = (M.Done(1), 0)
        house = House([manager.address], token=token)
        taken: list[str] = []

        def take(msg: A.OrderSettings) -> A.SettingsDone:
            taken.append(msg.name)
            return A.SettingsDone(msg.order, 0, b"[]")

        house.membership.on_order = take
        with closing(house.loop):
            if kind is Manager:
                house.until(lambda: house.membership.joined, "joined")
                for msg in ORDERS:
                    manager.push(msg)
                house.until(lambda: taken, "the positive control: the order is carried out")
                assert house.member.epochs is not None
            else:
                house.until(lambda: len(manager.links) > 1 or taken, "another connection")
                assert not taken and house.member.epochs is None


def test_heartbeats_go_on_while_a_worker_is_down(world: tuple[Manager, ExitStack]) -> None:
    """No JOIN can be sent then. A server that stopped its heartbeats for that would be declared dead."""
    manager, stack = world
    house = House([manager.address])
    stack.callback(house.loop.close)
    house.until(lambda: manager.of(M.Heartbeat), "a heartbeat")
    house.up = False
    house.membership.rejoin()
    before = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > before + 1, "further heartbeats")
    assert len(manager.of(M.Join)) == 1
    house.up = True
    house.membership.rejoin()
    house.until(lambda: len(manager.of(M.Join)) == 2 and house.membership.joined, "joined again")
