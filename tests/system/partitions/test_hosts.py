"""The hosts themselves: what is cut is cut, what is slow is slow, and nothing but the network is shared."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child import Child
from tests.support.waiting import WAIT_S, wait_until
from tests.system.partitions.hosts import Hosts
from tests.system.partitions.lossy_link import Line, checksum, reset_for


@contextlib.contextmanager
def echo(hosts: Hosts, position: int) -> Iterator[int]:
    """A server in a host that sends back what it gets; its port."""
    with hosts[position].inside():
        listener = socket.create_server((hosts[position].host, 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def answer(sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            while data := sock.recv(4096):
                sock.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def connect(hosts: Hosts, a: int, b: int, port: int, timeout_s: float = WAIT_S) -> socket.socket:
    with hosts[a].inside():
        return socket.create_connection((hosts[b].host, port), timeout_s)


def ask(sock: socket.socket, text: bytes, timeout_s: float = WAIT_S) -> bytes:
    sock.settimeout(timeout_s)
    sock.sendall(text)
    return sock.recv(4096)


def test_cut_both_ways_and_healed(hosts: Hosts) -> None:
    with echo(hosts, 1) as port, connect(hosts, 0, 1, port) as sock:
        assert ask(sock, b"a") == b"a"
        hosts.cut(0, 1)
        try:
            with pytest.raises(TimeoutError):
                ask(sock, b"b", 0.3)
            with pytest.raises(TimeoutError):
                connect(hosts, 0, 1, port, 0.3)
            with connect(hosts, 2, 1, port) as other:
                assert ask(other, b"c") == b"c", "others are not concerned"
        finally:
            hosts.heal()
        sock.settimeout(WAIT_S)
        assert sock.recv(100) == b"b", "the kernel sends it again"


def test_cut_one_way(hosts: Hosts) -> None:
    """What host 0 sends arrives, and no answer comes back."""
    with hosts[1].inside():
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind((hosts[1].host, 0))
    with hosts[0].inside():
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.bind((hosts[0].host, 0))
    hosts.cut(1, 0, one_way=True)
    try:
        with receiver, sender:
            receiver.settimeout(WAIT_S)
            sender.settimeout(0.3)
            sender.sendto(b"there", receiver.getsockname())
            assert receiver.recv(100) == b"there"
            receiver.sendto(b"back", sender.getsockname())
            with pytest.raises(TimeoutError):
                sender.recv(100)
            hosts.heal()
            sender.settimeout(WAIT_S)
            receiver.sendto(b"now", sender.getsockname())
            assert sender.recv(100) == b"now"
    finally:
        hosts.heal()


def test_reset(wire: Hosts) -> None:
    with echo(wire, 1) as port, connect(wire, 0, 1, port) as sock:
        assert ask(sock, b"a") == b"a"
        wire.line(0, 1, reset=True)
        try:
            with pytest.raises(ConnectionResetError):
                ask(sock, b"b")
            with pytest.raises(ConnectionRefusedError):
                connect(wire, 0, 1, port)
        finally:
            wire.heal()
        with connect(wire, 0, 1, port) as again:
            assert ask(again, b"c") == b"c"


def test_delay_and_loss(wire: Hosts) -> None:
    with echo(wire, 1) as port, connect(wire, 0, 1, port) as sock:
        try:
            wire.slow(1, delay_ms=100)
            began = time.monotonic()
            assert ask(sock, b"a") == b"a"
            assert time.monotonic() - began >= 0.09
            wire.heal()
            wire.line(0, 1, loss=0.3, jitter_ms=5, twice=0.1, seed=3)
            got = b""
            sock.settimeout(2 * WAIT_S)
            for number in range(20):
                sock.sendall(b"%02d" % number)
            while len(got) < 40:
                got += sock.recv(4096)
            assert got == b"".join(b"%02d" % number for number in range(20))
        finally:
            wire.heal()
        began = time.monotonic()
        assert ask(sock, b"z") == b"z"


def test_nothing_but_the_network_is_shared(hosts: Hosts) -> None:
    hosts[0].run("echo zero >/dev/shm/simm-x")
    assert hosts[1].run("ls /dev/shm") == "" and hosts[0].run("ls /dev/shm").split() == ["simm-x"]
    assert hosts[0].root("/dev/shm/simm-x").read_text() == "zero\n"
    assert not os.path.exists("/dev/shm/simm-x")
    hosts[0].run(f"touch {hosts.run_folder}/a.sock")
    assert hosts[1].run(f"ls {hosts.run_folder}") == ""
    hosts[0].run(f"rm /dev/shm/simm-x {hosts.run_folder}/a.sock")


def test_nothing_is_left_after_a_kill(hosts: Hosts, tmp_path: Path) -> None:
    """The namespaces of a process end with it, even by kill -9."""
    code = (
        "import pathlib, sys, time; from tests.system.partitions.hosts import Hosts;"
        "hosts = Hosts(2, pathlib.Path(sys.argv[1]));"
        "print(*[each.holder.pid for each in [hosts.router, *hosts.hosts]], flush=True); time.sleep(60)"
    )
    with Child([sys.executable, "-c", code, str(tmp_path)]) as process:
        holders = process.read_line().split()
        assert len(holders) == 3 and all(os.path.exists(f"/proc/{pid}") for pid in holders)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in holders), "the holders end")


def test_resets_as_they_are_on_the_wire() -> None:
    """A SYN is refused, data are reset, a reset is not answered; sums are right."""
    ip = "450000280000400040060000" "0a4d0002" "0a4d0102"
    syn = bytes.fromhex(ip + "30390050" "00000064" "00000000" "50020000" "00000000")
    answer = reset_for(syn)
    assert answer is not None
    assert answer[12:20] == syn[16:20] + syn[12:16] and answer[20:24] == bytes.fromhex("00503039")
    assert answer[28:32] == (101).to_bytes(4, "big") and answer[33] == 0x14
    assert checksum(answer[:20]) == 0 and checksum(answer[12:20] + b"\0\6\0\x14" + answer[20:]) == 0
    data = syn[:32] + (syn[32:33] + b"\x18") + syn[34:]
    data = data[:28] + (777).to_bytes(4, "big") + data[32:] + b"hello"
    answer = reset_for(data)
    assert answer is not None and answer[24:28] == (777).to_bytes(4, "big") and answer[33] == 4
    assert reset_for(answer) is None and reset_for(syn[:9] + b"\x11" + syn[10:]) is None


def test_a_lines_fates_come_from_its_seed() -> None:
    line, again = Line({"loss": 0.5, "twice": 0.2, "seed": 5}), Line({"loss": 0.5, "twice": 0.2, "seed": 5})
    fates = [line.fates() for _ in range(200)]
    assert fates == [again.fates() for _ in range(200)]
    assert {len(fate) for fate in fates} == {0, 1, 2} and 60 < sum(not fate for fate in fates) < 140
