"""Large batches by TCP over one connection and over several, between two network namespaces, against raw sockets.

    python benchmarks/tcp.py                            one link without a limit (as root, with iproute2)
    python benchmarks/tcp.py --links 4 --rate 1gbit     four links of 1 Gbit/s; a connection stays on one of them
    python benchmarks/tcp.py --ways                     how a bare server may send out of shared memory

The server's namespace has a manager, a data server and a bare sender; the client's has the load. Both are joined by
veth pairs, over which the kernel spreads connections by their ports. So with several links one connection gets the rate
of one link, as on bonded network cards or in clouds that bound what a connection gets.

Rounds alternate between all columns. A raw column sends bare bytes on as many connections, a thread for each on both
sides. The table has the medians of the rounds, and each column's ratio to the raw column of as many streams. CPU is
milliseconds of processor a GiB, of the client's process and of all of the server's. Namespaces end with the script,
also after kill -9.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from simm.client import Client
from simm.config.parsers import parse_bytes
from simm.tools.bench.floor import RawStream, serve_raw

ROOT: Final = Path(__file__).resolve().parents[1]
SERVER: Final = "10.79.0.1"
CLIENT: Final = "10.79.0.2"
MANAGER_PORT, RAW_PORT = 30001, 30090
WAYS: Final = ("send", "sendfile", "zerocopy")
#: Of linux/socket.h and linux/errqueue.h, which Python does not name.
_SO_ZEROCOPY, _MSG_ZEROCOPY, _MSG_ERRQUEUE = 60, 0x4000000, 0x2000
_WORKING_SET: Final = 256 << 20


class Namespace:
    """A network namespace, which ends with this object's process."""

    def __init__(self, address: str) -> None:
        self.address = address
        command = "ip link set lo up; echo; exec cat"  # cat ends when this process does
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.holder.stdout is None or not self.holder.stdout.readline():
            raise SystemExit("tcp: no network namespace (this needs root, unshare and ip)")
        self.run(f"ip addr add {address}/32 dev lo; echo 1 >/proc/sys/net/ipv4/fib_multipath_hash_policy")

    def words(self, *words: str) -> list[str]:
        """Return a command that runs in the namespace, and is killed with this script."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "--", "setpriv", "--pdeathsig", "KILL", *words]

    def run(self, text: str) -> None:
        """Run a piece of shell."""
        subprocess.run(self.words("sh", "-ec", text), check=True)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start a Python program."""
        return subprocess.Popen(self.words(sys.executable, *words), cwd=ROOT, text=True, **more)

    def close(self) -> None:
        """End the namespace, once its programs have ended."""
        self.holder.communicate()


def join(server: Namespace, client: Namespace, links: int, rate: str) -> None:
    """Connect two namespaces by so many links, each with this rate if there is one."""
    for number in range(links):
        subprocess.run(
            ["ip", "link", "add", f"v{number}", "netns", str(server.holder.pid), "type", "veth",
             "peer", "name", f"v{number}", "netns", str(client.holder.pid)], check=True,
        )  # fmt: skip
    limit = f"tc qdisc add dev v$n root tbf rate {rate} burst 512kb latency 20ms" if rate else "true"
    for own, far, side in ((server, client, 1), (client, server, 2)):
        hops = " ".join(f"nexthop via 10.78.{number}.{3 - side} dev v{number}" for number in range(links))
        own.run(
            f"for n in $(seq 0 {links - 1}); do"
            f" ip addr add 10.78.$n.{side}/24 dev v$n; ip link set v$n up; {limit}; done;"
            "for each in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 >$each; done;"
            f"ip route add {far.address}/32 src {own.address} {hops}"
        )


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime_ns(~pid << 3 | 2)  # as clock_getcpuclockid(3) has it
    return total / 1e9


