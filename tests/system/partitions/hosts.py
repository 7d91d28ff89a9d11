"""Hosts as namespaces: each has a network stack, a /dev/shm and a runtime folder of its own, and one link to a router.

    host 0  10.77.0.2 --- r0 10.77.0.1 \\
    host 1  10.77.1.2 --- r1 10.77.1.1 --- router, a namespace too
    host 2  10.77.2.2 --- r2 10.77.2.1 /

All packets between hosts pass the router, so faults are its rules, each for one direction between two hosts, and
need nothing but iproute2:

* *lost*: ``ip rule ... blackhole``. Nothing comes back, as with a cable pulled or a firewall's DROP.
* *delayed, lost at random, twice, out of order*: ``tc netem`` where the kernel has it (then for all of a host), else,
  and for pairs, ``lossy_link``, through which such packets are led.
* *reset*: the wire answers for the other host.

The namespaces have no names. They exist as long as a process is in them, and the one that holds each open ends with
this process, whatever ends it: nothing can be left behind, not even by kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from simm.net.channel import Channel
from tests.support.child import Child, Place, module_command

_TOOLS: Final = ("ip", "tc", "nsenter", "unshare", "mount")
_CLONE_NEWNET: Final = 0x40000000
_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)
#: ``ip rule`` numbers: packets that come back from the wire, the faults, the ordinary way.
_FROM_WIRE, _FAULT = 100, 200
_WIRE_TABLE: Final = "177"


def _end_with_us() -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@cache
def why_not() -> str:
    """Why this machine cannot play hosts; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-ec",
         "ip link add v0 type veth peer name v1; ip rule add pref 9 from 10.0.0.1 to 10.0.0.2 blackhole;"
         "mount -t tmpfs none /dev/shm"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"this machine lets us have no namespaces: {made.stderr.strip()}" if made.returncode else ""


@cache
def why_no_wire() -> str:
    """Why packets cannot be led through user space; empty if they can."""
    return "" if os.path.exists("/dev/net/tun") else "there is no /dev/net/tun"


@cache
def has_netem() -> bool:
    """Does the kernel have ``sch_netem``?"""
    command = "ip link add v0 type veth peer name v1; tc qdisc add dev v0 root netem delay 1ms"
    return not subprocess.run(["unshare", "--net", "sh", "-ec", command], capture_output=True).returncode


