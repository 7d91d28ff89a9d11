"""Starts the machines of a plan, passes on what their command says, and ends with its exit status.

Nothing of a boot is on disk: the initramfs is a nameless file, the streams and the cable between two machines are
socket pairs. QEMU asks the kernel to be killed when we end, whatever ends us. So nothing can be left behind, not even
by kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from tests.rdma_vm import initramfs, kernel
from tests.rdma_vm.errors import BootFailed, Unavailable
from tests.rdma_vm.packages import find_program
from tests.rdma_vm.qemu import PROGRAM, Plan, Wires, command_line

#: The runner's own exit statuses, as those of timeout(1) and of container runtimes.
TIMED_OUT, FAILED = 124, 125
#: After the command has ended everywhere: time for what it said to arrive, and for power off, seconds.
_LEAVE_S: Final = 20.0
#: From start to "ready", seconds. A bound for what hangs.
BOOT_S: Final = 180.0
_CONSOLE_BYTES: Final = 16 << 10
_PASSED_ON: Final = re.compile(r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TERM|CI|PYTHON\w*|PYTEST_\w+|SIMM_TEST_\w+")
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def script(command: Sequence[str], here: str, environment: Mapping[str, str]) -> str:
    """The piece of shell that runs the command in the machine."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([*lines, f"cd {shlex.quote(here)} || exit 125", f"exec {shlex.join(command)}", ""])


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What of our environment the command sees too."""
    return {name: value for name, value in environment.items() if _PASSED_ON.fullmatch(name)}


def _end_with(parent: int) -> None:
    """In the child: be killed when its parent ends, and at once if that is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Stream:
    """One direction of bytes from the guest."""

    def __init__(self, machine: Machine, name: str, ours: socket.socket) -> None:
        self.machine = machine
        self.name = name
        self.socket = ours
        self.rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Whole lines, of what came before too."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        return whole


