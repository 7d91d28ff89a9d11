"""Tell the user of a connection's other end on this host, as the kernel knows it.

UNIX sockets have SO_PEERCRED. Of a TCP connection the kernel tells the user of any socket of the network namespace, by
its pair of addresses: sock_diag(7) in one exchange of about 50 us, whatever the number of sockets. Where a sandbox has
no sock_diag, /proc/net/tcp lists them all, which takes milliseconds from some thousand sockets on.

What could tell the wrong user
------------------------------
* *The peer has closed.* A socket without a process has uid 0 in both sources. So only one with an inode counts.
* *The peer has shut down its sending side* after its request. Its socket is in FIN_WAIT1 or FIN_WAIT2 then, this end in
  CLOSE_WAIT. It counts as long as its process has it. If it is not found, it may have gone without a word (its process
  chooses after how long), so that says nothing of another network namespace.
* *The peer has closed, and another process has its port.* As long as this end is established, or in CLOSE_WAIT, the
  kernel completes no second connection of the pair: what the other process begins is in SYN_SENT, until it has reset
  this end. So this end's state is read after the answer.
* *A listening socket answers for the pair.* The kernel looks for one if there is no connection, so state and addresses
  of the answer are compared.
* *The peer is in another network namespace*, or its packets were redirected. Then no socket here has the pair.
* *An IPv4 address in an IPv6 socket*, on either side. Both sources have it among IPv6, and it is compared as IPv4.
* *A line of /proc/net/tcp is cut.* It counts only if it is whole, and if no other line of the pair says otherwise.

The user is that of the process that made the socket. A forwarder (a proxy of a container engine, ``ssh -L``) has its
own: a user who may use one of root's counts as root.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import struct
from collections.abc import Container, Iterable
from typing import Final

from ..host.users import NOT_TRUSTED, trusts

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLMSG_ERROR: Final = 2
_NLM_F_REQUEST: Final = 1
#: struct nlmsghdr: length, type, flags, sequence number, port.
_HEADER: Final = struct.Struct("=IHHII")
#: struct inet_diag_req_v2 up to the addresses: family, protocol, extensions, padding, states. Then ports and addresses.
_REQUEST: Final = struct.Struct("=BBBxI")
_PORTS: Final = struct.Struct(">HH")
#: The end of struct inet_diag_sockid: interface and cookie; this cookie fits every socket.
_ANY: Final = struct.pack("=III", 0, 0xFFFF_FFFF, 0xFFFF_FFFF)
#: struct inet_diag_msg: family, state, timer, retransmissions, ports, addresses, interface and cookie, expiry, queues,
#: uid, inode.
_ANSWER: Final = struct.Struct("=BBBB4s16s16s12sIIIII")
#: struct nlmsgerr: a negative error number.
_ERROR: Final = struct.Struct("=i")
_ANSWER_BYTES_MAX: Final = 8192
_UCRED: Final = struct.Struct("3i")

_ESTABLISHED: Final = 1
#: Of this end, when the other one has shut down its sending side.
_CLOSE_WAIT: Final = 8
#: States of a peer that may still read an answer: established, FIN_WAIT1, FIN_WAIT2.
_PEER_STATES: Final = (_ESTABLISHED, 4, 5)
_MAPPED: Final = bytes(10) + b"\xff\xff"

#: A line of /proc/net/tcp or tcp6 of a socket in such a state: uid and inode. By the kernel's widths of columns, so
#: that a lost column does not make another one the uid.
_LINE: Final = (
    rb" *\d+: [0-9A-F]+:[0-9A-F]{4} [0-9A-F]+:[0-9A-F]{4} 0[145] [0-9A-F]{8}:[0-9A-F]{8} [0-9A-F]{2}:[0-9A-F]+"
    rb" [0-9A-F]+ ( {4}\d| {3}\d{2}| {2}\d{3}| \d{4}|\d{5,10}) +-?\d+ (\d+) \d+ [0-9a-fx]{8,} [^\n]*\n"
)

#: Address (4 or 16 bytes) and port of one end.
End = tuple[bytes, int]


class UnknownUser(Exception):
    """The kernel does not tell the user; the text says why."""


class HasClosed(UnknownUser):
    """No process has the other end any more."""

    def __init__(self) -> None:
        super().__init__("it has closed")


class NotHere(UnknownUser):
    """No socket of this network namespace is the other end, although the connection stands."""


class _NoSockDiag(Exception):
    """This system has no sock_diag."""


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of a UNIX socket's peer from the kernel; (0, -1, -1) for TCP."""
    if sock.family != socket.AF_UNIX:
        return 0, -1, -1
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def is_loopback(sock: socket.socket) -> bool:
    """Return True for a TCP connection to a loopback address. Raises OSError if it has ended."""
    raw = _end(sock, sock.getpeername())[0]
    return raw[0] == 127 if len(raw) == 4 else raw == bytes(15) + b"\1"


