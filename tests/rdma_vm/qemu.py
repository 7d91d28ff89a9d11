"""What a machine shall have, and the QEMU command line that makes it. Nothing here starts anything.

Why the emulator is told what it is told (measured without KVM, on two shared cores): string instructions by ``rep``
(erms, fsrm) are emulated byte by byte and halve rxe's bandwidth, so the kernel shall not think them fast; smap and smep
make each entry into the kernel flush translations; five-level page tables lengthen each walk.

A ``/dev/kvm`` on a processor without vmx or svm is a paravirtual one: a stock kernel runs on it a hundred times slower
than in the emulator.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

PROGRAM: Final = "qemu-system-x86_64"
_CPU: Final = {"kvm": "host", "tcg": "max,-erms,-fsrm,-smap,-smep,-la57"}
_ACCELERATOR: Final = {"kvm": "kvm", "tcg": "tcg,thread=multi"}
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet panic=-1 mitigations=off nopti nokaslr audit=0 apparmor=0 selinux=0 random.trust_cpu=on "
    "cryptomgr.notests tsc=reliable no_timer_check rcupdate.rcu_expedited=1"
)
#: Distance between the buses of two nodes' bridges: room for the ports of each.
_BUSES: Final = 32
HOSTS_MAX: Final = 2
NODES_MAX: Final = 4
NICS_MAX: Final = 16


@dataclass(frozen=True)
class Plan:
    """What each of ``hosts`` machines has.

    ``pairs``: veth cables with an RDMA device at both ends, rxe0 - rxe1, rxe2 - rxe3 and so on. The quickest wire, on
    no NUMA node. ``nics``: PCI cards with an RDMA device each, numbered after those, on the NUMA nodes in turn, all on
    one wire, which joins the hosts too. ``shares``: folders that may be written there, by their own path.
    ``systemd``: it is process 1 when the command runs. ``tsc_khz``: of an emulated processor, see ``ticks``; 0 lets the
    guest find out.
    """

    pairs: int = 1
    nics: int = 0
    numa: int = 1
    hosts: int = 1
    cpus: int = 2
    memory_mib: int = 2048
    hugepages: int = 0
    shares: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    kernel_arguments: tuple[str, ...] = ()
    systemd: bool = False
    tsc_khz: int = 0
    accelerator: str = "tcg"

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be."""
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise ValueError(f"hosts: 1 to {HOSTS_MAX}")
        if not 1 <= self.numa <= NODES_MAX:
            raise ValueError(f"NUMA nodes: 1 to {NODES_MAX}")
        if self.pairs < 0 or not 0 <= self.nics <= NICS_MAX:
            raise ValueError(f"pairs: 0 or more; network cards: 0 to {NICS_MAX}")
        if self.cpus < self.numa or self.memory_mib < 256 * self.numa:
            raise ValueError("each NUMA node needs a processor and 256 MiB")
        for share in self.shares:
            if not share.startswith("/") or share == "/" or "\n" in share:
                raise ValueError(f"cannot share {share!r}")

    def settings(self, host: int, here: str) -> str:
        """What guest/ reads as a piece of shell."""
        values = {
            "host": host, "hosts": self.hosts, "cpus": self.cpus, "pairs": self.pairs, "nics": self.nics,
            "hugepages": self.hugepages, "here": shlex.quote(here), "systemd": int(self.systemd),
        }  # fmt: skip
        return "".join(f"{name}={value}\n" for name, value in values.items())


class Wires(NamedTuple):
    """Descriptors that QEMU inherits: the initramfs, a socket for each stream, the cable to the other machine or -1."""

    initramfs: int
    console: int
    control: int
    out: int
    err: int
    cable: int = -1


def choose_accelerator(cpuinfo: str, kvm_usable: bool) -> str:
    """``kvm`` where a processor of /proc/cpuinfo can do it and we may use it; else ``tcg``."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    able = flags is not None and not {"vmx", "svm"}.isdisjoint(flags[1].split())
    return "kvm" if able and kvm_usable else "tcg"


def mac(host: int, nic: int) -> str:
    """A card's address on the wire. guest/main finds the cards by it."""
    return f"52:54:00:51:{host:02x}:{nic:02x}"


