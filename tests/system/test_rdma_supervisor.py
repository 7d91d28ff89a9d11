"""Endpoint processes under a data server, on a host with an RDMA device in software: their lives, and what is told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.config.settings import load
from simm.errors import TransportError
from simm.net.channel import Channel, Refused
from simm.server.options import options_from
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from tests.support.ports import reserve_port
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

SCRIPT = ("-m", "tests.support.fake_host")
HELLO = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "default", "", [])


class Host:
    """A cluster on such a host; ``trouble`` is why its device cannot be opened."""

    def __init__(self, cluster: Cluster, file: Path) -> None:
        self.cluster = cluster
        self._file = file

    def trouble(self, text: str) -> None:
        self._file.write_text(text)

    def said(self) -> str:
        """What the data server's processes have logged."""
        return self.cluster.log("dataserver").read_text()

    def metrics(self) -> dict[str, str]:
        """Values by metric; of simm_rdma_ready also its ``reason``, and how many endpoints ``restarts``."""
        address = re.findall(r" http=(\S+)", self.ready)[0]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=300) as answer:
            text = answer.read().decode()
        found = dict(re.findall(r"^(simm_rdma_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
        found["reason"] = re.findall(r'^simm_rdma_ready\{[^}]*reason="([^"]*)"\}', text, re.MULTILINE)[0]
        restarts = re.findall(r'^simm_process_restarts_total\{[^}]*process="endpoint"\} (\S+)$', text, re.MULTILINE)
        found["restarts"] = restarts[0] if restarts else "none"
        return found

    @property
    def ready(self) -> str:
        """The data server's READY line."""
        return self.cluster.processes["dataserver"].ready

    @property
    def port(self) -> int:
        """Where connections are opened, as a stream tells clients."""
        tcp = re.findall(r"127\.0\.0\.1:(\d+)", self.ready)[0]
        with contextlib.closing(Channel.tcp("127.0.0.1", int(tcp), 10)) as channel:
            welcome = channel.call(HELLO)
            assert bool(welcome.paths & M.PathBit.RDMA) == bool(welcome.rdma_port)
            port: int = welcome.rdma_port
            return port

    def connection(self) -> Channel:
        """A connection to the endpoint, greeted."""
        channel = Channel.tcp("127.0.0.1", self.port, 10)
        channel.call(HELLO)
        return channel

    def open(self) -> R.RdmaOpened | None:
        """RDMA_OPEN, as soon as the endpoint can."""
        with contextlib.suppress(Refused, TransportError), contextlib.closing(self.connection()) as channel:
            opened: R.RdmaOpened = channel.call(R.RdmaOpen(0))
            return opened
        return None

    def endpoint(self) -> int:
        """The newest endpoint process."""
        return int(re.findall(r"endpoint of worker 0 is process (\d+)", self.said())[-1])


@contextlib.contextmanager
def running(*arguments: str, trouble: str = "", script: tuple[str, ...] = SCRIPT) -> Iterator[Host]:
    folder = new_folder()
    file = folder / "trouble"
    host = Host(
        Cluster(
            folder, memory="64M", script=script, environment={"FAKEHOST": str(file)},
            server_arguments=("--http", "127.0.0.1:0", *arguments),
        ),
        file,
    )  # fmt: skip
    if trouble:
        host.trouble(trouble)
    with host.cluster:
        yield host


@pytest.mark.quick
def test_the_life_of_an_endpoint(nothing_is_left: Path) -> None:
    with running("--rdma", "on") as host:
        assert f" rdma={host.port}" in host.ready, "with --rdma on it is ready when all endpoints are"
        assert host.metrics()["simm_rdma_ready"] == "1" and host.metrics()["reason"] == ""
        with contextlib.closing(host.connection()) as connection:
            assert connection.call(R.RdmaOpen(0)).size == 64 << 20
            assert len(connection.call(M.Grant([(4096, 2)])).grants) == 2
            wait_until(lambda: host.metrics()["simm_rdma_granted_bytes"] == "8192", "it is counted")
            assert host.metrics()["simm_rdma_connections"] == "1"
            assert host.cluster.worker_stats()["granted_bytes"] >= 8192
            first = host.endpoint()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(TransportError):
                connection.call(M.Grant([(4096, 2)]))
        wait_until(lambda: host.cluster.worker_stats()["granted_bytes"] == 0, "its grants end with the process")
        wait_until(host.open, "another one takes over, at the same port")
        assert host.endpoint() != first
        wait_until(lambda: host.metrics()["restarts"] == "1", "its death is counted")
        # One that is stopped, or hangs.
        stopped = host.endpoint()
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: host.endpoint() != stopped, "it is replaced")
        wait_until(host.open, "by one that works")
        # The worker's death does not touch it.
        survivor = host.endpoint()
        with contextlib.closing(host.connection()) as connection:
            assert connection.call(R.RdmaOpen(0)).incarnation == 1
            os.kill(int(host.cluster.worker_stats()["pid"]), signal.SIGKILL)

            def granted() -> bool:
                with contextlib.suppress(Refused):
                    return bool(connection.call(M.Grant([(4096, 1)])).grants)
                return False

            wait_until(granted, "grants of the worker's successor, by the same connection")
            assert connection.call(R.RdmaOpen(0)).incarnation == 2 and host.endpoint() == survivor


def test_a_device_that_comes_late(nothing_is_left: Path) -> None:
    with running(trouble="all its ports are down") as host:
        wait_until(lambda: "ports are down" in host.metrics()["reason"], "the reason is in the metrics")
        with contextlib.closing(host.connection()) as connection:
            with pytest.raises(Refused, match="all its ports are down: mend it"):
                connection.call(R.RdmaOpen(0))
        assert host.metrics()["simm_rdma_ready"] == "0"
        assert host.said().count("no RDMA: all its ports are down") == 1, "and once in the log"
        host.trouble("")
        wait_until(host.open, "it tries again", 40)
        wait_until(lambda: host.metrics()["simm_rdma_ready"] == "1", "and says so")


def test_an_endpoint_that_crashes_again_and_again(nothing_is_left: Path) -> None:
    with running(trouble="crash") as host:
        wait_until(lambda: host.said().count("another one in") >= 3, "it is replaced")
        pauses = [float(text) for text in re.findall(r"another one in ([0-9.]+) s", host.said())]
        assert pauses == sorted(pauses) and pauses[2] >= 4 * pauses[0], "later and later"
        host.trouble("")
        wait_until(host.open, "the next one works")


@pytest.mark.parametrize("trouble", ["all its ports are down", "crash"])
def test_rdma_on_or_nothing(trouble: str, nothing_is_left: Path) -> None:
    with pytest.raises(AssertionError, match=r"no READY from dataserver"):
        with running("--rdma", "on", trouble=trouble) as host:
            raise LookupError(host)


def test_without_devices_or_off(nothing_is_left: Path) -> None:
    for arguments, script, reason in ((("--rdma", "off"), SCRIPT, "off"), ((), (), "this host has no RDMA device")):
        if not script and os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
            continue
        with running(*arguments, script=script) as host:
            assert host.port == 0 and " rdma=" not in host.ready and "endpoint of worker" not in host.said()
            assert host.metrics()["reason"] == reason and host.metrics()["simm_rdma_ready"] == "0"


def test_ports_follow_the_workers(nothing_is_left: Path) -> None:
    free = reserve_port()
    with running("--listen", f"127.0.0.1:{free}") as host:
        assert host.port == free + 1


def test_settings(tmp_path: Path) -> None:
    env = {"SIMM_RUNTIME_DIR": str(tmp_path / "run")}
    plain = options_from(load("dataserver", {"insecure": True}, env))
    assert (plain.rdma, plain.rdma_devices, plain.rdma_windows) == ("auto", "", True)
    given = options_from(
        load("dataserver", {"rdma": "ON", "rdma_devices": "mlx5_0", "rdma_windows": False}, env)
    )
    assert (given.rdma, given.rdma_devices, given.rdma_windows) == ("on", "mlx5_0", False)