def tcp_uid(sock: socket.socket) -> int:
    """Return the uid of a TCP connection's other end. Raises UnknownUser."""
    try:
        here, there = _end(sock, sock.getsockname()), _end(sock, sock.getpeername())
        uid = _uid_of(sock, here, there)
        if not _stands(sock):
            raise HasClosed
        return uid
    except OSError as exc:
        if exc.errno == errno.ENOTCONN:
            raise HasClosed from exc
        raise UnknownUser(exc.strerror or str(exc)) from exc


def uid_of_peer(there: tuple[str, int], here: tuple[str, int]) -> int:
    """Do :func:`tcp_uid` for a connection whose socket a library has, by its addresses. Raises UnknownUser.

    When the other end has closed meanwhile, another process may have its address: the answer goes nowhere then.
    """
    one, other = (_address(host, port) for host, port in (there, here))
    try:
        uid = _by_sock_diag(one, other)
    except _NoSockDiag:
        uid = in_tables(_tables(one), one, other)
    if uid is None:
        raise UnknownUser("it has closed, or is not in this network namespace")
    return uid


def foreign_server(sock: socket.socket, trusted: Container[int]) -> str:
    """Return why a client without a token does not believe the server that has answered; empty if it does.

    Any user can listen on a loopback port that is free. Only root can redirect it to another network namespace.
    """
    try:
        if sock.family == socket.AF_UNIX or not is_loopback(sock):
            return ""
        uid = tcp_uid(sock)
    except NotHere:
        return ""
    except (UnknownUser, OSError) as exc:
        return f"the server's user cannot be told ({exc}); a token would prove it (--token-file)"
    return "" if trusts(uid, trusted) else f"the server is of uid {uid}, {NOT_TRUSTED}, or use a token"


def _uid_of(sock: socket.socket, here: End, there: End) -> int:
    try:
        uid = _by_sock_diag(there, here)
        if uid is None and _established(sock):
            if _by_sock_diag(here, there) is None:
                raise _NoSockDiag  # it does not even find this end
            if _established(sock):
                raise NotHere("it is not in this network namespace")
    except _NoSockDiag:
        uid = in_tables(_tables(there), there, here)
    if uid is None:
        raise UnknownUser("it has closed, or is not in this network namespace")
    return uid


def _end(sock: socket.socket, address: tuple[object, ...]) -> End:
    raw = socket.inet_pton(sock.family, str(address[0]).partition("%")[0])
    return _plain(raw), int(str(address[1]))


def _address(host: str, port: int) -> End:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _plain(socket.inet_pton(family, host.partition("%")[0])), port
    except OSError as exc:
        raise UnknownUser(f"{host} is no address") from exc


def _plain(raw: bytes) -> bytes:
    """Return an address that IPv6 maps as IPv4."""
    return raw[12:] if len(raw) == 16 and raw.startswith(_MAPPED) else raw


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _established(sock: socket.socket) -> bool:
    """Return True if both ends stand. Of a connection that is in CLOSE_WAIT here the other end may have gone."""
    return _state(sock) == _ESTABLISHED


def _stands(sock: socket.socket) -> bool:
    """Return True if this end has its pair of addresses for itself."""
    return _state(sock) in (_ESTABLISHED, _CLOSE_WAIT)


# --- sock_diag ----------------------------------------------------------------------------------