class Rounds:
    """What the rounds have found: for each column GiB/s, and milliseconds of processor a GiB of client and server."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self.pids = pids
        self.found: dict[str, list[tuple[float, float, float]]] = {}

    def measure(self, column: str, size: int, work: Callable[[], None]) -> None:
        """Do ``work``, which moves ``size`` bytes."""
        pids = self.pids["raw" if column.startswith("raw") else "simm"]
        client, server, began = time.process_time(), cpu_s(pids), time.perf_counter()
        work()
        took = time.perf_counter() - began
        gib = size / 2**30
        costs = (time.process_time() - client, cpu_s(pids) - server)
        self.found.setdefault(column, []).append((gib / took, costs[0] * 1e3 / gib, costs[1] * 1e3 / gib))

    def show(self, title: str, base: Callable[[str], str]) -> None:
        """Print the medians."""
        print(f"{title:<26}{'MiB/s':>8}{'ratio':>8}{'client':>9}{'server':>9}{'sum':>9}   CPU, ms a GiB")
        rates = {column: statistics.median(each[0] for each in rows) for column, rows in self.found.items()}
        for column, rows in self.found.items():
            rivals = self.found[base(column)]
            ratio = statistics.median(mine[0] / other[0] for mine, other in zip(rows, rivals))
            client, server = (statistics.median(each[at] for each in rows) for at in (1, 2))
            total = statistics.median(each[1] + each[2] for each in rows)
            rate = rates[column] * 1024
            print(f"  {column:<24}{rate:8.0f}{ratio:8.2f}{client:9.0f}{server:9.0f}{total:9.0f}", flush=True)


def raw_burst(kind: str, streams: int, size: int, rows: Sequence[memoryview], times: int) -> Callable[[], None]:
    """Return what moves these rows ``times`` times over raw connections, which are open already."""
    made = [RawStream((SERVER, RAW_PORT), kind, size) for _ in range(streams)]

    def part(stream: RawStream, mine: Sequence[memoryview]) -> None:
        move = stream.get_many if kind == "get" else stream.put_many
        for _ in range(times):
            move(mine)
        stream.finish()

    def work() -> None:
        threads = [threading.Thread(target=part, args=(each, rows[at::streams])) for at, each in enumerate(made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def load(arguments: argparse.Namespace) -> int:
    """Be the client: run the rounds, and print the table."""
    numbers = [int(each) for each in arguments.streams.split(",")]
    size, count, times = arguments.size, arguments.keys, arguments.times
    area = memoryview(bytearray(os.urandom(1 << 20) * -(-size * count >> 20)))
    rows = [area[at * size : (at + 1) * size] for at in range(count)]
    keys = [f"key{number}" for number in range(count)]
    clients = {
        number: Client(f"{SERVER}:{MANAGER_PORT}", path="tcp", deadline_s=120, tcp_streams=number) for number in numbers
    }
    pids = json.loads(arguments.pids)
    for client in clients.values():
        client.wait_ready(60)
        for _ in range(3):  # the further connections are made meanwhile
            assert all(client.put_many(keys, rows)), "a put failed"
            time.sleep(0.3)
    for operation in ("get", "put"):
        rounds = Rounds(pids)
        for _ in range(arguments.rounds):
            for number in numbers:
                rounds.measure(f"raw, {number}", size * count * times, raw_burst(operation, number, size, rows, times))
                client = clients[number]

                def work(client: Client = client, operation: str = operation) -> None:
                    for _ in range(times):
                        done = client.get_into_many(keys, rows) if operation == "get" else client.put_many(keys, rows)
                        assert all(done), "a value is missing"

                rounds.measure(f"simm, {number}", size * count * times, work)
        rounds.show(f"{operation}, {count} x {size >> 10} KiB, streams", lambda column: f"raw, {column.split()[-1]}")
    for client in clients.values():
        client.close()
    return 0


def send_by(way: str, sock: socket.socket, fd: int, whole: memoryview, piece: int) -> None:
    """Send shared memory in a loop, in one of the ways, until the peer closes."""
    if way == "zerocopy":
        sock.setsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY, 1)
    in_flight = 0
    while True:
        for start in range(0, len(whole), piece):
            at, end = start, start + piece
            while at < end:
                if way == "send":
                    at += sock.send(whole[at:end])
                elif way == "sendfile":
                    at += os.sendfile(sock.fileno(), fd, at, end - at)
                else:
                    at += sock.send(whole[at:end], _MSG_ZEROCOPY)
                    in_flight += 1
                    while in_flight > 8:  # the kernel refers to that memory until it says otherwise
                        try:
                            _, notes, _, _ = sock.recvmsg(0, 256, _MSG_ERRQUEUE)
                        except BlockingIOError:
                            poller = select.poll()
                            poller.register(sock, 0)
                            poller.poll(100)
                            continue
                        _, _, _, _, _, first, last = struct.unpack_from("=IBBBBII", notes[0][2])
                        in_flight -= last - first + 1


def serve_ways(piece: int) -> None:
    """Be the bare sender: a listening port for each way, out of memory like an arena's."""
    fd = os.memfd_create("tcp-ways")
    os.ftruncate(fd, _WORKING_SET)
    whole = memoryview(mmap.mmap(fd, _WORKING_SET))
    whole[:] = bytes(len(whole))

    def serve(listener: socket.socket, way: str) -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            with contextlib.suppress(OSError), sock:
                send_by(way, sock, fd, whole, piece)

    for at, way in enumerate(WAYS):
        listener = socket.create_server((SERVER, RAW_PORT + 1 + at))
        threading.Thread(target=serve, args=(listener, way), daemon=True).start()


