"""TCP ports for servers whose port must be known before they start, or must still be free when they start again.

A port that the kernel chose (``bind`` to port 0) comes from the range of ephemeral ports. Once its server has ended,
the kernel may give it to any outgoing connection on the machine, and the server's next start fails with EADDRINUSE.
The ports here lie below that range, so no connection gets one by chance.

A port stays its process's until that ends: a server that is down for a while finds it free again, though other tests
run on this machine, of another pytest or in a program that a test has started. A byte of a file is locked for each.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
from pathlib import Path

#: Ports of one pytest process (pytest-xdist runs several beside each other), and the distance between two
#: reservations: a data server takes the ports that follow its own, for further workers and for RDMA.
BLOCK, STEP = 1600, 8
#: How many pytest processes have a block of their own. The default ports of the SiMM programs (30001 and following)
#: and of etcd lie outside of the blocks.
BLOCKS = 8


def _first_ephemeral() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _block() -> range:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % BLOCKS
    end = min(_first_ephemeral(), 30_000) - worker * BLOCK
    return range(end - BLOCK, end, STEP)


_turns = itertools.count(os.getpid())
#: Opened now, as tests count descriptors. A lock ends with its process, and a child has none. What is named "simm-..."
#: would be taken for an arena that somebody keeps open.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_locks = os.open(f"/tmp/ports-of-simm-tests-{os.geteuid()}", _FLAGS, 0o600)


def _is_anothers(port: int) -> bool:
    """Return True if another process has the port; else it is this one's from now on."""
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return True
    return False


def reserve_port() -> int:
    """Return a port of the loopback address that nothing listens on, and that no other process of tests is given.

    This process does not return the same port again until its block of 200 is used up. If others have all of it, one
    that is free at the moment must do.
    """
    block = _block()
    for turn in range(2 * len(block)):
        port = block[next(_turns) % len(block)]
        if turn < len(block) and _is_anothers(port):
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise
            continue
        return port
    raise AssertionError(f"ports {block.start} to {block.stop} are all in use")
