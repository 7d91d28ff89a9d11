"""A real etcd of one member, in a folder of the test's own, that can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from simm.etcd import Etcd, EtcdError

READY_S = 30.0
PROGRAM = shutil.which("etcd")
MISSING = "no etcd in PATH (Debian's package etcd-server has it)"


def free_port() -> int:
    """A port that was free a moment ago; etcd cannot be asked for any free one."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class EtcdServer:
    """One etcd. Ports and data outlive ``kill`` and ``start``."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        self.folder = folder
        self.flags = flags
        self.scheme = scheme
        self.port = 0
        self.peer_port = 0
        self.process: subprocess.Popen[bytes] | None = None

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

    def client(self) -> Etcd:
        """Of a server without TLS."""
        return Etcd([("127.0.0.1", self.port)])

    def start(self) -> None:
        """Start, or start again, and wait until it answers."""
        assert PROGRAM is not None, MISSING
        for _ in range(5):
            if not self.port:
                self.port, self.peer_port = free_port(), free_port()
            if self._started():
                return
            if (self.folder / "data").exists() and any((self.folder / "data").iterdir()):
                break  # its ports are its name now
            self.port = 0
        raise AssertionError(f"etcd does not start: {(self.folder / 'log').read_text(errors='replace')[-2000:]}")

    def _started(self) -> bool:
        assert PROGRAM is not None
        client, peer = f"{self.scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--data-dir", str(self.folder / "data"), "--listen-client-urls", client,
                 "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"default={peer}", "--unsafe-no-fsync", *self.flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env={key: value for key, value in os.environ.items() if not key.startswith("ETCD_")},
            )  # fmt: skip
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError, EtcdError, http.client.HTTPException):
                if self.scheme == "https":
                    socket.create_connection(("127.0.0.1", self.port), 1).close()
                    return True
                self.client().get(b"ready")
                return True
            time.sleep(0.05)
        self.kill()
        return False

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self, paused: bool) -> None:
        """SIGSTOP and SIGCONT: it accepts connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