def _node_of_cpu(plan: Plan, cpu: int) -> int:
    return cpu * plan.numa // plan.cpus


def _memory(plan: Plan) -> list[str]:
    """Memory and processors, dealt out to the nodes as evenly as they go."""
    words = []
    for node in range(plan.numa):
        size = plan.memory_mib // plan.numa + (plan.memory_mib % plan.numa if node == 0 else 0)
        cpus = [cpu for cpu in range(plan.cpus) if _node_of_cpu(plan, cpu) == node]
        words += [
            "-object", f"memory-backend-ram,id=memory{node},size={size}M",
            "-numa", f"node,nodeid={node},cpus={cpus[0]}-{cpus[-1]},memdev=memory{node}",
        ]  # fmt: skip
    for one in range(plan.numa):
        for two in range(plan.numa):
            if one != two:
                words += ["-numa", f"dist,src={one},dst={two},val=21"]
    return words


def _cards(plan: Plan, host: int, cable: int) -> list[str]:
    """The cards, each behind a bridge that says which node it is on, and the wire that joins them."""
    words = []
    bridges = range(plan.numa) if plan.numa > 1 and plan.nics else range(0)
    for node in bridges:
        number = (node + 1) * _BUSES
        words += ["-device", f"pxb-pcie,id=node{node},bus=pcie.0,bus_nr={number},numa_node={node}"]
    for nic in range(plan.nics):
        bus = "pcie.0"
        if bridges:
            bus = f"port{nic}"
            words += ["-device", f"pcie-root-port,id={bus},bus=node{nic % plan.numa},chassis={nic + 1},slot={nic}"]
        words += [
            "-netdev", f"hubport,id=net{nic},hubid=0",
            "-device", f"virtio-net-pci,netdev=net{nic},mac={mac(host, nic)},bus={bus},romfile=",
        ]  # fmt: skip
    if cable >= 0:
        words += ["-netdev", f"socket,id=cable,fd={cable}", "-netdev", "hubport,id=end,hubid=0,netdev=cable"]
    return words


def _folder(name: str, path: str, options: str) -> list[str]:
    # A comma in a value is doubled. remap: files of several file systems shall not share inode numbers.
    path = path.replace(",", ",,")
    return [
        "-fsdev", f"local,id={name},path={path},security_model=none,multidevs=remap{options}",
        "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name},bus=pcie.0",
    ]  # fmt: skip


def _streams(wires: Wires) -> list[str]:
    words = ["-chardev", f"socket,id=console,fd={wires.console}", "-serial", "chardev:console"]
    words += ["-device", "virtio-serial-pci,bus=pcie.0"]
    for name, descriptor in (("control", wires.control), ("out", wires.out), ("err", wires.err)):
        words += [
            "-chardev", f"socket,id={name},fd={descriptor}",
            "-device", f"virtserialport,chardev={name},name={name}",
        ]  # fmt: skip
    return words


def command_line(plan: Plan, host: int, image: Path, wires: Wires) -> Sequence[str]:
    """QEMU's, for one of the plan's machines."""
    arguments = [_KERNEL_ARGUMENTS, *plan.kernel_arguments]
    if plan.tsc_khz:
        arguments.append(f"tsc_early_khz={plan.tsc_khz}")
    if plan.systemd:
        arguments.append("fstab=no")
    if plan.hugepages:
        arguments.append(f"hugepages={plan.hugepages}")
    words = [
        PROGRAM, "-no-user-config", "-nodefaults", "-display", "none", "-monitor", "none", "-no-reboot",
        "-machine", "q35,hpet=off,vmport=off", "-accel", _ACCELERATOR[plan.accelerator],
        "-cpu", _CPU[plan.accelerator], "-smp", str(plan.cpus), "-m", f"{plan.memory_mib}M",
        "-kernel", str(image), "-initrd", f"/dev/fd/{wires.initramfs}", "-append", " ".join(arguments),
    ]  # fmt: skip
    words += _memory(plan)
    words += _cards(plan, host, wires.cable)
    words += _folder("host", "/", ",readonly=on")
    for number, share in enumerate(plan.shares):
        words += _folder(f"share{number}", share, "")
    return words + _streams(wires)
