"""The user of a connection's other end: by the kernel's answers, by texts of /proc/net/tcp, and of real connections."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from simm.net import peer_uid
from simm.net.peer_uid import NotHere, UnknownUser, in_tables, tcp_uid, uid_in_answer
from tests.support.child import ROOT
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

LOOPBACK = socket.inet_aton("127.0.0.1")
SIX = socket.inet_pton(socket.AF_INET6, "::1")
SERVER = (LOOPBACK, 30001)
#: What connects to the server in TCP below, and its uid.
PEERS = {40001: 1000, 40002: 0, 40003: 4294967294, 40010: 1003, 40011: 1004}
#: Without a process, or only beginning to connect.
GONE = (40004, 40005, 40006, 40012)

HEAD = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
IDLE = b"00000000:00000000 00:00000000 00000000"
TAIL = b" 1 0000000000000000 20 4 30 10 -1\n"


def lines(*rows: bytes) -> bytes:
    """A table of /proc/net, as x86 shows it."""
    return HEAD + b"".join(b"%4d: %b%b" % (number, row, TAIL) for number, row in enumerate(rows))


#: A listener, three peers, one in TIME_WAIT, one in FIN_WAIT2 and one whose processes have gone, the server's end of
#: the first; two that have shut down their sending side, and one that connects.
TCP = lines(
    b"0100007F:7531 00000000:0000 0A " + IDLE + b"   100        0 911",
    b"0100007F:9C41 0100007F:7531 01 " + IDLE + b"  1000        0 912",
    b"0100007F:9C42 0100007F:7531 01 00000001:00000000 01:00000014 00000000     0        0 913",
    b"0100007F:9C43 0100007F:7531 01 " + IDLE + b" 4294967294        0 914",
    b"0100007F:9C44 0100007F:7531 06 00000000:00000000 03:00001770 00000000     0        0 0",
    b"0100007F:9C45 0100007F:7531 05 " + IDLE + b"     0        0 0",
    b"0100007F:9C46 0100007F:7531 01 " + IDLE + b"     0        0 0",
    b"0100007F:7531 0100007F:9C41 01 " + IDLE + b"   100        0 918",
    b"0100007F:9C4A 0100007F:7531 04 " + IDLE + b"  1003        0 922",
    b"0100007F:9C4B 0100007F:7531 05 " + IDLE + b"  1004        0 923",
    b"0100007F:9C4C 0100007F:7531 02 " + IDLE + b"  1005        0 924",
)
#: An IPv4 address in an IPv6 socket, and ::1.
MAPPED = b"0000000000000000FFFF00000100007F"
ONE = b"00000000000000000000000001000000"
TCP6 = lines(
    MAPPED + b":9C47 " + MAPPED + b":7531 01 " + IDLE + b"  1001        0 920",
    ONE + b":9C48 " + ONE + b":7531 01 " + IDLE + b"  1002        0 921",
)


def test_recorded_tables() -> None:
    for port, uid in PEERS.items():
        assert in_tables([TCP, TCP6], (LOOPBACK, port), SERVER) == uid
    assert in_tables([TCP, TCP6], (LOOPBACK, 0x9C47), SERVER) == 1001
    assert in_tables([TCP6], (SIX, 0x9C48), (SIX, 30001)) == 1002
    assert in_tables([TCP, TCP6], SERVER, (LOOPBACK, 40001)) == 100


def test_who_has_gone_is_not_root() -> None:
    """The kernel shows sockets without a process as uid 0."""
    for port in (*GONE, 40009, 30001):
        assert in_tables([TCP, TCP6], (LOOPBACK, port), SERVER) is None
    assert in_tables([TCP], (SIX, 0x9C48), (SIX, 30001)) is None
    assert in_tables([], (LOOPBACK, 40001), SERVER) is None


def test_a_table_that_is_cut_tells_a_uid_or_nothing() -> None:
    """At any byte: a number that lost its last digits would be another user."""
    for size in range(len(TCP) + 1):
        for port, uid in PEERS.items():
            assert in_tables([TCP[:size]], (LOOPBACK, port), SERVER) in (uid, None)
    assert in_tables([TCP[:-1]], (LOOPBACK, 40001), SERVER) == 1000


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"  1000        0 912", b"  10x0        0 912"), (b"  1000        0 912", b"  -100        0 912"),
        (b"  1000        0 912", b"  1000        0 9\xff2"), (b"  1000        0 912", b"912"),
        (b":9C41 0100007F:7531 01", b":9C41 0100007F:753101"), (b"00000000  1000", b"00000000\n  1000"),
        (b"  1000        0 912 1", b"  1000  912 1"), (b"  1000 ", b" 99999999999 "), (b"  1000 ", b"  1000\0"),
    ],
)  # fmt: skip
def test_a_damaged_line_tells_nothing(good: bytes, bad: bytes) -> None:
    assert good in TCP
    assert in_tables([TCP.replace(good, bad, 1)], (LOOPBACK, 40001), SERVER) is None


def test_two_lines_that_differ_tell_nothing() -> None:
    """The kernel writes a table in pieces, and sockets come and go in between."""
    line = TCP.splitlines(keepends=True)[2]
    assert in_tables([TCP, line], (LOOPBACK, 40001), SERVER) == 1000
    assert in_tables([TCP, line.replace(b" 1000 ", b"    0 ")], (LOOPBACK, 40001), SERVER) is None


# -- the kernel's answers ---------------------------------------------------------------------------------


def answer(
    state: int = 1, port: int = 40001, uid: int = 1000, inode: int = 7, number: int = 5, kind: int = 20
) -> bytes:
    body = struct.pack("=BBBB", socket.AF_INET, state, 0, 0) + struct.pack(">HH", port, 30001)
    body += 2 * LOOPBACK.ljust(16, b"\0") + bytes(24) + struct.pack("=II", uid, inode)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, number, 0) + body


def refusal(number: int) -> bytes:
    return struct.pack("=IHHIIi", 20, 2, 0, 5, 0, -number)


def test_the_kernels_answers() -> None:
    one = (LOOPBACK, 40001)
    assert uid_in_answer(answer(), 5, one, SERVER) == 1000
    assert uid_in_answer(refusal(errno.ENOENT), 5, one, SERVER) is None
    for state in (4, 5):  # it has shut down its sending side
        assert uid_in_answer(answer(state=state), 5, one, SERVER) == 1000
    for state in (2, 3, 6, 7, 8, 9, 10, 11, 12):
        with pytest.raises(UnknownUser):
            uid_in_answer(answer(state=state), 5, one, SERVER)
    for gone in (answer(state=5, inode=0, uid=0), answer(inode=0, uid=0), answer(port=40002)):
        with pytest.raises(UnknownUser):
            uid_in_answer(gone, 5, one, SERVER)
    whole = answer()
    wrong = [refusal(errno.EPERM), answer(number=6), answer(kind=18), whole[:-1] + b"", b"\xff" * 88]
    for bad in (*wrong, *(whole[:size] for size in range(len(whole)))):
        with pytest.raises(peer_uid._NoSockDiag):
            uid_in_answer(bad, 5, one, SERVER)


# -- real connections ---------------------------------------------------------------------------------------


class Pair:
    """A listener, a connection to it, and the server's end."""

    def __init__(self, listen: str, connect: str, source: int = 0) -> None:
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        self.listener = socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::")
        self.connect = connect
        at = (connect, self.listener.getsockname()[1])
        self.client = socket.create_connection(at, source_address=(connect, source) if source else None)
        self.server, _ = self.listener.accept()

    def reset(self) -> None:
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()

    def from_port(self, port: int) -> socket.socket:
        """Connect once more, from this port."""
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((self.connect, port))
        made.connect(self.listener.getsockname())
        return made

    def close(self) -> None:
        for each in (self.client, self.server, self.listener):
            each.close()


