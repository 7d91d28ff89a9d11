"""Two managers as real processes, a real etcd, a data server and a client that know both managers' addresses.

Times are measured from the fault to the point where a leader serves and hears the data server; they are printed, with
the bound that they stand for (``BACK_S``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.client import Client
from simm.control.election import Leader
from simm.errors import TransportError
from simm.rpc import Connection, decode, encode
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Status, WorkerInfo
from tests.support.child import child_environment, stopped
from tests.support.etcd_server import MISSING, PROGRAM, EtcdServer, put_key
from tests.support.load import PATIENT_S, Load, LoadThread
from tests.support.load.generator import Settings
from tests.support.manager_client import ManagerClient, joining
from tests.support.ports import reserve_port
from tests.support.processes import remove_left_by
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

WAIT_S = 30.0
#: The bound for being back in service, seconds.
BACK_S = 10.0

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


def process(folder: Path, name: str, module: str, *arguments: str, code: str = "") -> ServerProcess:
    """A SiMM process. ``code``: run this Python instead, for a broken one."""
    return ServerProcess(module, folder, *arguments, name=name, program=("-c", code) if code else ())


class Managers:
    """An etcd and managers on it, named by their place."""

    def __init__(self, folder: Path, count: int = 2, ttl_ms: int = 5000, codes: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "etcd").mkdir()
        self.etcd = EtcdServer(folder / "etcd")
        self.ports = [reserve_port() for _ in range(count)]
        self.ttl_ms = ttl_ms
        self.codes = codes
        self.processes: list[ServerProcess] = []

    def __enter__(self) -> Managers:
        self.etcd.start()
        try:
            for at, port in enumerate(self.ports):
                self.processes.append(process(
                    self.folder, f"manager{at}", "manager", "--listen", f"127.0.0.1:{port}", "--coordinator",
                    f"{self.etcd.url}/test", "--coordinator-ttl-ms", str(self.ttl_ms),
                    code=self.codes[at] if at < len(self.codes) else "",
                ))  # fmt: skip
                self.processes[-1].start()
                # READY is said without a leader where etcd takes long, and the first leads.
                wait_until(lambda: self.leader() == 0, "the first one leads")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.clean_up()
        self.etcd.__exit__()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def status(self) -> dict[str, Any]:
        """The leader's, or nothing while nobody leads."""
        pairs = [("127.0.0.1", port) for port in self.ports]
        try:
            with ManagerClient(pairs, deadline_s=0.5) as link:
                return link.status()
        except TransportError:
            return {}

    def term(self) -> int:
        """The leader's term."""
        status = wait_until(self.status, "a leader answers")
        return int(status["manager"]["term"])

    def leader(self) -> int:
        """The place of who leads, by etcd; -1: nobody."""
        found = self.etcd.client().get(b"/test/leader")
        if found is None:
            return -1
        return self.ports.index(int(Leader(**json.loads(found.value)).address.rpartition(":")[2]))

    def stored_term(self) -> int:
        """In which term the state was stored last."""
        found = self.etcd.client().get(b"/test/state")
        assert found is not None
        return int(json.loads(found.value)["generation"].partition("-")[0], 16)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: a UNIX socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="simm-two-") as name:
        yield Path(name)


#: Puts and gets almost without pause.
LOAD = Settings(mix={"get": 1.0, "put": 1.0}, keys=100, sizes=(500,), complete=True, pause_s=0.001)


