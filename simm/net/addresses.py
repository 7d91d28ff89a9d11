"""Find the addresses of hosts by their names within a deadline, and begin to connect.

A resolver may hang for half a minute, and no timeout of a socket bounds it. So a thread asks it, one for each name at a
time, and callers wait as long as they can. What it found last is good for ``KNOWN_S``, and for longer while it does not
answer: an address that was right is a better guess than none, and who listens there says who it is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Final

from ..errors import DeadlineError, TransportError
from ..host import fork
from ..host.threads import Waiters, lives

#: An address is used for so long without asking again, seconds.
KNOWN_S: Final = 5.0
#: A caller that has an older one waits so long for an answer, and then uses that.
STALE_S: Final = 0.05
#: Names that are remembered.
_NAMES_MAX: Final = 4096


def is_numeric(host: str) -> bool:
    """Return True if a host is an address, and no name that must be resolved."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):  # ValueError: a null character, or a surrogate
            continue
        return True
    return False


def connect(sock: socket.socket, address: Any, name: str, deadline_s: float) -> None:
    """Connect to an address, called ``name``. Raises TransportError, and closes the socket then."""
    try:
        sock.settimeout(deadline_s)
        sock.connect(address)
    except OSError as exc:
        sock.close()
        error = DeadlineError if isinstance(exc, TimeoutError) else TransportError
        raise error(f"cannot connect to {name}: {exc.strerror or exc}") from exc


def dial(address: str, port: int) -> socket.socket:
    """Begin to connect to a numeric address; the socket is writable when that has ended. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError):
            sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


class _Question:
    """One that a thread asks the resolver. ``_lock`` is held where it is made, read or changed."""

    def __init__(self, host: str, name: _Name) -> None:
        self.over = False
        self.changed = Waiters(_lock)
        #: It may end before its first statement, for want of memory.
        self.thread = threading.Thread(target=_ask, args=(host, name, self), name="simm-resolver", daemon=True)


class _Name:
    """What is known of one name. ``_lock`` is held where it is read or changed."""

    def __init__(self) -> None:
        self.found: tuple[socket.AddressFamily, str] | None = None
        self.found_at = 0.0
        #: Why the last question failed; empty if it did not.
        self.trouble = ""
        #: The question that is under way; None without one.
        self.asked: _Question | None = None


_lock = threading.Lock()
_names: dict[str, _Name] = {}


def resolve(host: str, deadline_s: float) -> tuple[socket.AddressFamily, str]:
    """Return the family and the address of a host. Raises DeadlineError, TransportError."""
    if is_numeric(host):
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), host
    with _lock:
        if len(_names) >= _NAMES_MAX and host not in _names:
            _names.clear()  # questions under way end without effect
        name = _names.setdefault(host, _Name())
        if name.found is not None and time.monotonic() - name.found_at < KNOWN_S:
            return name.found
        asked = name.asked
        if asked is None or not lives(asked.thread):  # one that is over is not noted any more
            asked = _Question(host, name)
            try:
                name.asked = asked
                asked.thread.start()
            except BaseException as exc:
                name.asked = None  # the next caller asks again, also after a Ctrl-C here
                if not isinstance(exc, RuntimeError):  # that is: no thread can be started
                    raise
                if name.found is not None:
                    return name.found
                raise TransportError(f"there is no address for {host}: {exc}") from exc
        patience_s = deadline_s if name.found is None else min(deadline_s, STALE_S)
    question = asked
    in_time = question.changed.wait_for(lambda: question.over, time.monotonic() + patience_s)
    with _lock:
        if name.found is not None:
            return name.found
    if not in_time:
        raise DeadlineError(f"there is no address for {host}: the resolver has not answered within {deadline_s:.1f} s")
    raise TransportError(f"there is no address for {host}: {name.trouble}")


def _ask(host: str, name: _Name, asked: _Question) -> None:
    """Ask the resolver, in a thread. An address of IPv4 comes first."""
    found, trouble = None, "the resolver names none"
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answers.sort(key=lambda each: each[0] != socket.AF_INET)
        for family, _kind, _protocol, _canonical, address in answers:
            found = (family, str(address[0]))
            break
    except Exception as exc:  # also a name that cannot be one, and no memory: whoever waits must hear of it
        trouble = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
    with _lock:
        name.trouble = trouble
        if found is not None:
            name.found, name.found_at = found, time.monotonic()
        if name.asked is asked:  # else who started this has given up, and another one asks
            name.asked = None
        asked.over = True
        asked.changed.notify_all()


def _after_fork_in_child() -> None:
    """Begin anew: the thread that asks, and perhaps the lock's owner, are not in this process."""
    global _lock
    _lock = threading.Lock()
    _names.clear()


fork.in_child(_after_fork_in_child)
