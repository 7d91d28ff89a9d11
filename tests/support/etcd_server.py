"""A real etcd of one member, in a folder of the test's own, that can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import time
from pathlib import Path

from simm.control.etcd import Etcd, EtcdError, put
from tests.support.child import Child
from tests.support.ports import reserve_port
from tests.support.waiting import WAIT_S, wait_until

READY_S = 120.0
PROGRAM = shutil.which("etcd")
MISSING = "no etcd in PATH (Debian's package etcd-server has it)"


def put_key(etcd: Etcd, key: bytes, value: bytes, lease: int = 0) -> int:
    """Write a key without a condition; return the revision."""
    return etcd.txn((), [put(key, value, lease)]).revision


def all_stopped(pid: int) -> bool:
    """Return whether each thread of a process is stopped by a signal."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


class EtcdServer:
    """One etcd. Ports and data outlive ``kill`` and ``start``."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        self.folder = folder
        self.flags = flags
        self.scheme = scheme
        self.port = 0
        self.peer_port = 0
        self.child: Child | None = None

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """For --coordinator, without a prefix."""
        return f"etcd{self.scheme.removeprefix('http')}://127.0.0.1:{self.port}"

    def client(self, login: tuple[str, str] | None = None, deadline_s: float = WAIT_S) -> Etcd:
        """Of a server without TLS. It waits for as long as a busy machine takes."""
        return Etcd([("127.0.0.1", self.port)], login=login, deadline_s=deadline_s)

    def enable_users(self, name: str, password: str) -> None:
        """Let nobody in but this user, who may do everything. ``name``: root, as etcd wants it."""
        for what, body in (
            ("user/add", {"name": name, "password": password}), ("role/add", {"name": "root"}),
            ("user/grant", {"user": name, "role": "root"}), ("enable", {}),
        ):  # fmt: skip
            self.client()._call(f"auth/{what}", body, None)

    def start(self) -> None:
        """Start, or start again, and wait until it answers."""
        assert PROGRAM is not None, MISSING
        for _ in range(5):
            if not self.port:
                self.port, self.peer_port = reserve_port(), reserve_port()
            if self._started():
                return
            if (self.folder / "data").exists() and any((self.folder / "data").iterdir()):
                break  # its ports are its name now
            self.port = 0
        raise AssertionError(f"etcd does not start: {(self.folder / 'log').read_text(errors='replace')[-2000:]}")

    def _started(self) -> bool:
        assert PROGRAM is not None
        client, peer = f"{self.scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        self.child = Child(
            [PROGRAM, "--data-dir", str(self.folder / "data"), "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"default={peer}", "--unsafe-no-fsync", *self.flags],
            name="etcd", log=self.folder / "log", folder=self.folder,
            environment={key: value for key, value in os.environ.items() if not key.startswith("ETCD_")},
        )  # fmt: skip
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.child.running:
            with contextlib.suppress(OSError, EtcdError, http.client.HTTPException):
                if self.scheme == "https":
                    socket.create_connection(("127.0.0.1", self.port), 1).close()
                    return True
                self.client(deadline_s=2.0).get(b"ready")
                return True
            time.sleep(0.05)
        self.kill()
        return False

    def kill(self) -> None:
        """kill -9."""
        if self.child is not None:
            self.child.kill()
            self.child = None

    def pause(self, paused: bool) -> None:
        """SIGSTOP and SIGCONT: it accepts connections and answers nothing."""
        assert self.child is not None
        pid = self.child.pid
        self.child.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
        if paused:  # its threads stop one by one: until then it may answer
            wait_until(lambda: all_stopped(pid), "all of its threads are stopped")