def test_a_cluster_goes_on_whichever_manager_ends(folder: Path) -> None:
    """Leaders killed, stopped for good, ended cleanly; etcd restarted, and away. No call fails, no epoch goes back."""
    name = f"two-{os.getpid()}"
    measured: dict[str, float] = {}
    epochs: list[int] = []
    with contextlib.ExitStack() as stack:
        managers = stack.enter_context(Managers(folder))
        assert managers.processes[0].ready.startswith(f"READY manager 127.0.0.1:{managers.ports[0]}")
        assert managers.processes[1].ready == f"READY manager 127.0.0.1:{managers.ports[1]} standby\n"
        server = process(
            folder, "dataserver", "dataserver", "--listen", "127.0.0.1:0", "--manager", managers.addresses, "--memory",
            "64M", "--numa", "0", "--name", name, "--runtime-dir", str(folder / "run"),
        )  # fmt: skip
        stack.callback(remove_left_by, name)
        stack.callback(server.clean_up)
        server.start()
        client = stack.enter_context(Client(managers.addresses, deadline_s=PATIENT_S))
        assert client.wait_ready(WAIT_S)
        load = Load(client, 0, LOAD)
        thread = stack.enter_context(LoadThread(load))

        def serves(but: int) -> dict[str, Any]:
            """Somebody else than manager ``but`` leads, hears the data server, and gives it all shards."""
            status = managers.status()
            well = status and [node["state"] for node in status["nodes"]] == ["running"]
            other = status and (but < 0 or not status["manager"]["leader"].endswith(f":{managers.ports[but]}"))
            return status if well and other and not status["shards_without_owner"] else {}

        def back(what: str, began: float, but: int = -1) -> None:
            status = wait_until(lambda: serves(but), f"{what}: a leader serves", 6 * BACK_S)
            measured[what] = time.monotonic() - began
            epochs.append(status["epoch"])
            assert epochs == sorted(epochs), f"{what}: an epoch went back"
            # The data server's and the clients' maps go on with it.
            wait_until(lambda: client.stats()["epoch"] >= status["epoch"], f"{what}: the client hears of it")
            with Client(managers.addresses) as fresh:
                assert fresh.wait_ready(WAIT_S)

        def nobody_leads() -> bool:
            try:
                said = [text for port in managers.ports for text in refusals(port)]
            except ConnectionError:
                return False  # a manager that ceases to lead closes its connections, this one too
            return all("etcd cannot say who leads" in text for text in said)

        back("start", time.monotonic())
        first = managers.leader()
        began = time.monotonic()
        managers.processes[first].kill()
        back("the leader killed", began, first)
        managers.processes[first].start()
        assert managers.processes[first].ready.endswith("standby\n")

        second = managers.leader()
        assert second == 1 - first
        began = time.monotonic()
        managers.processes[second].send_signal(signal.SIGTERM)
        back("the leader ended cleanly", began, second)
        assert managers.processes[second].wait() == 0
        managers.processes[second].start()

        began = time.monotonic()
        with stopped(psutil.Process(managers.processes[first].pid)):
            back("the leader stopped", began, first)
        wait_until(lambda: "standing by" in managers.processes[first].log.read_text(), "the woken one stands by")

        term = managers.term()
        began = time.monotonic()
        managers.etcd.kill()
        managers.etcd.start()
        away_s = time.monotonic() - began
        back("etcd restarted", began)
        # A machine that takes a third of the lease's time for it gives the leader no chance to renew.
        if away_s < managers.ttl_ms / 3000:
            assert managers.term() == term, "within the lease's time nobody notices"

        managers.etcd.kill()
        wait_until(nobody_leads, "nobody leads without etcd")
        managers.etcd.start()
        back("etcd back after the lease's end", time.monotonic())
        assert managers.term() > term

        managers.etcd.kill()
        wait_until(nobody_leads, "nobody leads without etcd")
        shutil.rmtree(managers.etcd.folder / "data")
        managers.etcd.start()
        back("etcd back without its data", time.monotonic())
    thread.check()
    assert load.noted > 500 and load.streak == load.noted, f"of {load.noted} calls the last {load.streak} did not fail"
    print(f"\n{load.noted} puts and gets, none failed, the longest took {load.slowest_s * 1e3:.0f} ms; back in service")
    for what, seconds in measured.items():
        print(f"    {what}: {seconds:.1f} s (bound: {BACK_S:.0f} s)")
    for each in [*managers.processes, server]:
        assert "Traceback" not in each.log.read_text(errors="replace")


def refusals(port: int) -> list[str]:
    """What a manager says to everything but PING and HELLO while it stands by; nothing while it leads."""
    with contextlib.closing(Raw(port)) as link:
        link.ask(client_hello(M.Role.ADMIN), M.Ping(5), M.MapGet(0, 0), M.Drain(1, "x"))
        answers = link.answers(4)
        if len(answers) < 4:
            raise ConnectionError(link.ended or "the manager closed the connection")
        welcome, pong, *refused = answers
        assert isinstance(welcome[1], M.Welcome) and pong == (Status.OK, M.Pong(5))
        return [answer.text if status == Status.NOT_LEADER else "" for status, answer in refused]


