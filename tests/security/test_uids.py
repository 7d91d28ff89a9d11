"""Users of one host: who gets in without a token, and whose servers a client believes and maps the memory of."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.config.parsers import TlsOptions
from simm.config.settings import Settings
from simm.errors import SegmentError, TransportError
from simm.ipc.session import NotTrusted, WorkerSession
from simm.rpc import Connection, decode
from simm.sdk.local_cluster import LocalCluster
from simm.sdk.manager_link import ManagerClient as TlsManagerClient
from simm.shm import SHM_DIR, AttachedSegment, data_name
from simm.tools.ctl import tuning
from simm.tools.ctl.workers import ask_all
from simm.wire import messages as M
from tests.support.certificates import Authority, needs_openssl
from tests.support.child import Child
from tests.support.manager_client import ManagerClient
from tests.support.other_user import UID, command_as, needs_root, run_as
from tests.support.processes import HERE, Cluster, new_folder
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S, wait_until

pytestmark = needs_root

#: Ask the manager and the stream for all that a client, a data server and a mover can say first; print the answers.
INTRUDE = """if True:
    import json
    from simm.net.channel import Channel, Refused
    from simm.wire import messages as M
    from simm.wire.hello import client_hello
    heard = []
    tls = simm.config.parsers.TlsOptions(sys.argv[1]) if sys.argv[1] else None
    for port in map(int, sys.argv[2:]):
        for msg in (
            client_hello(M.Role.CLIENT), client_hello(M.Role.SUPERVISOR), client_hello(M.Role.MOVER), M.Ping(1),
            M.MapGet(0, 1), M.ClusterStatus(1), M.Drain(1, "x"), M.Exists([bytes(16)]), M.Delete([bytes(16)]),
        ):
            channel = Channel.tcp("127.0.0.1", port, 30.0, tls=tls)
            try:
                heard.append([port, type(msg).__name__, type(channel.call(msg)).__name__])
            except Refused as exc:
                heard.append([port, type(msg).__name__, str(exc)])
            except Exception as exc:
                heard.append([port, type(msg).__name__, "broken"])
            channel.close()
    print(json.dumps(heard))
"""

USE = """if True:
    from simm.client import Client
    from simm.errors import TransportError
    try:
        with Client(sys.argv[1], path="tcp", deadline_s=30.0, tls_ca="".join(sys.argv[2:])) as client:
            tests.support.waiting.wait_until(lambda: client.put("theirs", b"t" * 5000), "it can put")
            print(client.get("ours") == b"o" * 5000)
    except TransportError as exc:
        print(exc)
"""

#: A worker, or a manager, of another user. Prints where it listens, and each message that it hears.
SQUAT = """if True:
    import contextlib, socket
    from simm.rpc import Connection, decode, encode, reply
    from simm.wire import messages as M
    at, segment = sys.argv[1:3]
    if at:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(at)
        os.chmod(at, 0o777)
        listener.listen()
        with open(f"/dev/shm/{segment}", "wb") as file:
            file.write(bytes(1 << 20))
        os.chmod(f"/dev/shm/{segment}", 0o666)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        at = listener.getsockname()[1]
    print(at, flush=True)
    while True:
        with listener.accept()[0] as sock, contextlib.suppress(ConnectionError):
            conn = Connection()
            while data := sock.recv(1 << 16):
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    msg = decode(frame)
                    print(type(msg).__name__, flush=True)
                    answer = M.Welcome(2, 0, 7, 0, 1, 1, 1, segment)
                    if isinstance(msg, M.MapGet):
                        answer = M.MapReply(1, 7, [], b"\\xff\\xff" * 16384)
                    sock.sendall(reply(answer, frame.request_id))
