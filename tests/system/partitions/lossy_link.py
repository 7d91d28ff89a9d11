"""A bad line, simulated in user space, for kernels without ``sch_netem``.

Run as ``python -m tests.system.partitions.lossy_link NAME``.

It opens the TUN device NAME in the network namespace it runs in; the router sends it the packets of the pairs of hosts
that have a bad line, and gets them back from the same device: later, twice, out of order, or not at all. Or
it answers them with a TCP reset, as a firewall with ``REJECT --reject-with tcp-reset`` does.

Lines are set by JSON on stdin, one a line: ``{"from": IP, "to": IP, "delay_ms": 20, "jitter_ms": 5, "loss": 0.01,
"twice": 0.01, "reset": false, "seed": 1}``; an empty one with ``{"from": IP, "to": IP}`` heals. Each is
answered by ``ok`` once it holds. What is not named passes at once.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import sys
import time
from typing import Any, Final

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_TCP: Final = 6
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16


def checksum(data: bytes) -> int:
    """Of the Internet (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_for(packet: bytes) -> bytes | None:
    """The reset that answers an IPv4 packet, or None where there is none (no TCP, a reset itself)."""
    head = (packet[0] & 15) * 4
    if packet[9] != _TCP or len(packet) < head + 20:
        return None
    source, target = packet[12:16], packet[16:20]
    from_port, to_port, seq, ack, offset_flags = struct.unpack_from("!HHIIH", packet, head)
    flags = offset_flags & 63
    if flags & _RST:
        return None
    if flags & _ACK:
        numbers, answer = (ack, 0), _RST
    else:
        size = len(packet) - head - (offset_flags >> 12) * 4 + bool(flags & _SYN) + bool(flags & _FIN)
        numbers, answer = (0, (seq + size) & 0xFFFFFFFF), _RST | _ACK
    tcp = struct.pack("!HHIIHHHH", to_port, from_port, *numbers, 5 << 12 | answer, 0, 0, 0)
    pseudo = target + source + struct.pack("!HH", _TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0, target, source)
    return ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:] + tcp


class Line:
    """How bad one direction between two hosts is."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.delay_s = settings.get("delay_ms", 0.0) / 1000
        self.jitter_s = settings.get("jitter_ms", 0.0) / 1000
        self.loss = settings.get("loss", 0.0)
        self.twice = settings.get("twice", 0.0)
        self.reset = settings.get("reset", False)
        self.rng = random.Random(settings.get("seed", 0))

    def fates(self) -> list[float]:
        """After how many seconds a packet goes on; none: lost. Jitter puts packets out of order."""
        if self.rng.random() < self.loss:
            return []
        count = 2 if self.rng.random() < self.twice else 1
        return [max(0.0, self.delay_s + self.rng.uniform(-1, 1) * self.jitter_s) for _ in range(count)]


class Wire:
    """The device, the lines, and the packets under way."""

    def __init__(self, name: str) -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
        self.lines: dict[bytes, Line] = {}
        self.under_way: list[tuple[float, int, bytes]] = []
        self._order = itertools.count()

    def set(self, settings: dict[str, Any]) -> None:
        """One line."""
        pair = socket.inet_aton(settings.pop("from")) + socket.inet_aton(settings.pop("to"))
        if settings:
            self.lines[pair] = Line(settings)
        else:
            self.lines.pop(pair, None)

    def take(self, packet: bytes) -> None:
        """A packet has come from the router."""
        if packet[0] >> 4 != 4:
            return
        line = self.lines.get(packet[12:20])
        if line is None:
            self.put(packet)
        elif line.reset:
            answer = reset_for(packet)
            if answer is not None:
                self.put(answer)
        else:
            now = time.monotonic()
            for delay in line.fates():
                heapq.heappush(self.under_way, (now + delay, next(self._order), packet))

    def put(self, packet: bytes) -> None:
        """Back to the router; a full queue loses it, as queues do."""
        try:
            os.write(self.fd, packet)
        except OSError:
            pass

    def run(self) -> None:
        """Until stdin is closed."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(0, select.POLLIN)
        commands = b""
        while True:
            now = time.monotonic()
            while self.under_way and self.under_way[0][0] <= now:
                self.put(heapq.heappop(self.under_way)[2])
            wait_ms = None if not self.under_way else max(0.0, (self.under_way[0][0] - now) * 1000)
            for fd, _ in poller.poll(wait_ms):
                if fd == self.fd:
                    for _ in range(64):
                        try:
                            self.take(os.read(self.fd, 1 << 16))
                        except BlockingIOError:
                            break
                else:
                    data = os.read(0, 1 << 16)
                    if not data:
                        return
                    *lines, commands = (commands + data).split(b"\n")
                    for line in lines:
                        self.set(json.loads(line))
                        print("ok", flush=True)


if __name__ == "__main__":
    wire = Wire(sys.argv[1])
    print("ok", flush=True)
    wire.run()