def _by_sock_diag(one: End, other: End) -> int | None:
    """Return the uid of the socket at ``one`` that is connected to ``other``; None if there is none.

    Raises UnknownUser for one that no process has any more, _NoSockDiag where that cannot be asked.
    """
    family = socket.AF_INET if len(one[0]) == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFF_FFFF) + _PORTS.pack(one[1], other[1])
    body += one[0].ljust(16, b"\0") + other[0].ljust(16, b"\0") + _ANY
    number = int.from_bytes(os.urandom(4), "little")
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, number, 0)
    try:
        kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
    except (OSError, AttributeError) as exc:
        raise _NoSockDiag from exc
    with kernel:
        try:
            kernel.sendto(head + body, (0, 0))
            answer, sender = kernel.recvfrom(_ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)
        except OSError as exc:
            raise _NoSockDiag from exc
    if sender[0] != 0:
        raise _NoSockDiag
    return uid_in_answer(answer, number, one, other)


def uid_in_answer(answer: bytes, number: int, one: End, other: End) -> int | None:
    """Return the uid in the kernel's answer to request ``number``; None if it says that there is no such socket.

    Raises UnknownUser for a socket that no process has any more, or another one; _NoSockDiag for anything else.
    """
    if len(answer) < _HEADER.size:
        raise _NoSockDiag
    size, kind, _flags, echoed, _port = _HEADER.unpack_from(answer)
    body = answer[_HEADER.size : size]
    if echoed != number or size > len(answer):
        raise _NoSockDiag
    if kind == _NLMSG_ERROR and len(body) >= _ERROR.size and _ERROR.unpack_from(body)[0] == -errno.ENOENT:
        return None
    if kind != _SOCK_DIAG_BY_FAMILY or len(body) < _ANSWER.size:
        raise _NoSockDiag
    family, state, _, _, ports, source, target, _, _, _, _, uid, inode = _ANSWER.unpack_from(body)
    size = 4 if family == socket.AF_INET else 16
    found = (_plain(source[:size]), _plain(target[:size]))
    if state not in _PEER_STATES or not inode or ports != _PORTS.pack(one[1], other[1]) or found != (one[0], other[0]):
        raise HasClosed
    return int(uid)


# --- /proc/net ----------------------------------------------------------------------------------


def _tables(end: End) -> list[bytes]:
    """Return /proc/net/tcp6, and tcp too for an IPv4 address. Raises UnknownUser."""
    found = []
    for name in ("tcp", "tcp6") if len(end[0]) == 4 else ("tcp6",):
        try:
            # What /proc/net leads to, which a unit with ProcSubset=pid does not see.
            with open(f"/proc/self/net/{name}", "rb") as file:
                found.append(file.read())
        except FileNotFoundError:
            continue  # a system without IPv6
        except OSError as exc:
            raise UnknownUser(f"/proc/net/{name}: {exc.strerror or exc}") from exc
    if not found:
        raise UnknownUser("neither sock_diag nor /proc/net tells it here")
    return found


def in_tables(tables: Iterable[bytes], one: End, other: End) -> int | None:
    """Return the uid of the socket at ``one`` that is connected to ``other``, from the texts of /proc/net/tcp and tcp6.

    None if they have none, or differing ones. O(bytes).
    """
    wanted = [(_shown(*one), _shown(*other))]
    if len(one[0]) == 4:
        wanted.append((_shown(_MAPPED + one[0], one[1]), _shown(_MAPPED + other[0], other[1])))
    uids = set()
    for table in tables:
        for (local, remote), state in itertools.product(wanted, _PEER_STATES):
            key = b" %b %b %02d " % (local, remote, state)
            at = table.find(key)
            while at >= 0:
                line = table[table.rfind(b"\n", 0, at) + 1 : table.find(b"\n", at) + 1]
                uids.add(_uid_in_line(line))
                at = table.find(key, at + 1)
    return uids.pop() if len(uids) == 1 else None


def _uid_in_line(line: bytes) -> int | None:
    """Return the uid in a whole line of a socket in such a state that a process has."""
    found = re.fullmatch(_LINE, line)
    return int(found[1]) if found is not None and int(found[2]) and int(found[1]) < 1 << 32 else None


def _shown(address: bytes, port: int) -> bytes:
    """Return an address as /proc/net/tcp shows it: the words of network order as this machine's numbers."""
    words = struct.unpack(f"={len(address) // 4}I", address)
    return b"".join(b"%08X" % word for word in words) + b":%04X" % port