"""


MAPPED = "it would have been mapped"


def mapped(*_: object, **__: object) -> None:
    raise SegmentError(MAPPED)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture(scope="module", params=[(), (UID,)], ids=["default", "positive control: --allow-uid"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, tuple[int, ...]]]:
    """Servers without a token, and whom they let in besides root."""
    named: tuple[int, ...] = request.param
    with Cluster(
        new_folder(), "32M", environment={"SIMM_ALLOW_UID": ",".join(map(str, named))}
    ) as made:
        with Client(made.manager, deadline_s=30.0) as client:
            wait_until(lambda: client.put("ours", b"o" * 5000), "the worker takes a put")
        yield made, named


def test_another_user_gets_no_answer(cluster: tuple[Cluster, tuple[int, ...]]) -> None:
    servers, named = cluster
    with ManagerClient([("127.0.0.1", port_of(servers.manager))], deadline_s=WAIT_S) as link:
        (worker,) = link.get_map().workers
        before = link.status()["manager"]["unauthorized"]
        heard = json.loads(run_as(INTRUDE, "", str(port_of(servers.manager)), str(worker.port)))
        assert len(heard) == 18
        said = f"takes connections of uid 0 only, and this one is of uid {UID}: start it with --allow-uid {UID}"
        refused = [said in answer for _, _, answer in heard]
        assert not any(refused) if named else all(refused), heard
        if named:
            assert [answer for *_, answer in heard[:5]] == ["Welcome", "Welcome", "Welcome", "Pong", "MapReply"]
        assert link.status()["manager"]["unauthorized"] - before == (0 if named else 9)


def test_another_user_neither_reads_nor_writes(cluster: tuple[Cluster, tuple[int, ...]]) -> None:
    servers, named = cluster
    said = run_as(USE, servers.manager).strip()
    with Client(servers.manager, deadline_s=30.0) as client:
        assert (said, client.get("theirs")) == ("True", b"t" * 5000) if named else f"uid {UID}" in said
        assert client.get("ours") == b"o" * 5000 and client.exists("theirs") == bool(named)


@needs_openssl
@pytest.mark.parametrize("named", [(), (UID,)], ids=["default", "positive control: --allow-uid"])
def test_tls_without_a_token_lets_no_other_user_in(public: Path, named: tuple[int, ...]) -> None:
    """A certificate tells who the server is. Who the client is, the kernel tells, before anything is decrypted."""
    authority = Authority(public)
    both = str(authority.issue("server"))
    ca = str(authority.ca)
    environment = {"SIMM_TLS_CERT": both, "SIMM_ALLOW_UID": ",".join(map(str, named))}
    with Cluster(new_folder(), "32M", environment=environment, server_arguments=["--tls-ca", ca]) as servers:
        with Client(servers.manager, deadline_s=30.0, tls_ca=ca) as client:
            wait_until(lambda: client.put("ours", b"o" * 5000), "the worker takes a put")
            address = [("127.0.0.1", port_of(servers.manager))]
            with TlsManagerClient(address, tls=TlsOptions(ca), deadline_s=WAIT_S) as link:
                (worker,) = link.status()["nodes"][0]["workers"]
            ports = [str(port_of(address)) for address in (servers.manager, worker["address"])]
            heard = json.loads(run_as(INTRUDE, ca, *ports))
            refused = [f"this one is of uid {UID}" in answer for _, _, answer in heard]
            assert len(refused) == 18 and (not any(refused) if named else all(refused)), heard
            said = run_as(USE, servers.manager, ca).strip()
            assert said == "True" if named else f"uid {UID}" in said
            assert client.exists("theirs") == bool(named)


#: Send a request, end the sending side, say so; print what comes.
HALF_CLOSE = """if True:
    import socket
    from simm.rpc import encode
    from simm.wire import messages as M
    with socket.socket() as sock:
        sock.settimeout(60)
        sock.connect(("127.0.0.1", int(sys.argv[1])))
        sock.sendall(encode(M.Ping(77), 5))
        sock.shutdown(socket.SHUT_WR)
        print("sent", flush=True)
        got = b""
        while data := sock.recv(1 << 16):
            got += data
    print(got.hex())
