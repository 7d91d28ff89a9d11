"""python -m tests.rdma_vm [options] -- COMMAND [ARGUMENT ...]: run a command in a throw-away machine with RDMA devices.

The machine sees this one's files, read-only under a layer that is forgotten, and may write to the folders that --share
names. What the command says is passed on, and its exit status is ours; 124: out of time; 125: the machine failed or
cannot be had here, said on stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tests.rdma_vm import boot, initramfs, kernel, packages, ticks
from tests.rdma_vm.errors import BootFailed, Unavailable
from tests.rdma_vm.qemu import Plan, choose_accelerator


def _parser() -> argparse.ArgumentParser:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m tests.rdma_vm", description=description, epilog=more)
    parser.add_argument("--pairs", type=int, default=1, help="veth cables with an RDMA device at both ends (1)")
    parser.add_argument("--nics", type=int, default=0, help="PCI cards, each an RDMA device, on the nodes in turn")
    parser.add_argument("--numa", type=int, default=1, help="NUMA nodes (1)")
    parser.add_argument("--hosts", type=int, default=1, help="machines, cabled; both run the command (1)")
    parser.add_argument("--cpus", type=int, default=0, help="processors of each (2, at least one a node)")
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB", help="memory of each (2048)")
    parser.add_argument("--hugepages", type=int, default=0, help="2 MiB pages")
    parser.add_argument("--share", action="append", default=[], metavar="FOLDER", help="may be written there")
    parser.add_argument("--systemd", action="store_true", help="with systemd as its process 1")
    parser.add_argument("--module", action="append", default=[], help="one more kernel module")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the command")
    parser.add_argument("--timeout", type=float, metavar="S", help="end after so many seconds, with status 124")
    parser.add_argument("--accelerator", choices=["auto", "kvm", "tcg"], default="auto")
    parser.add_argument("--check", action="store_true", help="say what is missing, and end: 0 nothing, 77 something")
    parser.add_argument("--missing", action="store_true", help="list the missing packages, and end")
    parser.add_argument("--prepare", action="store_true", help="fetch the kernel, and end")
    parser.add_argument("--verbose", action="store_true", help="say how long it took")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _accelerator(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return choose_accelerator(Path("/proc/cpuinfo").read_text(), os.access("/dev/kvm", os.R_OK | os.W_OK))


def _ended(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    """The command."""
    parser = _parser()
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        reason = packages.why_not()
        if arguments.check:
            print(reason, end="\n" if reason else "")
            return 77 if reason else 0
        if arguments.missing:
            print(*packages.missing())
            return 0
        if arguments.prepare:
            initramfs.base(kernel.find(), arguments.module)
            return 0
        if not command:
            parser.error("no command")
        accelerator = _accelerator(arguments.accelerator)
        try:
            plan = Plan(
                pairs=arguments.pairs, nics=arguments.nics, numa=arguments.numa, hosts=arguments.hosts,
                cpus=arguments.cpus or max(2, arguments.numa), memory_mib=arguments.memory,
                hugepages=arguments.hugepages, modules=tuple(arguments.module), systemd=arguments.systemd,
                shares=tuple(os.path.realpath(share) for share in arguments.share),
                accelerator=accelerator, tsc_khz=ticks.khz() if accelerator == "tcg" else 0,
            )  # fmt: skip
        except ValueError as error:
            parser.error(str(error))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _ended)
        environment = dict(pair.partition("=")[::2] for pair in arguments.env)
        return boot.run(
            plan, command, here=os.path.realpath(os.getcwd()), timeout_s=arguments.timeout,
            environment=environment, verbose=arguments.verbose,
        )  # fmt: skip
    except (Unavailable, BootFailed) as error:
        print(f"vm: {error}", file=sys.stderr)
        return boot.FAILED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
