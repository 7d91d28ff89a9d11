"""Whether a neighbour answers, by a table of neighbours of our own, and by this machine's."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from pathlib import Path

import pytest

from simm.rdma import ports

HEAD = "IP address       HW type     Flags       HW address            Mask     Device\n"
PEER = "192.0.2.7"


def gid(address: str) -> bytes:
    return ipaddress.IPv6Address(f"::ffff:{address}").packed


def row(address: str, flags: int, device: str = "rnic0") -> str:
    return f"{address}      0x1         {flags:#x}         52:54:00:77:00:01     *        {device}\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "proc/net/arp"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD)
    return path


def asked(table: Path, timeout_s: float = 0.05, netdev: str = "") -> bool:
    return ports.arp_resolves(gid(PEER), netdev=netdev, timeout_s=timeout_s, sys_root=str(table.parents[2]))


def test_one_that_is_known(table: Path) -> None:
    table.write_text(HEAD + row("192.0.2.70", 0) + row(PEER, 0, "eth0") + row(PEER, 2))
    assert asked(table)


def test_one_that_nobody_answers_for(table: Path) -> None:
    table.write_text(HEAD + row(PEER, 0) + row("192.0.2.70", 2))
    started = time.monotonic()
    assert not asked(table)
    assert time.monotonic() - started >= 0.05


def test_only_the_ports_own_device_counts(table: Path) -> None:
    table.write_text(HEAD + row(PEER, 0) + row(PEER, 2, "rnic1"))
    assert asked(table) and asked(table, netdev="rnic1") and not asked(table, netdev="rnic0")
    assert asked(table, netdev="rnic2"), "nothing is known of it there"


def test_the_question_leaves_by_the_ports_own_device(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the routing table it need not leave at all: the peer may be another port of this host."""
    options: list[tuple[int, int, bytes | int]] = []
    real = socket.socket

    class Watched(real):  # type: ignore[misc, valid-type]
        def setsockopt(self, level: int, name: int, value: bytes | int) -> None:  # type: ignore[override]
            options.append((level, name, value))
            super().setsockopt(level, name, value)

    monkeypatch.setattr(socket, "socket", Watched)
    table.write_text(HEAD + row(PEER, 0, "simm-none0"))
    assert not asked(table, netdev="simm-none0"), "and there is no such device: it was asked all the same"
    assert (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"simm-none0") in options


def test_one_that_answers_after_a_while(table: Path) -> None:
    table.write_text(HEAD + row(PEER, 0))
    later = threading.Timer(0.05, lambda: table.write_text(HEAD + row(PEER, 2)))
    later.start()
    try:
        assert asked(table, timeout_s=30.0)
    finally:
        later.join()


@pytest.mark.parametrize("text", [HEAD, "", HEAD + "nonsense\n", HEAD + row("192.0.2.70", 0)])
def test_what_cannot_be_told_goes_ahead(table: Path, text: str) -> None:
    table.write_text(text)
    assert asked(table)


def test_no_table_and_no_ipv4(tmp_path: Path) -> None:
    assert ports.arp_resolves(gid(PEER), sys_root=str(tmp_path))
    assert ports.arp_resolves(ipaddress.IPv6Address("2001:db8::7").packed, sys_root=str(tmp_path))


def test_a_look_asks_once_and_never_waits(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[str] = []
    monkeypatch.setattr(ports, "_send_probe", lambda address, own, netdev: asked_for.append(address))
    monkeypatch.setattr(ports.time, "sleep", lambda seconds: pytest.fail("it waits"))

    root = str(table.parents[2])

    def answered() -> bool:
        return ports.arp_answered(gid(PEER), ports.ArpTable(root), "")

    table.write_text(HEAD + row(PEER, 0))
    assert not answered() and not asked_for
    assert not ports.arp_asked(gid(PEER), sys_root=root) and asked_for == [PEER]
    table.write_text(HEAD + row(PEER, 2))
    assert answered() and ports.arp_asked(gid(PEER), sys_root=root) and asked_for == [PEER]


@pytest.mark.parametrize("where", ["socket", "sendto"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_what_there_is_no_room_to_ask_for_is_not_reached(
    table: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    """No descriptor is left, or the kernel's table of neighbours is full. Connecting would wait."""
    real = socket.socket

    class Full(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object) -> None:
            if where == "socket":
                raise OSError(code, "full")
            super().__init__(*arguments)

        def sendto(self, *_: object) -> int:
            raise OSError(code, "full")

    monkeypatch.setattr(socket, "socket", Full)
    root = str(table.parents[2])
    assert not ports.arp_asked(gid(PEER), sys_root=root)
    assert not ports.arp_answered(gid(PEER), ports.ArpTable(root), ""), "no entry was made for it"
    assert not asked(table)
    table.write_text(HEAD + row(PEER, 2))
    assert asked(table) and ports.arp_answered(gid(PEER), ports.ArpTable(root), "")


def test_ourselves() -> None:
    """With the kernel's own table: what is on this host needs no answer."""
    own = gid("127.0.0.1")
    assert ports.arp_resolves(own, own)
