"""TLS on a real cluster: values, maps, moves, commands and pages, and who is not served."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from simm.config.certificates import validity
from simm.config.parsers import TlsOptions
from simm.errors import ConfigError, TransportError
from simm.net.channel import Channel
from simm.net.listeners import listen_tcp
from simm.net.tls_peer import ServerTls
from simm.rdma.api import Absence
from simm.sdk.manager_link import ManagerClient
from simm.server.rdma_endpoint import run_endpoint
from simm.wire import messages as M
from tests.support.certificates import Authority, needs_openssl
from tests.support.child import child_environment
from tests.support.processes import Cluster, new_folder, remove_left_by
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S, wait_until

pytestmark = [needs_openssl, pytest.mark.quick]

TOKEN = "the-token-of-this-test"
MANY = 300


class Secure:
    """A cluster with TLS and a token, its authority, and a client of it by TCP."""

    def __init__(self, cluster: Cluster, authority: Authority) -> None:
        self.cluster = cluster
        self.authority = authority
        self.ca = str(authority.ca)
        self.host, _, port = cluster.manager.rpartition(":")
        self.port = int(port)

    def client(self, **more: str) -> Client:
        given: dict[str, Any] = {"path": "tcp", "token": TOKEN, "tls_ca": self.ca, **more}
        return Client(self.cluster.manager, deadline_s=WAIT_S, **given)

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of a ``simm`` command."""
        given = child_environment(
            SIMM_MANAGER=self.cluster.manager, SIMM_TOKEN_FILE=str(self.authority.folder / "token"), **environment
        )
        done = subprocess.run(
            [sys.executable, "-m", "simm", *words], env=given, capture_output=True, text=True, timeout=WAIT_S,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls"))
    for name in ("manager", "server"):
        made.issue(name, "IP:127.0.0.1,DNS:cluster.simm")
    (made.folder / "server.key").chmod(0o600)
    token = made.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return made


def server_flags(authority: Authority) -> list[str]:
    """Of data servers."""
    folder = authority.folder
    return [
        "--tls-ca", str(authority.ca), "--tls-cert", str(folder / "server.crt"), "--tls-key",
        str(folder / "server.key"), "--token-file", str(folder / "token"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[Secure]:
    manager = [
        "--tls-cert", str(authority.folder / "manager.both"), "--tls-client-ca", str(authority.ca),
        "--token-file", str(authority.folder / "token"),
    ]  # fmt: skip
    with Cluster(
        new_folder(), "128M", server_arguments=server_flags(authority), manager_arguments=manager,
        environment={"SIMM_HTTP": "127.0.0.1:0"},
    ) as cluster:  # fmt: skip
        yield Secure(cluster, authority)


def test_values_by_tls(secure: Secure) -> None:
    """A large one, many small ones, in batches and alone."""
    large = os.urandom(16 << 20)
    with secure.client() as client:
        assert client.put("large", large) and client.get("large") == large
        keys = [f"key {number}" for number in range(MANY)]
        values = [os.urandom(1 + number % 5 * 700) for number in range(MANY)]
        assert all(client.put_many(keys, values)) and client.get_many(keys) == values
        assert client.exists("key 0") and client.delete("key 0") and client.get("key 0") is None
        assert [worker["path"] for worker in client.stats()["workers"]] == ["tcp"]


def test_nothing_is_in_plain_text_on_the_wire(secure: Secure) -> None:
    """A value that passes a relay. Without TLS the same relay sees it, and the token's proofs."""
    seen = bytearray()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        def relay() -> None:
            near = listener.accept()[0]
            far = socket.create_connection((secure.host, secure.port), WAIT_S)

            def copy(source: socket.socket, target: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(1 << 16):
                        seen.extend(data)
                        target.sendall(data)
                    target.shutdown(socket.SHUT_WR)

            with near, far:
                other = threading.Thread(target=copy, args=(far, near), daemon=True)
                other.start()
                copy(near, far)
                other.join(WAIT_S)

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        address = [("127.0.0.1", int(listener.getsockname()[1]))]
        with ManagerClient(address, token=TOKEN, tls=TlsOptions(secure.ca), deadline_s=WAIT_S) as link:
            assert link.status()["nodes"][0]["name"] == secure.cluster.name
        thread.join(WAIT_S)
    assert seen and b"SiMM" not in seen and secure.cluster.name.encode() not in seen


def test_commands_by_tls(secure: Secure) -> None:
    code, said = secure.run("status", SIMM_TLS_CA=secure.ca)
    assert code == 0 and secure.cluster.name in said
    code, said = secure.run("status")
    assert code != 0 and "TLS only: give --tls-ca" in said


def certificate_ends(text: str) -> int:
    """Return what a page of metrics says of that."""
    (ends,) = re.findall(r"^simm_tls_certificate_expiry_timestamp_seconds (\d+)$", text, re.MULTILINE)
    return int(ends)


def test_pages_by_tls(secure: Secure) -> None:
    context = ssl.create_default_context(cafile=secure.ca)
    for module, name in (("manager", "manager"), ("dataserver", "server")):
        page = secure.cluster.processes[module].http
        with urllib.request.urlopen(f"https://{page}/metrics", context=context, timeout=WAIT_S) as answer:
            text = answer.read().decode()
        assert certificate_ends(text) == validity((secure.authority.folder / f"{name}.crt").read_text())[1]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"http://{page}/metrics", timeout=WAIT_S)

    # A renewed certificate is shown, and reported, without a restart.
    page = secure.cluster.processes["manager"].http
    renewed = secure.authority.issue("renewed", "IP:127.0.0.1,DNS:cluster.simm", days=30)
    os.replace(renewed, secure.authority.folder / "manager.both")
    ends = validity((secure.authority.folder / "renewed.crt").read_text())[1]

    def reported() -> bool:
        with urllib.request.urlopen(f"https://{page}/metrics", context=context, timeout=WAIT_S) as answer:
            return certificate_ends(answer.read().decode()) == ends

    wait_until(reported, "the page has the new certificate's end", pause_s=0.1)


def test_who_is_not_served(secure: Secure, tmp_path: Path) -> None:
    """A client of another authority, one without TLS, one that shows a certificate of its own making."""
    other = Authority(tmp_path, "other")
    for tls, token, why in (
        (TlsOptions(str(other.ca)), TOKEN, "no authority in --tls-ca"),
        (TlsOptions(secure.ca, name="other.simm"), TOKEN, "its subjectAltName must have other.simm"),
        (None, TOKEN, "TLS only"),
        (TlsOptions(secure.ca, str(other.issue("nobody"))), TOKEN, "unknown ca|connection lost"),
        (TlsOptions(secure.ca), "another-token-than-it-has", "token"),
    ):
        with ManagerClient([(secure.host, secure.port)], token=token, tls=tls, deadline_s=WAIT_S) as link:
            with pytest.raises(TransportError, match=why):
                link.status()
    with pytest.raises(ConfigError):
        secure.client(tls_ca=str(tmp_path / "none"))
    with secure.client(tls_cert=str(secure.authority.issue("engine", "DNS:engine"))) as client:
        assert client.put("k", b"v") and client.get("k") == b"v"


def test_values_move_by_tls(secure: Secure) -> None:
    """To a second data server, whose mover must trust the first one."""
    name = f"{secure.cluster.name}-second"
    with secure.client() as client:
        values = {f"moving {number}": os.urandom(500) for number in range(MANY)}
        assert all(client.put_many(list(values), list(values.values())))
        second = ServerProcess(
            "dataserver", secure.cluster.folder, "--listen", "127.0.0.1:0", "--manager", secure.cluster.manager,
            "--memory", "64M", "--numa", "0", "--name", name, "--runtime-dir", str(secure.cluster.folder / "run2"),
            "--tls-name", "cluster.simm", *server_flags(secure.authority), name="second",
        )  # fmt: skip
        with secure.client() as watcher, second:
            wait_until(lambda: len(watcher.stats()["workers"]) == 2, "the second one joins")
            with ManagerClient(
                [(secure.host, secure.port)], token=TOKEN, tls=TlsOptions(secure.ca), deadline_s=WAIT_S
            ) as link:
                def settled() -> bool:
                    status = link.status()
                    return status["shards_moved"] > 0 and not status["shards_moving"] + status["shards_waiting"]

                wait_until(settled, lambda: second.log.read_text()[-2000:])
            assert watcher.get_many(list(values)) == list(values.values())
            assert client.get_many(list(values)) == list(values.values())
        remove_left_by(name)


def test_an_endpoint_s_port(authority: Authority, tmp_path: Path) -> None:
    """Where clients open RDMA connections; on a host without devices."""
    listener = listen_tcp("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    supervisor, theirs = socket.socketpair()
    tls = ServerTls(TlsOptions(cert=str(authority.folder / "manager.both")))
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            supervisor.close()
            run_endpoint(listener, str(tmp_path / "none"), theirs, lambda: Absence("no device", 60.0), tls=tls)
        os._exit(0)
    try:
        with contextlib.closing(
            Channel.tcp("127.0.0.1", port, WAIT_S, tls=TlsOptions(str(authority.ca)))
        ) as channel:
            assert channel.call(M.Ping(7)) == M.Pong(7)
        with contextlib.closing(Channel.tcp("127.0.0.1", port, WAIT_S)) as plain:
            with pytest.raises(TransportError, match="TLS only"):
                plain.call(M.Ping(7))
    finally:
        for sock in (supervisor, theirs, listener):
            sock.close()
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