PLACES = [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1")]


@pytest.fixture(params=PLACES, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    try:
        made = Pair(*request.param)
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    yield made
    made.close()


@pytest.mark.parametrize("table", [False, True], ids=["sock_diag", "/proc/net"])
def test_both_ends_of_a_connection(pair: Pair, table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if table:
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda *_: _raise(peer_uid._NoSockDiag()))
    assert tcp_uid(pair.server) == tcp_uid(pair.client) == os.geteuid()
    assert peer_uid.is_loopback(pair.server) and peer_uid.is_loopback(pair.client)


@pytest.mark.parametrize("table", [False, True], ids=["sock_diag", "/proc/net"])
@pytest.mark.parametrize("how", ["closed", "reset", "shut down and closed"])
def test_a_peer_that_has_closed(pair: Pair, how: str, table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if table:
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda *_: _raise(peer_uid._NoSockDiag()))
    pair.client.sendall(b"a request")
    if how == "reset":
        pair.reset()
    else:
        if how != "closed":
            pair.client.shutdown(socket.SHUT_WR)
        pair.client.close()
    with pytest.raises(UnknownUser):
        tcp_uid(pair.server)


@pytest.mark.parametrize("table", [False, True], ids=["sock_diag", "/proc/net"])
def test_a_peer_that_has_said_all(pair: Pair, table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shuts down its sending side after its request, and waits for the answer."""
    if table:
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda *_: _raise(peer_uid._NoSockDiag()))
    pair.client.sendall(b"a request")
    pair.client.shutdown(socket.SHUT_WR)
    assert tcp_uid(pair.server) == os.geteuid()


def test_a_server_that_has_gone_after_its_answer_is_not_in_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has its socket any more, and none of the kernel's tables. It could have been anybody's."""
    with contextlib.closing(Pair("127.0.0.1", "127.0.0.1")) as pair:
        pair.server.sendall(b"an answer")
        pair.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)  # seconds
        pair.server.close()
        pair.listener.close()  # the kernel would name it instead
        there = peer_uid._end(pair.client, pair.client.getpeername())
        here = peer_uid._end(pair.client, pair.client.getsockname())
        assert pair.client.recv(100) == b"an answer" and pair.client.recv(100) == b""

        def gone() -> bool:
            with contextlib.suppress(UnknownUser):
                return peer_uid._by_sock_diag(there, here) is None
            return False

        wait_until(gone, "the kernel has forgotten it")
        assert peer_uid._stands(pair.client) and "cannot be told" in peer_uid.foreign_server(pair.client, ())
        # Positive control: if this end were taken for established twice, the server would be believed.
        monkeypatch.setattr(peer_uid, "_established", lambda _sock: True)
        monkeypatch.setattr(peer_uid, "_PEER_STATES", (1, 8))
        assert peer_uid.foreign_server(pair.client, ()) == ""


def _raise(exc: Exception) -> None:
    raise exc


@pytest.mark.parametrize("half", [False, True], ids=["", "shut down before"])
@pytest.mark.parametrize("checked", [True, False], ids=["", "positive control"])
def test_another_process_takes_the_port(checked: bool, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer sends its request, closes, and somebody who is trusted gets its port, all during the look-up."""
    mine = reserve_port()  # which no other connection of this machine takes
    with contextlib.closing(Pair("127.0.0.1", "127.0.0.1", mine)) as pair, contextlib.ExitStack() as stack:
        look_up = peer_uid._uid_of

        def late(sock: socket.socket, here: peer_uid.End, there: peer_uid.End) -> int:
            pair.client.sendall(b"a request")
            if half:
                pair.client.shutdown(socket.SHUT_WR)
            pair.reset()
            stack.enter_context(pair.from_port(there[1]))
            return look_up(sock, here, there)

        monkeypatch.setattr(peer_uid, "_uid_of", late)
        if checked:
            with pytest.raises(UnknownUser, match="closed"):
                tcp_uid(pair.server)
        else:
            monkeypatch.setattr(peer_uid, "_stands", lambda _sock: True)
            assert tcp_uid(pair.server) == os.geteuid()
        assert pair.server.recv(100) == b"a request"  # it would have been carried out


def test_a_peer_in_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is not found, although this end stands and is found."""
    with contextlib.closing(Pair("127.0.0.1", "127.0.0.1")) as pair:
        mine = pair.server.getsockname()[1]
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda one, _other: os.geteuid() if one[1] == mine else None)
        with pytest.raises(NotHere):
            tcp_uid(pair.server)
        assert peer_uid.foreign_server(pair.server, ()) == ""  # only root can have redirected it
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda *_: None)  # it does not even find this end
        assert tcp_uid(pair.server) == os.geteuid()


def test_nothing_tells_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Pair("127.0.0.1", "127.0.0.1")) as pair:
        monkeypatch.setattr(peer_uid, "_by_sock_diag", lambda *_: _raise(peer_uid._NoSockDiag()))
        monkeypatch.setattr("builtins.open", lambda *_: _raise(FileNotFoundError()))
        with pytest.raises(UnknownUser, match="neither sock_diag nor /proc/net"):
            tcp_uid(pair.server)
        assert "cannot be told" in peer_uid.foreign_server(pair.server, ())


def test_a_server_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Pair("127.0.0.1", "127.0.0.1")) as pair:
        assert peer_uid.foreign_server(pair.client, ()) == ""
        monkeypatch.setattr(peer_uid, "tcp_uid", lambda _sock: 4711)
        assert "of uid 4711" in peer_uid.foreign_server(pair.client, ())
        assert peer_uid.foreign_server(pair.client, (4711,)) == ""


def test_a_unit_that_sees_nothing_of_proc_but_processes() -> None:
    """``ProcSubset=pid``, as the manager's unit has it, hides /proc/net; a kernel without modules has no sock_diag."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, for a mount of its own")
    code = textwrap.dedent("""
        import os, socket
        from simm.net import peer_uid
        def none(*_):
            raise peer_uid._NoSockDiag
        peer_uid._by_sock_diag = none
        assert not os.path.exists("/proc/net/tcp")
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        print(peer_uid.tcp_uid(listener.accept()[0]))
    """)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t proc -o subset=pid proc /proc && exec "$@"', "sh",
         sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if "mount:" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr}")
    assert done.stdout == f"{os.geteuid()}\n", done.stderr