"""


def test_who_ends_the_sending_side_at_once_is_known_all_the_same(cluster: tuple[Cluster, tuple[int, ...]]) -> None:
    """The request and its end are there before the server accepts the connection."""
    servers, named = cluster
    pid = servers.processes["manager"].pid
    for uid in (os.geteuid(), UID):
        os.kill(pid, signal.SIGSTOP)
        try:
            with Child(command_as(HALF_CLOSE, str(port_of(servers.manager)), uid=uid, gid=uid), name="half") as client:
                client.expect("sent\n")
                os.kill(pid, signal.SIGCONT)
                answer = Connection()
                answer.receive_data(bytes.fromhex(client.rest()))
        finally:
            os.kill(pid, signal.SIGCONT)
        frame = answer.next_frame()
        assert frame is not None
        if uid == UID and not named:
            assert frame.status == M.Status.UNAUTHORIZED and f"of uid {UID}" in decode(frame).text
        else:
            assert decode(frame) == M.Pong(77)


class Squatter:
    """A server of another user: a worker with the socket ``at``, or a manager."""

    def __init__(self, at: str = "", segment: str = "") -> None:
        self._child = Child(command_as(SQUAT, at, segment), name="the squatter")
        self.at = self.next()

    def next(self) -> str:
        """The next line that it prints: what it hears."""
        return self._child.read_line().strip()

    def heard(self) -> list[str]:
        """End it; the rest of what it has heard."""
        self._child.process.kill()
        return self._child.rest().split()

    def end(self) -> None:
        """End it, whatever it has heard."""
        self._child.kill()


@pytest.fixture
def squatter() -> Iterator[Callable[..., Squatter]]:
    with contextlib.ExitStack() as stack:

        def start(at: str = "", segment: str = "") -> Squatter:
            made = Squatter(at, segment)
            stack.callback(made.end)
            stack.callback(Path(SHM_DIR, segment or "none").unlink, missing_ok=True)
            return made

        yield start


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder in which everybody may write. Not in TMPDIR, which may be for one user only."""
    with tempfile.TemporaryDirectory(prefix=f"simm-{HERE}", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_a_worker_of_another_user_is_told_nothing_and_nothing_of_it_is_mapped(
    public: Path, squatter: Callable[..., Squatter]
) -> None:
    worker = squatter(str(public / "w.sock"), f"simm-{UID}-{HERE}evil-0-{1:016x}")
    with pytest.raises(NotTrusted, match=f"is of uid {UID}, .*SIMM_SERVER_UID"):
        WorkerSession(worker.at, "default", WAIT_S)
    with pytest.raises(TransportError, match="has passed no data"):  # positive control
        WorkerSession(worker.at, "default", WAIT_S, trusted=(UID,))
    assert worker.heard() == ["Hello", "DataAttach"]


def test_simm_ctl_tells_and_maps_nothing_of_another_users_worker(
    public: Path, squatter: Callable[..., Squatter]
) -> None:
    """Whoever made the folder first: its name, /tmp/simm-UID, can be guessed."""
    worker = squatter(str(public / "evil.0.sock"), f"simm-{UID}-{HERE}evil-0-{3:016x}")
    (found,) = ask_all(public)
    assert not found.stats and f"of uid {UID}" in found.why and "SIMM_SERVER_UID" in found.why
    (found,) = ask_all(public, trusted=(UID,))  # positive control
    assert not found.stats and "of uid" not in found.why
    assert worker.heard() == ["Stats"]


def test_simm_ctl_believes_no_admin_socket_of_another_user(
    public: Path, squatter: Callable[..., Squatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = squatter(str(public / "evil.admin.sock"), f"simm-{UID}-{HERE}evil-0-{4:016x}")
    settings = Settings(runtime_dir=public)
    with pytest.raises(TransportError, match=f"evil: it is of uid {UID}, .*SIMM_SERVER_UID"):
        tuning.settings_rows(settings, ["list"], "", manager=False)
    monkeypatch.setattr(tuning, "trusts", lambda *_: True)  # positive control
    with pytest.raises(TransportError):
        tuning.settings_rows(settings, ["list"], "", manager=False)
    assert worker.heard() == ["AskSettings"]


def test_an_arena_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a worker of this user names it."""
    name = f"simm-0-{HERE}chowned-0-{2:016x}"
    files = [Path(SHM_DIR, each) for each in (name, data_name(name))]
    monkeypatch.setattr(AttachedSegment, "map", mapped)
    try:
        for path in files:
            path.write_bytes(bytes(1 << 20))
            os.chown(path, UID, -1)
        with pytest.raises(SegmentError, match=f"belongs to uid {UID}"):
            ArenaReader(name)
        with pytest.raises(SegmentError, match=MAPPED):  # positive control
            ArenaReader(name, trusted=(UID,))
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def test_a_manager_of_another_user_is_not_believed(squatter: Callable[..., Squatter]) -> None:
    """Whoever takes a free port of loopback. Root's client by default, and one that names the user."""
    manager = squatter()
    with pytest.raises(TransportError, match=f"of uid {UID}, .*SIMM_SERVER_UID"):
        Client(f"127.0.0.1:{manager.at}", token="", deadline_s=WAIT_S)
    with Client(f"127.0.0.1:{manager.at}", token="", deadline_s=WAIT_S, server_uids=[UID]) as client:
        assert client._router is not None and client._router.epoch == 1
    assert manager.heard() == ["Hello", "Hello", "MapGet"]


@pytest.mark.parametrize("named", [(), ("--server-uid", str(UID))], ids=["default", "positive control: --server-uid"])
def test_a_data_server_shows_its_secret_to_no_other_users_manager(
    named: tuple[str, ...], nothing_is_left: Path, squatter: Callable[..., Squatter]
) -> None:
    """JOIN has it: with it anybody is this data server."""
    manager = squatter()
    folder = new_folder()  # its path is short enough for sockets
    server = ServerProcess(
        "dataserver", folder, "--listen", "127.0.0.1:0", "--manager", f"127.0.0.1:{manager.at}", "--memory", "16M",
        "--numa", "0", "--name", f"{HERE}shy", "--runtime-dir", str(folder / "run"), *named,
    )  # fmt: skip
    server.launch()
    try:
        assert [manager.next(), manager.next()] == ["Hello", "Join" if named else "Hello"]
    finally:
        server.clean_up()
    assert named or f"of uid {UID}" in server.log.read_text()
    shutil.rmtree(folder)


def test_the_token_of_a_local_cluster_is_its_users() -> None:
    with LocalCluster("32M") as cluster:
        about = os.stat(cluster.token_file)
        assert about.st_mode & 0o777 == 0o600 and about.st_uid == os.geteuid()
        assert "missing token" in run_as(USE, cluster.manager)
        with Client(cluster.manager, deadline_s=WAIT_S) as client:  # finds the token
            wait_until(lambda: client.put("k", b"v"), "the worker takes a put")
        with pytest.raises(TransportError, match="missing token"):
            Client(cluster.manager, token="", deadline_s=WAIT_S)