def receive_ways(arguments: argparse.Namespace) -> int:
    """Be the client of the bare sender."""
    rounds = Rounds(json.loads(arguments.pids))
    area = memoryview(bytearray(64 << 20))
    size = 4 * len(area)
    for _ in range(arguments.rounds):
        for at, way in enumerate(WAYS):
            with socket.create_connection((SERVER, RAW_PORT + 1 + at)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
                sock.recv_into(area[: 1 << 20], 0, socket.MSG_WAITALL)

                def work(sock: socket.socket = sock) -> None:
                    for begin in list(range(0, len(area), 1 << 20)) * 4:
                        sock.recv_into(area[begin : begin + (1 << 20)], 0, socket.MSG_WAITALL)

                rounds.measure(f"raw, {way}", size, work)
    rounds.show("bare server, one stream", lambda _: "raw, send")
    return 0


def serve_raw_here(arguments: argparse.Namespace) -> int:
    """Be the bare sender of the raw columns, and of ``--ways``."""
    listener = socket.create_server((SERVER, RAW_PORT))
    serve_ways(arguments.size)
    print("ready", flush=True)
    serve_raw(listener, _WORKING_SET)
    return 0


def wait_for(port: int, server: Namespace) -> None:
    """Wait until something listens in the server's namespace."""
    test = f"import socket; socket.create_connection(('{SERVER}', {port}), 5)"
    for _ in range(200):
        if not server.start("-c", test, stderr=subprocess.DEVNULL).wait():
            return
        time.sleep(0.1)
    raise SystemExit(f"tcp: nothing listens at port {port}")


def main() -> int:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", default="1,4", help="numbers of connections to compare")
    parser.add_argument("--size", type=parse_bytes, default=1 << 20, metavar="BYTES", help="of each value")
    parser.add_argument("--keys", type=int, default=32, help="keys in a batch")
    parser.add_argument("--times", type=int, default=4, help="batches in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--links", type=int, default=1)
    parser.add_argument("--rate", default="", help="of each link, as tc has it: 1gbit")
    parser.add_argument("--processes", type=int, default=1, help="stream processes of the server")
    parser.add_argument("--ways", action="store_true", help="compare ways to send instead")
    parser.add_argument("--role", choices=("raw", "load", "ways"), help=argparse.SUPPRESS)
    parser.add_argument("--pids", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        return {"raw": serve_raw_here, "load": load, "ways": receive_ways}[arguments.role](arguments)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server, client = Namespace(SERVER), Namespace(CLIENT)
        stack.callback(client.close)
        stack.callback(server.close)
        join(server, client, arguments.links, arguments.rate)
        own = [os.path.abspath(__file__), *sys.argv[1:], "--role"]

        def run(*words: str, **more: Any) -> subprocess.Popen[str]:
            started = server.start(*words, **more)
            stack.callback(started.wait)
            stack.callback(started.terminate)
            return started

        raw = run(*own, "raw", stdout=subprocess.PIPE)
        assert raw.stdout is not None and raw.stdout.readline() == "ready\n", "the bare sender does not start"
        pids = {"raw": [raw.pid], "simm": []}
        if not arguments.ways:
            listen = ("--insecure", "--runtime-dir", folder, "--log-level", "error")
            run("-m", "simm", "manager", "--listen", f"{SERVER}:{MANAGER_PORT}", *listen)
            wait_for(MANAGER_PORT, server)
            data = run(
                "-m", "simm", "dataserver", "--listen", f"{SERVER}:30010", "--manager", f"{SERVER}:{MANAGER_PORT}",
                "--memory", "512M", "--streams", str(arguments.processes), *listen,
            )  # fmt: skip
            wait_for(30010, server)
            pids["simm"] = [each.pid for each in psutil.Process(data.pid).children(recursive=True)]
        loader = client.start(*own, "ways" if arguments.ways else "load", "--pids", json.dumps(pids))
        return loader.wait()


if __name__ == "__main__":
    sys.exit(main())