class Raw:
    """A connection that asks without waiting, so that requests lie there while the manager is stopped."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.conn = Connection()
        self.asked = 0
        self.ended = ""

    def ask(self, *messages: Any) -> None:
        for message in messages:
            self.asked += 1
            self.sock.sendall(encode(message, self.asked))

    def answers(self, count: int, quiet_s: float = WAIT_S) -> list[tuple[int, Any]]:
        """(status, message) of what comes, pushes included, until there are so many, the end, or quiet."""
        found = []
        self.sock.settimeout(quiet_s)
        try:
            while len(found) < count:
                data = self.sock.recv(1 << 16)
                if not data:
                    break
                self.conn.receive_data(data)
                while (frame := self.conn.next_frame()) is not None:
                    found.append((frame.status, decode(frame)))
        except OSError as exc:
            self.ended = str(exc)
        return found

    def close(self) -> None:
        self.sock.close()


#: What is taken away from a manager, as code that runs before its main(). The first: it never asks a clock whether it
#: still leads. The second: nor does it let etcd decide.
NO_CLOCK = """
import sys
from simm import manager
from simm.control import election as coordinator
renew = coordinator.Coordinator._renew
late = lambda self: self._held.until <= self._clock()
coordinator.Coordinator._renew = lambda self: 1.0 if late(self) else renew(self)
coordinator.Coordinator.term = property(lambda self: self._held.term)
coordinator.Coordinator.lead_left_s = 2.0
"""
NO_CONDITION = """
created = coordinator.created
coordinator.created = lambda key, revision: created(b"/none", 0) if revision else created(key, 0)
coordinator.modified = lambda key, revision: created(b"/none", 0)
"""
MAIN = "sys.exit(manager.main())"


@pytest.mark.fault("F07", ci="1 stop of a leader by etcd", whole="the same")
@pytest.mark.parametrize(
    ("code", "answers", "overwrites"),
    [("", False, False), (NO_CLOCK + MAIN, True, False), (NO_CLOCK + NO_CONDITION + MAIN, True, True)],
    ids=["as it is", "control: without the lease's time", "control: and without the transaction's condition"],
)
def test_a_stopped_leader_that_wakes_up(folder: Path, code: str, answers: bool, overwrites: bool) -> None:
    """While it was stopped another took over, and requests came in that it would like to answer and to store."""
    with Managers(folder, codes=(code,)) as managers:
        wait_until(lambda: managers.leader() == 0, "the first one leads")
        subscriber, joiner = Raw(managers.ports[0]), Raw(managers.ports[0])
        subscriber.ask(M.MapGet(0, 1))
        ((_, before),) = subscriber.answers(1)
        assert isinstance(before, M.MapReply)
        old = managers.stored_term()
        with stopped(psutil.Process(managers.processes[0].pid)):
            wait_until(lambda: managers.leader() == 1 and managers.stored_term() > old, "the second one leads")
            second = wait_until(managers.status, "the second one serves")
            assert second["manager"]["leader"].endswith(f":{managers.ports[1]}") and second["epoch"] > before.epoch
            joiner.ask(joining(7, "late", [WorkerInfo(0, 0, 1, 7, 1 << 30, "", "/run/w", "127.0.0.1", 4000)]))
            subscriber.ask(M.MapGet(0, 0), M.ClusterStatus(1))
        # A control answers all three as soon as its machine lets it; the manager as it is may say nothing.
        quiet_s = WAIT_S if answers else 2.0
        said = [*subscriber.answers(2, quiet_s), *joiner.answers(1, quiet_s)]
        led = [answer for status, answer in said if status != Status.NOT_LEADER]
        assert bool(led) == answers, said
        if answers:
            assert any(isinstance(answer, (M.MapReply, M.StatsReply, M.Joined)) for answer in led)
        if overwrites:
            wait_until(lambda: managers.stored_term() == old, "a write of its own arrives")
        else:
            time.sleep(0.5)  # for a write of its own to arrive
            assert managers.stored_term() != old
        if not overwrites:
            # The second one is not disturbed: its next change is stored in its term, and the first stands by.
            with ManagerClient([("127.0.0.1", managers.ports[1])], deadline_s=WAIT_S) as link:
                link.join(8, "new", [WorkerInfo(0, 0, 1, 8, 1 << 30, "", "/run/w", "127.0.0.1", 4001)])
                assert link.get_map().epoch > second["epoch"]
            assert managers.stored_term() == second["manager"]["term"]
            wait_until(
                lambda: f"127.0.0.1:{managers.ports[1]} leads" in refusals(managers.ports[0])[0], "it says who leads"
            )  # fmt: skip
        subscriber.close()
        joiner.close()


def test_contradicting_settings(folder: Path) -> None:
    both = subprocess.run(
        [sys.executable, "-m", "simm.manager", "--coordinator", "etcd://127.0.0.1:1", "--state-dir", str(folder)],
        capture_output=True, text=True, timeout=WAIT_S, env=child_environment(),
    )  # fmt: skip
    assert both.returncode == 2 and "drop --state-dir or --coordinator" in both.stderr


@pytest.mark.parametrize("ended", ["cleanly", "by SIGKILL"])
def test_a_state_in_etcd_that_cannot_be_used(folder: Path, ended: str) -> None:
    """Exit code 2 and the remedy, and nothing is lost, whether the manager leads at once or stands by first."""
    with Managers(folder, count=1, ttl_ms=2000) as managers:
        (only,) = managers.processes
        head = wait_until(lambda: managers.etcd.client().get(b"/test/state"), "the state is stored")
        if ended == "cleanly":
            only.end()
            head = managers.etcd.client().get(b"/test/state")
            assert head is not None
        else:
            # It leaves its lease, and so may one that etcd is too busy to hear.
            only.kill()
        put_key(managers.etcd.client(), b"/test/state", b"{}")
        only.launch()
        assert only.wait() == 2
        assert re.search(r"no SiMM manager's state.*etcdctl del /test/state", only.log.read_text())
        put_key(managers.etcd.client(), b"/test/state", head.value)
        only.start()
        wait_until(lambda: managers.leader() == 0, "it leads")


def test_pages_of_a_leader_and_a_standby(folder: Path) -> None:
    ports = [reserve_port(), reserve_port()]
    with EtcdServer(folder) as etcd, contextlib.ExitStack() as stack:
        processes = []
        for at, port in enumerate(ports):
            started = process(
                folder, f"manager{at}", "manager", "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{port}",
                "--coordinator", etcd.url,
            )  # fmt: skip
            processes.append(started)
            stack.callback(started.clean_up)
            started.start()
            wait_until(lambda: page(f"http://127.0.0.1:{ports[0]}/leader")[0] == 200, "the first one leads")
        address = processes[0].ready.split()[2]
        assert processes[0].ready.startswith(f"READY manager {address} http=127.0.0.1:{ports[0]}")
        assert processes[1].ready.endswith(f"http=127.0.0.1:{ports[1]} standby\n")
        leads, stands_by = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        assert page(f"{leads}/leader") == (200, "leads\n")
        assert page(f"{leads}/healthz") == (200, "ok\n")
        assert page(f"{stands_by}/leader") == (503, f"standing by, {address} leads\n")
        assert page(f"{stands_by}/healthz") == (200, f"ok; standing by, {address} leads\n")
        assert page(f"{stands_by}/readyz") == (200, f"ready, standing by, {address} leads\n")
        assert "simm_manager_leading 1" in page(f"{leads}/metrics")[1]
        assert "simm_manager_leading 0" in page(f"{stands_by}/metrics")[1]
        said = json.loads(page(f"{stands_by}/api/v1/status")[1])["manager"]
        assert not said["leading"] and said["trouble"] == f"standing by, {address} leads"
        assert page(f"{stands_by}/") == page(f"{leads}/"), "a file that asks for that"
        found = etcd.client().get(b"/simm/leader")
        assert found is not None
        assert json.loads(found.value)["address"] == address
        assert json.loads(found.value)["http"] == f"127.0.0.1:{ports[0]}"


def page(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
