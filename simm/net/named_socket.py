"""A worker's UNIX socket: found by its path, and by inheritance where the path is lost.

A path can be removed while the socket lives: by a cleaner of the runtime folder, or by hand. Then no new client finds
the worker, and each put by TCP fails too if streams go by the path. So the children of the supervisor connect by
`direct_path`, which leads to the inode that they inherited and needs no name. And the worker compares the path with its
socket (`lost`), and binds another one there (`bind_again`).

The supervisor holds a lock on the server's name (``host/file_locks.py``), so what lies at the path instead is nobody's.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ..config.startup import ensure_runtime_dir
from ..host.file_locks import leads_to
from .listeners import listen_unix


class NamedSocket:
    """A listening UNIX socket at ``path``, for members of ``group`` (a gid) too. Raises OSError.

    What lies at the path is replaced.
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
