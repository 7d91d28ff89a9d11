#!/usr/bin/env python3
"""Compare SiMM's GET and PUT over RDMA with perftest's ib_read_bw, ib_write_bw and ib_read_lat, in alternation.

    python benchmarks/rdma.py                                       two devices of this host, a cluster of its own
    python benchmarks/rdma.py --client-device mlx5_0 --server-device mlx5_1 --json result.json
    scripts/test-rdma --shell 'python benchmarks/rdma.py'           no RDMA hardware: in a virtual machine
    python benchmarks/rdma.py --manager HOST:PORT --server-device mlx5_0 --far HOST --far-command 'ssh HOST'

The last command measures against a data server on another host. ``--far-command``, followed by their command line,
starts perftest's servers there, and ``--far`` is the address at which they are reached. The cluster should have that
one data server only. The script deletes its keys at the end.

- perftest writes raw bytes into one buffer without any lookup. This is what the device, its driver and the network
  provide: the lower bound. SiMM also finds the entry, checks that it did not change, and commits what it wrote.
- Every round runs each program once and each SiMM operation once, for about ``--seconds``; the order rotates from round
  to round. A ratio is the median over the rounds of the ratios within a round. Bandwidth is compared with bandwidth
  (perftest keeps 128 operations in flight, as SiMM's batches do), and the median of a single GET with the typical time
  of ib_read_lat.
- The script overwrites the buffers before each burst and checks the values after it; a wrong byte ends the run. So does
  a path other than RDMA: a transfer by TCP must not be counted as RDMA. Calls that a deadline ends are counted, but not
  timed; more than one in ten ends the run.
- ``get`` and ``mget`` rotate over keys that this client has read before, so it has their locations. ``get1`` and
  ``mget1`` read each key once after it has been put again, so the client has to look it up first.
- perftest's buffer holds a single value; a ``--working-set`` that is much larger than the processor's cache (or, in an
  emulator, than its cache of translations) compares memory as well.
- Buffers are registered once (``Client.register``), like an engine's pool. ``--unregistered`` measures others.
- ``server`` is the processor time of the data server's processes during the operation, in processors.

An emulated processor is twenty times slower than the memory and the network that it emulates, so Python's share of the
time is far too large there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from simm import __version__  # noqa: E402
from simm.client import Client  # noqa: E402
from simm.config.parsers import parse_bytes  # noqa: E402
from simm.rdma import ports as rdma_ports  # noqa: E402
from simm.sdk.local_cluster import LocalCluster  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
DEFAULT_SIZES = "4K,64K,1M,4M,16M"
READS, WRITES = ("get", "mget", "get1", "mget1"), ("put", "mput")
OPS = READS + WRITES
BANDWIDTH = {"get": "ib_read_bw", "put": "ib_write_bw"}
LATENCY = {"get": "ib_read_lat", "get1": "ib_read_lat"}
BATCH = 32
#: The minimum of perftest.
ITERATIONS_MIN = 5
#: Timeouts until perftest's server listens, and for one run of it, in seconds.
CONNECT_S, RUN_S = 20.0, 300.0
PORTS = 200
DEADLINE_S = 60.0
FILL_TRIES = 5
#: Keys of one size; get1 puts them all again before each round.
KEYS_MAX = 2048
STAMP = 8


class Failed(Exception):
    """The run is void: the reason goes to stderr, the exit status is 1."""


# ------------------------------------------------------------------------------------------------ perftest


@dataclass(frozen=True)
class Ports:
    """Both ends: device, port and GID index; the command that starts perftest's server, and its address."""

    client: rdma_ports.Port
    server_device: str
    server_port: int
    server_gid: int
    far_command: tuple[str, ...] = ()
    far: str = "127.0.0.1"


