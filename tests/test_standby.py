"""Two managers as real processes, a real etcd, a data server and a client that know both managers' addresses.

Times are measured from the fault to the point where a leader serves and hears the data server; they are printed, with
the bound that they stand for (``BACK_S``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordination.server import MISSING, PROGRAM, EtcdServer, free_port

from simm import messages as M
from simm.client import Client
from simm.coordinator import Leader
from simm.errors import TransportError
from simm.manager_link import ManagerClient
from simm.messages import Status, WorkerInfo
from simm.rpc import Connection, decode, encode
from simm.shm import remove_leftovers

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 30.0
#: The bound for being back in service, seconds.
BACK_S = 10.0

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
    return value


class Process:
    """A SiMM process; ``start`` again after its end. ``code``: run this Python instead, for a broken one."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: str, code: str = "") -> None:
        self.log = folder / f"{name}.log"
        self.command = [sys.executable, *(("-c", code) if code else ("-m", f"simm.{module}")), *arguments]
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = ""

    def start(self) -> Process:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "--end-with", str(os.getpid())], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log, env={**environment, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        assert self.process.stdout is not None
        readable = select.select([self.process.stdout], [], [], WAIT_S)[0]
        self.ready = self.process.stdout.readline().decode() if readable else ""
        assert self.ready.startswith("READY "), self.log.read_text(errors="replace")[-2000:]
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """Its exit code."""
        assert self.process is not None and self.process.stdout is not None
        code = self.process.wait(WAIT_S)
        self.process.stdout.close()
        self.process = None
        return code

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.wait()

    def stop(self) -> None:
        """A clean end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
                self.send(signal.SIGTERM)
            self.wait()


class Managers:
    """An etcd and managers on it, named by their place."""

    def __init__(self, folder: Path, count: int = 2, ttl_ms: int = 2000, codes: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "etcd").mkdir()
        self.etcd = EtcdServer(folder / "etcd")
        self.ports = [free_port() for _ in range(count)]
        self.ttl_ms = ttl_ms
        self.codes = codes
        self.processes: list[Process] = []

    def __enter__(self) -> Managers:
        self.etcd.start()
        try:
            for at, port in enumerate(self.ports):
                self.processes.append(Process(
                    self.folder, f"manager{at}", "manager", "--listen", f"127.0.0.1:{port}", "--coordinator",
                    f"{self.etcd.url}/test", "--coordinator-ttl-ms", str(self.ttl_ms), "--heartbeat-ms", "200",
                    code=self.codes[at] if at < len(self.codes) else "",
                ).start())  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.stop()
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


class Load:
    """Puts and gets without pause; every put must succeed and every get find what was put last."""

    def __init__(self, managers: str) -> None:
        self.client = Client(managers)
        self.done = 0
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        assert self.client.wait_ready(WAIT_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.client.close()

    def _run(self) -> None:
        values: dict[str, bytes] = {}
        while not self._stop.wait(0.001):
            key = f"k{self.done % 100}"
            began = time.monotonic()
            if key in values and self.client.get(key) != values[key]:
                self.failed.append(f"get {key} at {self.done}")
            values[key] = f"{key} {self.done} ".encode() * 50
            if not self.client.put(key, values[key]):
                self.failed.append(f"put {key} at {self.done}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.done += 1


def test_a_cluster_goes_on_whichever_manager_ends(folder: Path) -> None:
    """Leaders killed, stopped for good, ended cleanly; etcd restarted, and away. No call fails, no epoch goes back."""
    name = f"two-{os.getpid()}"
    measured: dict[str, float] = {}
    epochs: list[int] = []
    with contextlib.ExitStack() as stack:
        managers = stack.enter_context(Managers(folder, ttl_ms=5000))
        assert managers.processes[0].ready == f"READY manager 127.0.0.1:{managers.ports[0]}\n"
        assert managers.processes[1].ready == f"READY manager 127.0.0.1:{managers.ports[1]} standby\n"
        server = Process(
            folder, "dataserver", "dataserver", "--listen", "127.0.0.1:0", "--manager", managers.addresses, "--memory",
            "64M", "--numa", "0", "--name", name, "--runtime-dir", str(folder / "run"),
        )  # fmt: skip
        stack.callback(remove_leftovers, f"simm-{os.geteuid()}-{name}-")
        stack.callback(server.stop)
        server.start()
        load = stack.enter_context(Load(managers.addresses))

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
            wait_until(lambda: load.client.stats()["epoch"] >= status["epoch"], f"{what}: the client hears of it")
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
        managers.processes[second].send(signal.SIGTERM)
        back("the leader ended cleanly", began, second)
        assert managers.processes[second].wait() == 0
        managers.processes[second].start()

        began = time.monotonic()
        with stopped(managers.processes[first]):
            back("the leader stopped", began, first)
        wait_until(lambda: "standing by" in managers.processes[first].log.read_text(), "the woken one stands by")

        term = managers.status()["manager"]["term"]
        managers.etcd.kill()
        managers.etcd.start()
        back("etcd restarted", time.monotonic())
        assert managers.status()["manager"]["term"] == term, "within the lease's time nobody notices"

        managers.etcd.kill()
        wait_until(nobody_leads, "nobody leads without etcd")
        managers.etcd.start()
        back("etcd back after the lease's end", time.monotonic())
        assert managers.status()["manager"]["term"] > term

        managers.etcd.kill()
        wait_until(nobody_leads, "nobody leads without etcd")
        shutil.rmtree(managers.etcd.folder / "data")
        managers.etcd.start()
        back("etcd back without its data", time.monotonic())
        assert load.done > 1000 and not load.failed, load.failed[:10]
    print(f"\n{load.done} puts and gets, none failed, the longest took {load.longest_s * 1e3:.0f} ms; back in service")
    for what, seconds in measured.items():
        print(f"    {what}: {seconds:.1f} s (bound: {BACK_S:.0f} s)")
    for each in [*managers.processes, server]:
        assert "Traceback" not in each.log.read_text(errors="replace")


@contextlib.contextmanager
def stopped(process: Process) -> Iterator[None]:
    """SIGSTOP for so long."""
    process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)


def refusals(port: int) -> list[str]:
    """What a manager says to everything but PING and HELLO while it stands by; nothing while it leads."""
    with contextlib.closing(Raw(port)) as link:
        link.ask(M.Hello(1, 1, M.Role.ADMIN, 0, 0, "", "", []), M.Ping(5), M.MapGet(0, 0), M.Drain(1, "x"))
        welcome, pong, *refused = link.answers(4)
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
from simm import coordinator, manager
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
        with stopped(managers.processes[0]):
            wait_until(lambda: managers.leader() == 1 and managers.stored_term() > old, "the second one leads")
            second = wait_until(managers.status, "the second one serves")
            assert second["manager"]["leader"].endswith(f":{managers.ports[1]}") and second["epoch"] > before.epoch
            joiner.ask(M.Join(7, 0, "late", [WorkerInfo(0, 0, 1, 7, 1 << 30, "", "/run/w", "127.0.0.1", 4000)]))
            subscriber.ask(M.MapGet(0, 0), M.ClusterStatus(1))
        said = [*subscriber.answers(2, 2.0), *joiner.answers(1, 2.0)]
        led = [answer for status, answer in said if status != Status.NOT_LEADER]
        assert bool(led) == answers, said
        if answers:
            assert any(isinstance(answer, (M.MapReply, M.StatsReply, M.Joined)) for answer in led)
        time.sleep(0.5)  # for a write of its own to arrive
        assert (managers.stored_term() == old) == overwrites
        if not overwrites:
            # The second one is not disturbed: its next change is stored in its term, and the first stands by.
            with ManagerClient([("127.0.0.1", managers.ports[1])]) as link:
                link.join(8, "new", [WorkerInfo(0, 0, 1, 8, 1 << 30, "", "/run/w", "127.0.0.1", 4001)])
                assert link.get_map().epoch > second["epoch"]
            assert managers.stored_term() == second["manager"]["term"]
            wait_until(
                lambda: f"127.0.0.1:{managers.ports[1]} leads" in refusals(managers.ports[0])[0], "it says who leads"
            )  # fmt: skip
        subscriber.close()
        joiner.close()


def test_what_is_wrong_is_said(folder: Path) -> None:
    """Contradicting settings, and a state in etcd that cannot be used: exit code 2 and the remedy; nothing is lost."""
    both = subprocess.run(
        [sys.executable, "-m", "simm.manager", "--coordinator", "etcd://127.0.0.1:1", "--state-dir", str(folder)],
        capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert both.returncode == 2 and "drop --state-dir or --coordinator" in both.stderr
    with Managers(folder, count=1) as managers:
        (only,) = managers.processes
        only.stop()
        head = managers.etcd.client().get(b"/test/state")
        assert head is not None
        managers.etcd.client().put(b"/test/state", b"{}")
        with pytest.raises(AssertionError, match=r"no SiMM manager's state.*etcdctl del /test/state"):
            only.start()
        assert only.wait() == 2
        managers.etcd.client().put(b"/test/state", head.value)
        only.start()
        assert managers.leader() == 0


def test_pages_of_a_leader_and_a_standby(folder: Path) -> None:
    ports = [free_port(), free_port()]
    with EtcdServer(folder) as etcd, contextlib.ExitStack() as stack:
        processes = []
        for at, port in enumerate(ports):
            process = Process(
                folder, f"manager{at}", "manager", "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{port}",
                "--coordinator", etcd.url,
            )  # fmt: skip
            processes.append(process)
            stack.callback(process.stop)
            process.start()
        address = processes[0].ready.split()[2]
        assert processes[0].ready == f"READY manager {address} http=127.0.0.1:{ports[0]}\n"
        assert processes[1].ready.endswith(f"http=127.0.0.1:{ports[1]} standby\n")
        leads, stands_by = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        assert page(f"{leads}/leader") == (200, "leads\n")
        assert page(f"{leads}/healthz") == (200, "ok\n")
        assert page(f"{stands_by}/leader") == (503, f"standing by, {address} leads\n")
        assert page(f"{stands_by}/healthz") == (200, f"ok; standing by, {address} leads\n")
        assert "simm_manager_leading 1" in page(f"{leads}/metrics")[1]
        assert "simm_manager_leading 0" in page(f"{stands_by}/metrics")[1]
        assert f"{address} leads" in page(f"{stands_by}/")[1]
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