class Machine:
    """One of them. ``status``: the command's, once it has ended."""

    def __init__(self, host: int, process: subprocess.Popen[bytes], streams: dict[str, socket.socket]) -> None:
        self.host = host
        self.process = process
        self.streams = [Stream(self, name, ours) for name, ours in streams.items()]
        self.began = time.monotonic()
        self.ready_s = 0.0
        self.status: int | None = None
        self.why = ""
        self.console = b""

    def heard(self, line: str) -> None:
        """A line on the control port."""
        word, _, rest = line.partition(" ")
        if word == "ready":
            self.ready_s = time.monotonic() - self.began
        elif word == "exit":
            self.status = int(rest)
        elif word == "failed":
            self.why = rest

    @property
    def over(self) -> bool:
        """Is there nothing more to come of it than the last words?"""
        return self.status is not None or bool(self.why) or self.process.poll() is not None

    def end(self) -> None:
        """Kill QEMU, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for stream in self.streams:
            stream.socket.close()


def _start(plan: Plan, host: int, found: kernel.Kernel, kept: Path, about: Mapping[str, bytes],
           cable: socket.socket | None) -> Machine:  # fmt: skip
    parent = os.getpid()
    with contextlib.ExitStack() as stack:
        archive = initramfs.complete(kept, about)
        stack.callback(os.close, archive)
        ours: dict[str, socket.socket] = {}
        theirs: list[int] = []
        for name in ("console", "control", "out", "err", "qemu"):
            one, two = socket.socketpair()
            ours[name] = one
            stack.callback(two.close)
            theirs.append(two.fileno())
        console, control, out, err, qemu = theirs
        wires = Wires(archive, console, control, out, err, cable.fileno() if cable is not None else -1)
        process = subprocess.Popen(
            command_line(plan, host, found.image, wires),
            stdin=subprocess.DEVNULL, stdout=qemu, stderr=qemu,
            pass_fds=[descriptor for descriptor in wires if descriptor >= 0],
            start_new_session=True, preexec_fn=lambda: _end_with(parent),
        )  # fmt: skip
        return Machine(host, process, ours)


def _write(target: BinaryIO, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        target.write(data)
        target.flush()


class Watch:
    """Reads all streams of some machines until their commands have ended, or the time is up."""

    def __init__(self, machines: Sequence[Machine], timeout_s: float | None) -> None:
        self.machines = machines
        self.until = time.monotonic() + timeout_s if timeout_s else None
        self.timed_out = False
        self._selector = selectors.DefaultSelector()
        for machine in machines:
            for stream in machine.streams:
                self._selector.register(stream.socket, selectors.EVENT_READ, stream)

    def run(self) -> None:
        """Until the end. Raises BootFailed."""
        leave: float | None = None
        with self._selector:
            while self._selector.get_map():
                for key, _ in self._selector.select(0.2):
                    self._read(key.data)
                now = time.monotonic()
                if self.until is not None and now > self.until:
                    self.timed_out = True
                    return
                for machine in self.machines:
                    if not machine.ready_s and not machine.over and now > machine.began + BOOT_S:
                        raise BootFailed(f"machine {machine.host} did not come up in {BOOT_S:.0f} s{_last(machine)}")
                if all(machine.over for machine in self.machines):
                    leave = leave or now + _LEAVE_S
                    if now > leave:
                        return

    def _read(self, stream: Stream) -> None:
        try:
            data = stream.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        machine = stream.machine
        if not data:
            self._selector.unregister(stream.socket)
            if stream.rest and stream.name in ("out", "err"):
                self._pass_on(stream, [stream.rest])
            return
        if stream.name in ("console", "qemu"):  # QEMU's own words are of interest as the kernel's are: after a failure
            machine.console = (machine.console + data)[-_CONSOLE_BYTES:]
        elif stream.name == "control":
            for line in stream.lines(data):
                machine.heard(line.decode(errors="replace"))
        elif len(self.machines) > 1:
            self._pass_on(stream, stream.lines(data))
        else:
            _write(sys.stdout.buffer if stream.name == "out" else sys.stderr.buffer, data)

    def _pass_on(self, stream: Stream, lines: Sequence[bytes]) -> None:
        target = sys.stdout.buffer if stream.name == "out" else sys.stderr.buffer
        _write(target, b"".join(b"[%d] %s\n" % (stream.machine.host, line) for line in lines))


def _last(machine: Machine) -> str:
    """What a machine that has failed said last."""
    text = machine.console.decode(errors="replace").replace("\r", "").strip()
    return f"{': ' + machine.why if machine.why else ''}\n{text}"


def run(plan: Plan, command: Sequence[str], *, here: str, timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None, verbose: bool = False) -> int:  # fmt: skip
    """Boot, run the command in the folder ``here``, power off. Returns the exit status: the first that is not 0 of two.

    124 after ``timeout_s`` seconds. Raises Unavailable, BootFailed.
    """
    if not find_program(PROGRAM):
        raise Unavailable(f"no {PROGRAM}: apt-get install qemu-system-x86")
    found = kernel.find()
    kept = initramfs.base(found, plan.modules)
    text = script(command, here, {**passed_on(os.environ), **(environment or {})})
    about = {
        "main": (initramfs.GUEST / "main").read_bytes(),
        "command": text.encode(),
        "shares": "".join(f"{share}\n" for share in plan.shares).encode(),
    }
    machines: list[Machine] = []
    cables: Sequence[socket.socket | None] = socket.socketpair() if plan.hosts > 1 else [None]
    try:
        for host in range(plan.hosts):
            settings = plan.settings(host, here).encode()
            machines.append(_start(plan, host, found, kept, {**about, "settings": settings}, cables[host]))
        for cable in cables:
            if cable is not None:
                cable.close()
        watch = Watch(machines, timeout_s)
        watch.run()
        if verbose:
            for machine in machines:
                took = time.monotonic() - machine.began
                print(f"vm: {found.name}, {plan.accelerator}: ready after {machine.ready_s:.1f} s, "
                      f"ended after {took:.1f} s", file=sys.stderr)  # fmt: skip
        if watch.timed_out:
            print(f"vm: ended after {timeout_s:g} s, the time that it was given", file=sys.stderr)
            return TIMED_OUT
        for machine in machines:
            if machine.status is None:
                raise BootFailed(f"machine {machine.host} ended without an exit status{_last(machine)}")
        return next((machine.status for machine in machines if machine.status), 0)
    finally:
        for machine in machines:
            machine.end()
        for cable in cables:
            if cable is not None:
                cable.close()