class Host(Place):
    """A namespace with an address."""

    exposed = ("--insecure",)

    def __init__(self, name: str, host: str, setup: str = "true") -> None:
        self.name = name
        self.host = host
        self.holder = Child(
            ["unshare", "--net", "--mount", "sh", "-ec", f"{setup}; echo ok; exec sleep infinity"],
            name=name, environment=os.environ, preexec_fn=_end_with_us,
        )  # fmt: skip
        if self.holder.read_line() != "ok\n":
            self.close()
            raise OSError(f"no namespace for {name}")

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", "--", *words]

    def run(self, text: str) -> str:
        """A piece of shell in there. Raises subprocess.CalledProcessError."""
        return subprocess.run(self.command(["sh", "-ec", text]), check=True, capture_output=True, text=True).stdout

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread's new sockets belong to the host; they stay there."""
        ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/proc/{self.holder.pid}/ns/net", os.O_RDONLY)
        try:
            if _libc.setns(theirs, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                if _libc.setns(ours, _CLONE_NEWNET):
                    os._exit(70)  # a thread in the wrong network must not go on
        finally:
            os.close(ours)
            os.close(theirs)

    def connect(self, host: str, port: int, deadline_s: float) -> Channel:
        with self.inside():
            return Channel.tcp(host, port, deadline_s)

    def root(self, path: str) -> Path:
        """A path of the host, as this process finds it."""
        return Path(f"/proc/{self.holder.pid}/root{path}")

    def close(self) -> None:
        """End the holder; the namespace goes with its last process."""
        self.holder.kill()


class Hosts:
    """``with Hosts(4, folder) as hosts``: ``hosts[0]`` to ``hosts[3]``, all reaching all.

    Every host sees a runtime folder of its own at ``hosts.run_folder``, and an empty /dev/shm: no two share anything
    but the network. Faults are of pairs of positions; ``heal`` ends them all.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.run_folder = str(folder / "run")
        os.makedirs(self.run_folder)
        self._stack = contextlib.ExitStack()
        self._wire: Child | None = None
        self._lines: set[tuple[int, int]] = set()
        self._shaped: set[int] = set()
        self.hosts: list[Host] = []
        try:
            self.router = Host("router", "10.77.255.1")
            self._stack.callback(self.router.close)
            for number in range(count):
                own = folder / f"host{number}"
                own.mkdir()
                setup = f"mount -t tmpfs none /dev/shm; mount --bind {own} {self.run_folder}; ip link set lo up"
                host = Host(f"host {number}", f"10.77.{number}.2", setup)
                self._stack.callback(host.close)
                self.hosts.append(host)
                self.router.run(
                    f"ip link add r{number} type veth peer name eth0 netns {host.holder.pid};"
                    f"ip addr add 10.77.{number}.1/24 dev r{number}; ip link set r{number} up"
                )
                host.run(
                    f"ip addr add {host.host}/24 dev eth0; ip link set eth0 up;"
                    f"ip route add default via 10.77.{number}.1"
                )
            self.router.run(
                "echo 1 >/proc/sys/net/ipv4/ip_forward;"
                "for each in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 >$each; done"
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, position: int) -> Host:
        return self.hosts[position]

    def close(self) -> None:
        """End all that holds the namespaces; what else runs in them keeps them until it ends."""
        if self._wire is not None:
            self._wire.kill()
            self._wire = None
        self._stack.close()

    # -- faults -----------------------------------------------------------------------------------------

    def _rule(self, action: str, a: int, b: int, what: str) -> None:
        self.router.run(f"ip rule {action} pref {_FAULT} from {self[a].host} to {self[b].host} {what}")

    def cut(self, a: int, b: int, *, one_way: bool = False) -> None:
        """What ``a`` sends to ``b`` is lost without a word; unless ``one_way``, the other direction too."""
        self._rule("add", a, b, "blackhole")
        if not one_way:
            self._rule("add", b, a, "blackhole")

    def cut_off(self, *positions: int) -> None:
        """These hosts reach none but themselves, and each of them no other."""
        # All rules in one go: two processes for each of twenty take more than a second.
        pairs = [(a, b) for a in range(len(self.hosts)) for b in range(len(self.hosts)) if a != b]
        self.router.run(
            "; ".join(
                f"ip rule add pref {_FAULT} from {self[a].host} to {self[b].host} blackhole"
                for a, b in pairs if a in positions or b in positions
            )
        )  # fmt: skip

    def line(self, a: int, b: int, **settings: Any) -> None:
        """Both directions between two hosts as ``lossy_link`` plays them (``delay_ms``, ``loss``, ``reset``...)."""
        if self._wire is None:
            words = module_command("tests.system.partitions.lossy_link", "wire")
            self._wire = Child(words, place=self.router, talks=True, preexec_fn=_end_with_us)
            self._hear()
            self.router.run(
                "ip link set wire up; echo 0 >/proc/sys/net/ipv4/conf/wire/rp_filter;"
                f"ip route add default dev wire table {_WIRE_TABLE}; ip rule add pref {_FROM_WIRE} iif wire lookup main"
            )
        for one, two in ((a, b), (b, a)):
            self._set({"from": self[one].host, "to": self[two].host, **settings})
            if (one, two) not in self._lines:
                self._lines.add((one, two))
                self._rule("add", one, two, f"lookup {_WIRE_TABLE}")

    def _set(self, settings: dict[str, Any]) -> None:
        assert self._wire is not None
        self._wire.tell(json.dumps(settings))
        self._hear()

    def _hear(self) -> None:
        assert self._wire is not None
        if self._wire.read_line() != "ok\n":
            raise OSError("the wire has failed")

    def slow(self, position: int, *, delay_ms: float, jitter_ms: float = 0.0, loss: float = 0.0, seed: int = 0) -> str:
        """A bad line between one host and all others, a half of the delay each way; what plays it.

        ``seed`` is of the losses, where ``lossy_link`` plays them.
        """
        half, jitter = delay_ms / 2, jitter_ms / 2
        if has_netem():
            netem = f"netem delay {half}ms {jitter}ms loss {loss * 100}%"
            self[position].run(f"tc qdisc add dev eth0 root {netem}")
            self.router.run(f"tc qdisc add dev r{position} root {netem}")
            self._shaped.add(position)
            return "tc netem"
        for other in range(len(self.hosts)):
            if other != position:
                self.line(position, other, delay_ms=half, jitter_ms=jitter, loss=loss, seed=100 * seed + other)
        return "lossy_link"

    def heal(self) -> None:
        """All lines are good again."""
        self.router.run(f"while ip rule del pref {_FAULT} 2>/dev/null; do :; done")
        for one, two in self._lines:
            self._set({"from": self[one].host, "to": self[two].host})
        self._lines.clear()
        for position in self._shaped:
            self[position].run("tc qdisc del dev eth0 root")
            self.router.run(f"tc qdisc del dev r{position} root")
        self._shaped.clear()