class Perftest:
    """Runs perftest's programs between the two ports."""

    def __init__(self, ports: Ports, seconds: float, tcp_port: int) -> None:
        self.ports = ports
        self.seconds = seconds
        self._first_port = tcp_port
        self._turn = 0
        #: (program, size) -> iterations for a burst, learned from the last run.
        self._iterations: dict[tuple[str, int], int] = {}

    def run(self, program: str, size: int) -> float:
        """Return MiB/s of a bandwidth program, or typical microseconds of a latency program.

        Raises:
            Failed: the program failed or printed no result.
        """
        is_latency = program.endswith("_lat")
        first = (program, size) not in self._iterations
        iterations = self._iterations.get((program, size), max(ITERATIONS_MIN, min(1000, MIB // size)))
        figure = self._once(program, size, iterations)
        each_s = figure / 1e6 if is_latency else size / MIB / max(figure, 1e-3)
        self._iterations[program, size] = min(max(ITERATIONS_MIN, int(self.seconds / each_s)), 1_000_000)
        return self.run(program, size) if first else figure

    def _once(self, program: str, size: int, iterations: int) -> float:
        ports, gid = self.ports, self.ports.client.gid
        assert gid is not None
        # Use another port each time: the last one may still be in TIME_WAIT, which ends perftest's server.
        tcp_port = self._first_port + self._turn % PORTS
        self._turn += 1
        common = ["-s", str(size), "-n", str(iterations), "-F", "-p", str(tcp_port)]
        serve = [*ports.far_command, program, "-d", ports.server_device, "-i", str(ports.server_port),
                 "-x", str(ports.server_gid), *common]  # fmt: skip
        ask = [program, "-d", ports.client.device, "-i", str(ports.client.number), "-x", str(gid.index), *common,
               ports.far]  # fmt: skip
        with _server(serve) as server:
            until = time.monotonic() + CONNECT_S
            while True:
                done = subprocess.run(ask, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S)
                if done.returncode == 0:
                    break
                if server.poll() is not None or time.monotonic() > until:
                    said = (done.stderr or done.stdout).strip().splitlines()
                    raise Failed(f"{shlex.join(ask)}: {said[-1] if said else f'status {done.returncode}'}")
                time.sleep(0.05)
        for line in reversed(done.stdout.splitlines()):
            words = line.split()
            # bytes, iterations, peak, average, rate | bytes, iterations, least, most, typical...
            if len(words) >= 5 and words[0] == str(size) and words[1] == str(iterations):
                return float(words[4] if program.endswith("_lat") else words[3])
        raise Failed(f"{program} printed no figure:\n{done.stdout}")


@contextlib.contextmanager
def _server(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
        process.wait(CONNECT_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------- SiMM


@dataclass
class Burst:
    """The result of one operation in one round. ``keys``: keys of each call."""

    keys: int
    value_bytes: int
    calls_ns: list[int] = field(default_factory=list)
    #: Calls that a deadline ended; not in ``calls_ns``.
    failed: int = 0
    #: Processor time of the data server meanwhile, in processors.
    server_cpu: float = 0.0

    @property
    def mib_s(self) -> float:
        return len(self.calls_ns) * self.keys * self.value_bytes / MIB / (sum(self.calls_ns) / 1e9)

    @property
    def p50_us(self) -> float:
        return statistics.median(self.calls_ns) / 1e3


class Load:
    """Keys, buffers and operations for values of one size.

    Args:
        client: a client that reaches all its targets by RDMA.
        size: bytes of a value.
        working_set: approximate bytes of all values; at least two batches.
        registered: whether buffers are registered.
        server_cpu: the data server's processor seconds so far.
    """

    def __init__(
        self, client: Client, size: int, working_set: int, registered: bool, server_cpu: Callable[[], float]
    ) -> None:
        self.client = client
        self.size = size
        self.server_cpu = server_cpu
        self.batch = max(1, min(BATCH, working_set // size))
        count = min(KEYS_MAX // self.batch, max(2, working_set // size // self.batch)) * self.batch
        self.keys = [f"rdma/{os.getpid()}/{size}/{number}" for number in range(count)]
        stride = -(-size // 4096) * 4096
        self._into = np.zeros(self.batch * stride, np.uint8)
        self._from = np.random.default_rng(size).integers(0, 256, self.batch * stride, np.uint8)
        self.sinks = self._pieces(self._into, stride, registered)
        self.sources = self._pieces(self._from, stride, registered)
        #: The same as arrays, for the checks.
        self.read = [self._into[at : at + size] for at in range(0, self.batch * stride, stride)]
        self.written = [self._from[at : at + size] for at in range(0, self.batch * stride, stride)]
        self._at = dict.fromkeys(OPS, 0)
        #: The head of each value, which shows a put that did nothing.
        self._stamp = 0
        self._stamp_of: dict[str, int | None] = {}
        self._fill()

    def _pieces(self, array: np.ndarray[Any, Any], stride: int, registered: bool) -> list[Any]:
        if not registered:
            return [array[at : at + self.size] for at in range(0, len(array), stride)]
        span = self.client.register(array)
        return [span.part(at, self.size) for at in range(0, len(array), stride)]

    def _groups(self) -> list[list[str]]:
        return [self.keys[at : at + self.batch] for at in range(0, len(self.keys), self.batch)]

    def _fill(self) -> None:
        self._next_stamp()
        for group in self._groups():
            good = any(all(self.client.put_many(group, self.sources)) for _ in range(FILL_TRIES))
            self._require(good, "put")
        self._stamp_of = dict.fromkeys(self.keys, self._stamp)

    def _read_all(self) -> None:
        """Read all values once, so that the client has their locations."""
        for group in self._groups():
            self._require(self.client.get_into_many(group, self.sinks) == [self.size] * len(group), "get")

    def _next_stamp(self) -> None:
        self._stamp += 1
        for array in self.written:
            array[:STAMP] = np.frombuffer(self._stamp.to_bytes(STAMP, "little"), np.uint8)

    def _require(self, good: bool, what: str) -> None:
        if not good:
            raise Failed(f"{what} of {self.size} bytes failed: {self.client.stats()}")

    def burst(self, op: str, seconds: float) -> Burst:
        """Run an operation for a while, at least twice, and check the values.

        Raises:
            Failed: a value is wrong, or too many calls failed.
        """
        many = op.startswith("m")
        name = op.removeprefix("m").removesuffix("1")
        if op.endswith("1"):
            self._fill()
        elif name == "put":
            self._next_stamp()
        else:
            self._read_all()
        self._into[:] = 0
        calls = self._groups() if many else [[key] for key in self.keys]
        first = at = 0 if op.endswith("1") else self._at[op]
        made = Burst(self.batch if many else 1, self.size)
        run = self._call(name, many)
        clock = time.perf_counter_ns
        gc.collect()
        gc.disable()
        good = False
        cpu, begun = self.server_cpu(), time.monotonic()
        try:
            while at < first + 2 or time.monotonic() < begun + seconds:
                if op.endswith("1") and at == len(calls):
                    break
                group = calls[at % len(calls)]
                place = 0 if many else at % self.batch
                started = clock()
                good = run(group, place)
                if good:
                    made.calls_ns.append(clock() - started)
                else:
                    made.failed += 1
                if name == "put":  # the outcome of a failed put is unknown
                    self._stamp_of.update(dict.fromkeys(group, self._stamp if good else None))
                at += 1
        finally:
            gc.enable()
        made.server_cpu = (self.server_cpu() - cpu) / (time.monotonic() - begun)
        self._at[op] = at
        self._require(bool(made.calls_ns) and made.failed <= max(1, (at - first) // 10), op)
        if good:
            self._check(name, calls[(at - 1) % len(calls)], 0 if many else (at - 1) % self.batch)
        return made

    def _call(self, name: str, many: bool) -> Callable[[list[str], int], bool]:
        client, sinks, sources, size = self.client, self.sinks, self.sources, self.size
        if name == "get" and many:
            return lambda group, _: client.get_into_many(group, sinks) == [size] * len(group)
        if name == "get":
            return lambda group, place: client.get_into(group[0], sinks[place]) == size
        if many:
            return lambda group, _: all(client.put_many(group, sources))
        return lambda group, place: client.put(group[0], sources[place])

    def _check(self, name: str, group: Sequence[str], place: int) -> None:
        """Check that the values of the last call are right, byte for byte, and came over RDMA."""
        for slot, key in enumerate(group, place):
            if name == "put":
                self._require(self.client.get_into(key, self.sinks[slot]) == self.size, "get")
            stamp = int.from_bytes(self.read[slot][:STAMP].tobytes(), "little")
            if stamp != (self._stamp_of[key] or stamp) or not np.array_equal(
                self.read[slot][STAMP:], self.written[slot][STAMP:]
            ):
                raise Failed(f"WRONG BYTES: {key} after {name}")
        for worker in self.client.stats()["workers"]:
            if worker["path"] != "rdma":
                raise Failed(f"{worker['node']}/{worker['worker']} is reached by {worker['path']}: {worker['reason']}")

    def close(self) -> None:
        """Delete the keys."""
        for group in self._groups():
            self.client.delete_many(group)


# --------------------------------------------------------------------------------------------------- report


@dataclass
class Row:
    """One operation at one size, and perftest's figures of the same rounds. Ratios are medians over the rounds."""

    size: int
    op: str
    keys: int
    p50_us: float
    mib_s: float
    perftest_mib_s: float
    ratio: float
    latency_us: float | None = None
    latency_ratio: float | None = None
    server_cpu: float | None = None
    failed: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)


def summary(size: int, op: str, bursts: Sequence[Burst], floors: Sequence[dict[str, float]], with_cpu: bool) -> Row:
    """Return a row from an operation's bursts and perftest's figures of the same rounds."""
    program = BANDWIDTH[op.removeprefix("m").removesuffix("1")]
    middle = statistics.median
    row = Row(
        size, op, bursts[0].keys, middle(burst.p50_us for burst in bursts), middle(burst.mib_s for burst in bursts),
        middle(floor[program] for floor in floors),
        middle(burst.mib_s / floor[program] for burst, floor in zip(bursts, floors)),
    )  # fmt: skip
    if op in LATENCY:
        program = LATENCY[op]
        row.latency_us = middle(floor[program] for floor in floors)
        row.latency_ratio = middle(burst.p50_us / floor[program] for burst, floor in zip(bursts, floors))
    if with_cpu:
        row.server_cpu = middle(burst.server_cpu for burst in bursts)
    row.failed = sum(burst.failed for burst in bursts)
    row.rounds = [{"p50_us": burst.p50_us, "mib_s": burst.mib_s, **floor} for burst, floor in zip(bursts, floors)]
    return row


def size_text(size: int) -> str:
    return f"{size // MIB}M" if size >= MIB else f"{size // KIB}K"


HEAD = f"{'value':>6} {'op':<6} {'keys':>4} {'p50 us':>10} {'MiB/s':>8} {'perftest':>9} {'ratio':>6} " \
       f"{'read_lat':>9} {'ratio':>6} {'server':>7}"  # fmt: skip


def row_text(row: Row) -> str:
    """Return a line of the table."""
    latency = f"{row.latency_us:9.1f} {row.latency_ratio:6.2f}" if row.latency_us else f"{'':9} {'':6}"
    cpu = f"{row.server_cpu:6.1%}" if row.server_cpu is not None else ""
    return (
        f"{size_text(row.size):>6} {row.op:<6} {row.keys:>4} {row.p50_us:>10.1f} {row.mib_s:>8.1f} "
        f"{row.perftest_mib_s:>9.1f} {row.ratio:>6.2f} {latency} {cpu:>7}"
        f"{f'  {row.failed} failed' if row.failed else ''}"
    ).rstrip()


# --------------------------------------------------------------------------------------------------- the run


def measure(
    client: Client, perftest: Perftest, size: int, ops: Sequence[str], options: argparse.Namespace,
    server_cpu: Callable[[], float],
) -> list[Row]:  # fmt: skip
    """Measure all operations at one size, after one uncounted round that warms caches and grants."""
    load = Load(client, size, options.working_set, not options.unregistered, server_cpu)
    programs = sorted({BANDWIDTH[op.removeprefix("m").removesuffix("1")] for op in ops}
                      | {LATENCY[op] for op in ops if op in LATENCY})  # fmt: skip
    bursts: dict[str, list[Burst]] = {op: [] for op in ops}
    floors: list[dict[str, float]] = []
    try:
        for number in range(options.rounds + 1):
            order: list[str] = [*programs, *ops]
            order = order[number % len(order) :] + order[: number % len(order)]
            floor: dict[str, float] = {}
            for each in order:
                if each in programs:
                    floor[each] = perftest.run(each, size)
                    continue
                burst = load.burst(each, options.seconds)
                if number:
                    bursts[each].append(burst)
            if number:
                floors.append(floor)
    finally:
        load.close()
    return [summary(size, op, bursts[op], floors, options.manager is None) for op in ops]


def _cpu_of(pid: int) -> float:
    """Return the processor seconds of a data server's processes, user and system."""
    import psutil

    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(pid)
        for process in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _port(known: Sequence[rdma_ports.Port], name: str) -> rdma_ports.Port:
    port = rdma_ports.parse_devices(name, known)[0]
    if port.trouble:
        raise Failed(f"{port.name} cannot be used: {port.trouble}")
    return port


def find_ports(options: argparse.Namespace) -> Ports:
    """Return the two ports: from the command line, or the first usable ones of this host.

    Raises:
        Failed, ConfigError: there are no such ports.
    """
    known = rdma_ports.ports()
    usable = [port for port in known if not port.trouble]
    if not usable:
        raise Failed("this host has no usable RDMA port (simm topo); without hardware: scripts/test-rdma --shell '...'")
    client = _port(known, options.client_device) if options.client_device else usable[0]
    if options.far:
        name, _, number = (options.server_device or client.device).partition(":")
        gid = client.gid.index if client.gid is not None else 0
        return Ports(
            client, name, int(number or 1), gid if options.server_gid is None else options.server_gid,
            tuple(shlex.split(options.far_command)), options.far,
        )  # fmt: skip
    others = [port for port in usable if port is not client]
    server = _port(known, options.server_device) if options.server_device else (others or usable)[0]
    assert server.gid is not None
    return Ports(client, server.device, server.number, server.gid.index)


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    processor = ""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text()
        processor = text.split("model name", 1)[1].split("\n", 1)[0].lstrip("\t: ")
    emulated = "QEMU" in processor or "TCG" in processor
    return {
        "date": time.strftime("%Y-%m-%d"), "processor": processor, "emulated": emulated, "cores": os.cpu_count(),
        "linux": platform.release(), "python": platform.python_version(), "simm": __version__,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = made.add_argument
    add("--client-device", metavar="DEV[:PORT]", help="default: the first usable port")
    add("--server-device", metavar="DEV[:PORT]", help="default: the second one, or the first")
    add("--server-gid", type=int, metavar="INDEX", help="GID index of the far port (default: as for the near port)")
    add("--manager", metavar="HOST:PORT", help="a running cluster (default: start one on this host)")
    add("--far", metavar="HOST", default="", help="address of perftest's servers (default: this host)")
    add("--far-command", metavar="COMMAND", default="", help="command that starts them there, such as 'ssh HOST'")
    add("--tcp-port", type=int, default=18515, help="first of 200 ports for perftest's own connections (18515)")
    add("--sizes", default=DEFAULT_SIZES, help=f"sizes of values ({DEFAULT_SIZES})")
    add("--ops", default=",".join(OPS), help="operations out of " + ", ".join(OPS))
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=1.0, help="time for each operation in each round (1)")
    add("--working-set", type=parse_bytes, default=64 * MIB, help="approximate bytes of all values of a size (64M)")
    add("--unregistered", action="store_true", help="use buffers that are not registered")
    add("--json", metavar="FILE", help="write the result to FILE; - writes it to stdout instead of the table")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; return the result for JSON."""
    sizes = [parse_bytes(size) for size in options.sizes.split(",")]
    ops = options.ops.split(",")
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise Failed(f"there is no operation {unknown[0]!r}: {', '.join(OPS)}")
    absent = [name for name in {*BANDWIDTH.values(), *LATENCY.values()} if shutil.which(name) is None]
    if absent:
        raise Failed(f"{absent[0]} is not installed: apt-get install perftest")
    ports = find_ports(options)

    def say(line: str) -> None:
        if options.json != "-":
            print(line, flush=True)

    about = {**machine(), "client": ports.client.name, "server": f"{ports.server_device}:{ports.server_port}",
             "rounds": options.rounds, "seconds": options.seconds, "working_set": options.working_set,
             "registered": not options.unregistered}  # fmt: skip
    say(", ".join(f"{key} {value}" for key, value in about.items()))
    result: dict[str, Any] = {**about, "rows": []}
    with contextlib.ExitStack() as stack:
        address, pid = options.manager, 0
        if address is None:
            # Values of the largest size, and room for values that are overwritten while a client reads them.
            memory = max(256 * MIB, 4 * options.working_set, 8 * max(sizes))
            device = f"{ports.server_device}:{ports.server_port}"
            cluster = stack.enter_context(LocalCluster(memory, arguments=("--rdma", "on", "--rdma-devices", device)))
            address, pid = cluster.manager, cluster.pids["dataserver"]
        client = stack.enter_context(
            Client(address, path="rdma", rdma_devices=ports.client.name, deadline_s=DEADLINE_S)
        )
        until = time.monotonic() + DEADLINE_S
        while not client.wait_ready(1.0) or any(each["path"] != "rdma" for each in client.stats()["workers"]):
            if time.monotonic() > until:
                raise Failed(f"no RDMA path: {client.stats().get('workers')}")
        perftest = Perftest(ports, options.seconds, options.tcp_port)
        say(f"\n{HEAD}")
        for size in sizes:
            for row in measure(client, perftest, size, ops, options, lambda: _cpu_of(pid) if pid else 0.0):
                result["rows"].append(asdict(row))
                say(row_text(row))
    return result


def main() -> int:
    """Run the command."""
    options = parser().parse_args()
    try:
        result = run(options)
    except (Failed, ValueError, OSError) as error:
        print(f"rdma.py: {error}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(json.dumps(result, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
