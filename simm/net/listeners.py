"""Make listening sockets, accept from them, set the TCP options of what they accept, and receive from it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from ..config.parsers import Address
from ..config.startup import ensure_runtime_dir
from ..errors import SimmError
from ..host.file_locks import leads_to

_TCP_NOTSENT_LOWAT: Final = 25
_PORT_MAX: Final = 65_535
_REMEDIES: Final = {
    errno.EADDRINUSE: "free it, or choose another {} (port 0 is any free one)",
    errno.EACCES: "ports below 1024 are for root, or with CAP_NET_BIND_SERVICE: choose another {}",
    errno.EADDRNOTAVAIL: "this host has no such address: choose another {}",
}

_NONE_LEFT: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: Errors of the waiting connection only, see accept(2).
_PASSING: Final = frozenset(
    (
        errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENONET,
    )
)  # fmt: skip


class OutOfDescriptors(Exception):
    """No connection can be accepted before this process, or the system, has descriptors or memory again."""


def accepted(listener: socket.socket, most: int) -> Iterator[tuple[socket.socket, Any]]:
    """Yield up to ``most`` connections that wait at a non-blocking listener, with their addresses.

    Raises OutOfDescriptors, and OSError if the listener itself is broken.
    """
    for _ in range(most):
        try:
            found = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            if exc.errno in _NONE_LEFT:
                raise OutOfDescriptors(str(exc)) from exc
            if exc.errno not in _PASSING:
                raise
        else:
            yield found


def received(sock: socket.socket, most: int) -> bytes | None:
    """Return what has come, ``most`` bytes at most: nothing at the end or after an error; None if none is there yet."""
    try:
        return sock.recv(most)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def tune(sock: socket.socket, unsent_bytes: int, stall_s: float) -> None:
    """Set a server's TCP options: no delay, a bound on unsent bytes, and detection of a peer that is gone."""
    seconds = max(1, int(stall_s))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000),
        *([(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)] if unsent_bytes else ()),
    ):
        sock.setsockopt(level, option, value)


def listen_tcp(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """Return a listening TCP socket. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return sock


def open_listener(address: Address, flag: str) -> socket.socket:
    """Listen on an address. Raises SimmError naming the flag that gave it."""
    if address.port > _PORT_MAX:
        raise SimmError(f"there is no port {address.port}: choose a lower one by {flag} (port 0 is any free one)")
    try:
        return listen_tcp(*address)
    except OSError as exc:
        remedy = _REMEDIES.get(exc.errno or 0, "choose another {}").format(flag)
        raise SimmError(f"{exc.strerror or exc}: {remedy}") from exc


def require_free(addresses: Iterable[tuple[Address, str]], wait_s: float = 1.0) -> None:
    """Look whether all addresses could be listened on, for a start that takes long. Each has the flag that gave it.

    The processes of a former server that was killed may have one for a moment: so this waits for them. Raises as
    :func:`open_listener`.
    """
    give_up_at = time.monotonic() + wait_s
    with contextlib.ExitStack() as opened:
        for address, flag in addresses:
            while address.port:
                try:
                    opened.enter_context(open_listener(address, flag))
                    break
                except SimmError as exc:
                    taken = isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EADDRINUSE
                    if not taken or time.monotonic() >= give_up_at:
                        raise
                time.sleep(0.05)


def bound_address(sock: socket.socket) -> Address:
    """Return the address of a listener, with the port that port 0 became."""
    host, port = sock.getsockname()[:2]
    return Address(host, port)


def listen_unix(path: str, *, group: int | None = None, backlog: int = 1024) -> socket.socket:
    """Return a listening UNIX socket at ``path``, which must not exist, for this user and members of ``group`` (a gid).

    Its owner, group and mode are set before a client can connect. Raises OSError with the path in its text.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(path)
        if group is not None:
            os.chown(path, -1, group)
        os.chmod(path, 0o600 if group is None else 0o660)
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {path}: {exc.strerror or exc}") from exc
    return sock


class NamedSocket:
    """A worker's listening UNIX socket: found by its ``path``, and by inheritance where the path is lost.

    A path can be removed while the socket lives: by a cleaner of the runtime folder, or by hand. Then no new client
    finds the worker, and each put by TCP fails too if streams go by the path. So the children of the supervisor connect
    by `direct_path`, which leads to the inode that they inherited and needs no name. And the worker compares the path
    with its socket (`lost`), and binds another one there (`bind_again`).

    The supervisor holds a lock on the server's name (``host/file_locks.py``), so what lies at the path instead is
    nobody's, and is replaced. ``group``: a gid whose members may connect, too. Raises OSError.
    """

    def __init__(self, path: str, group: int | None = None) -> None:
        self.path = path
        self._group = group
        #: Refers to the inode of the socket at the path (O_PATH).
        self._inode = -1
        self.listener = self._bind()

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors of the listener and of the inode, which a child that uses this must keep."""
        return self.listener.fileno(), self._inode

    @property
    def direct_path(self) -> str:
        """A path to the socket for this process and its children; it does not depend on `path`."""
        return f"/proc/self/fd/{self._inode}"

    def lost(self) -> bool:
        """Return True if the path does not lead to this socket."""
        return not leads_to(self.path, self._inode)

    def bind_again(self) -> socket.socket:
        """Bind another socket at the path and return it. Make the folder if it is gone. Raises OSError, ConfigError.

        Connections to the first one are as they were. A process that does this cannot use `direct_path` any more.
        """
        ensure_runtime_dir(Path(self.path).parent, self._group)
        return self._bind()

    def _bind(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener = listen_unix(self.path, group=self._group)
        try:
            inode = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            listener.close()
            raise
        if self._inode >= 0:
            os.close(self._inode)
        self._inode = inode
        return listener

    def close(self) -> None:
        """Close the socket. The path stays."""
        self.listener.close()
        if self._inode >= 0:
            os.close(self._inode)
            self._inode = -1
