"""``simm node`` and the moves in ``simm status``: against a real manager, and how a drain is watched."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.cluster.shard_map import ShardMap
from simm.config.parsers import parse_addresses
from simm.errors import SimmError, TransportError, UsageError
from simm.net.channel import Refused
from simm.tools import nodes
from simm.wire.messages import Status, WorkerInfo, WorkerLoad
from tests.support.manager_client import ManagerClient
from tests.support.processes import new_folder
from tests.support.server_process import ServerProcess

GIB = 1 << 30
WAIT_S = 60.0


@pytest.fixture
def manager(nothing_is_left: Path) -> Iterator[str]:
    """The address of a manager process."""
    folder = new_folder()
    # The test sends some heartbeats and then none: its nodes must not be missed meanwhile.
    arguments = ("--listen", "127.0.0.1:0", "--moves-at-once", "1000", "--heartbeat-ms", "20000")
    with ServerProcess("manager", folder, *arguments) as process:
        yield process.address
    shutil.rmtree(folder)


def linked(address: str) -> ManagerClient:
    return ManagerClient(parse_addresses(address), deadline_s=WAIT_S)


def join(link: ManagerClient, name: str) -> None:
    link.join(1, name, [WorkerInfo(0, 0, 1, 0, GIB, "", "/run/w", "10.0.0.1", 4000)])


def deliver(link: ManagerClient, name: str) -> int:
    """All that is on its way to a node has come."""
    reply = link.get_map()
    shard_map = ShardMap(reply)
    coming = [shard for shard in shard_map.previous if reply.workers[shard_map.owners[shard]].node == name]
    return link.moved(1, reply.epoch, name, 0, coming) if coming else 0


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


# --- against a manager ---------------------------------------------------------------------------


@pytest.mark.quick
def test_list_drain_and_resume(manager: str, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--manager", manager)
    code, out, err = run(capsys, "node", "list", *there)
    assert (code, err) == (0, "") and "no data server has joined" in out
    with linked(manager) as link:
        for name in ("alpha", "beta"):
            join(link, name)
        for _ in range(20):
            for name in ("alpha", "beta"):
                link.heartbeat(1, name, link.get_map().epoch, [WorkerLoad(3 << 20, 5, 5, 0)])
                deliver(link, name)
        code, out, _ = run(capsys, "node", "list", *there)
        lines = [line.split() for line in out.splitlines()]
        assert lines[0][:4] == ["NAME", "STATE", "WORKERS", "SHARDS"] and lines[1][:4] == [
            "alpha",
            "running",
            "1",
            "8,192",
        ]
        code, out, _ = run(capsys, "node", "list", "--json", *there)
        assert [node["name"] for node in json.loads(out)] == ["alpha", "beta"]

        code, out, err = run(capsys, "node", "drain", "alfa", *there)
        assert code == 2 and out == "" and "nearest name is 'alpha'" in err and "simm node list" in err
        code, out, _ = run(capsys, "node", "drain", "beta", "--no-wait", *there)
        assert code == 0 and out == "beta: to be drained, owns 7,192 shards now\n"
        code, out, err = run(capsys, "node", "drain", "alpha", *there)
        assert code == 1 and "only data server" in err and "simm dataserver" in err
        code, out, err = run(capsys, "node", "drain", "beta", "--timeout", "10ms", *there)
        assert code == 1 and "8,192 shards are left after 0.01 s" in err and "simm node resume beta" in err
        assert out.startswith("beta: 8,192 of 8,192 shards left")

        def keep_delivering() -> None:
            with linked(manager) as other:
                join(other, "alpha")
                while deliver(other, "alpha"):
                    pass

        delivering = threading.Thread(target=keep_delivering)
        delivering.start()
        code, out, err = run(capsys, "node", "drain", "beta", "--timeout", str(WAIT_S), *there)
        delivering.join(WAIT_S)
        assert (code, err) == (0, "") and out.splitlines()[-1].startswith("beta: drained, ")
        code, out, _ = run(capsys, "node", "list", *there)
        assert out.splitlines()[2].split()[:2] == ["beta", "drained"] and "simm node resume beta" in out
        code, out, _ = run(capsys, "node", "resume", "beta", *there)
        assert code == 0 and out == "beta: takes its share, owns 1,000 shards now\n"
        assert deliver(link, "beta") == 1000

        found = link.status()
        for node in found["nodes"]:
            for worker in node["workers"]:
                worker.update(path="tcp", reason="")
        text = nodes.cluster_table(found)
        assert "1,000 shards are moving, 6,192 wait for their turn" in text
        assert text.splitlines()[3].split()[-4:] == ["SHARDS", "IN", "OUT", "PATH"]
        ways = {"alpha": ("rdma", ""), "beta": ("tcp", "RDMA: no pair of rails works: rxe0:1 to rxe1:1: no answer")}
        for node in found["nodes"]:
            for worker in node["workers"]:
                worker["path"], worker["reason"] = ways[node["name"]]
        lines = nodes.cluster_table(json.loads(json.dumps(found))).splitlines()
        assert [line.split()[-1] for line in lines if line.startswith(("alpha/0 ", "beta/0 "))][:2] == ["rdma", "tcp"]
        assert lines[-1] == "beta/0 by tcp: RDMA: no pair of rails works: rxe0:1 to rxe1:1: no answer"
        assert nodes.healthy(found)


@pytest.mark.parametrize("argv", [["drain"], ["list", "a"], ["resume"], ["stop", "a"], []])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "node", *argv, "--manager", "127.0.0.1:1")
    assert code == 2 and out == "" and "simm node" in err


@pytest.mark.parametrize("argv", [["list"], ["drain", "a"], ["resume", "a"]])
def test_no_manager(argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "node", *argv, "--manager", "127.0.0.1:1", "--runtime-dir", str(tmp_path))
    assert code == 2 and out == "" and "no manager answers" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [("node",), ("ctl", "node")], ids=" ".join)
def test_a_drain_says_what_it_will_evict(
    manager: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """Before it begins: it used to evict without a word."""
    with linked(manager) as link:
        for name, used in (("alpha", GIB - (1 << 20)), ("beta", 3 << 20)):
            join(link, name)
            link.heartbeat(1, name, link.get_map().epoch, [WorkerLoad(used, 5, 5, 0)])
        code, out, _ = run(capsys, *command, "drain", "beta", "--no-wait", "--manager", manager)
        assert code == 0 and "beta holds 3M, and the other servers have 1M free: about 2M of values" in out
        assert out.index("will be evicted there") < out.index("to be drained")
        code, out, _ = run(capsys, *command, "resume", "beta", "--manager", manager)
        assert code == 0 and "evicted" not in out


# --- watching ---------------------------------------------------------------------------------------


class Script:
    """A link whose manager's status is what the test says, one after the other; the clock goes by sleeping."""

    def __init__(self, *steps: dict[str, Any] | Exception) -> None:
        self.steps = list(steps)
        self.now = 0.0

    def status(self) -> dict[str, Any]:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def step(
    shards: int, out: int = 0, copied: int = 0, rate: int = 0, state: str = "draining", draining: bool = True,
    moving: int = 1, evicted: int = 7, room: int = 1 << 20, own: int = 100,
) -> dict[str, Any]:  # fmt: skip
    memory = {"used_bytes": 1 << 20, "capacity_bytes": 1 << 30, "evictions": own}
    leaver = {"worker": 0, "shards": shards, "moving_out": out, "moved_bytes": 0, **memory}
    taker = {"worker": 0, "shards": 0, "moving_out": 0, "moved_bytes": copied, "used_bytes": 1 << 20,
             "capacity_bytes": (1 << 20) + room, "evictions": evicted}
    drained = draining and not shards + out
    return {
        "nodes": [
            {"name": "a", "state": state, "draining": draining, "drained": drained, "workers": [leaver]},
            {"name": "b", "state": "running", "draining": False, "drained": False, "workers": [taker]},
        ],
        "move_rate": rate, "shards_moving": moving, "shards_waiting": 1 - moving,
    }  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(script: Script, out: io.StringIO, timeout_s: float | None = None) -> str:
    nodes.wait_drained(script, "a", out, timeout_s, script.clock, script.sleep)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_terminal_has_one_line() -> None:
    script = Script(step(100, 20), step(40, 20, 1 << 20, 1 << 19), step(40, 20, 1 << 10, 1 << 19), step(0))
    text = watch(script, Terminal())
    lines = text.split("\r")
    assert lines[1].rstrip() == "a: 120 of 120 shards left, 0 copied"
    assert lines[2].rstrip() == "a: 60 of 120 shards left, 1M copied, 512K/s, about 0 s to go"
    assert lines[3].startswith("a: 60 of 120 shards left, 1M copied"), "a worker began to count anew: one KiB more"
    assert lines[4].rstrip() == "a: drained, the other servers count what they have evicted"
    assert lines[5].rstrip() == "a: drained, 1M copied in 0.8 s; it may be stopped" and text.count("\n") == 1


def test_a_load_says_before_what_it_will_evict() -> None:
    def text(size: int, entries: int = 5, state: str = "running") -> str:
        worker = {"capacity_bytes": 3 << 20, "used_bytes": 2 << 20, "entries": entries}
        return nodes.load_text({"nodes": [{"state": state, "workers": [worker, worker]}]}, size)

    assert text(2 << 20).endswith("2M are free there: it should evict nothing")
    assert text(5 << 20).endswith("about 3M of the 10 values there will be evicted")
    assert text(5 << 20, entries=0).endswith("it should evict nothing"), "there is nothing to lose"
    assert text(1 << 20, state="dead").endswith("0 are free there: it should evict nothing")


def test_what_a_drain_evicts_is_said_before_and_counted_after() -> None:
    assert nodes.room_text(step(9), "a") == ""
    text = nodes.room_text(step(9, room=1 << 19), "a")
    assert text == "a holds 1M, and the other servers have 512K free: about 512K of values will be evicted there"
    assert nodes.room_text(step(9), "nobody") == ""
    text = watch(Script(step(9, evicted=7), step(3, evicted=1000), step(0, evicted=1241)), io.StringIO())
    assert text.rstrip().endswith("s, 1,234 values evicted by the other servers meanwhile; it may be stopped")
    late = [step(0, evicted=7), step(0, evicted=500), TransportError("gone"), step(0, evicted=1007)]
    text = watch(Script(step(9, evicted=7), *late), io.StringIO())
    assert "s, 1,000 values evicted by the other servers meanwhile" in text, "counts come a second or two later"
    for last in (step(0), step(0, own=900)):  # its own evictions are no loss
        assert "evicted by" not in watch(Script(step(9), last), io.StringIO())


def test_elsewhere_a_line_now_and_then() -> None:
    steps = [step(200 - number, copied=number) for number in range(60)]
    text = watch(Script(*steps, step(0)), io.StringIO())
    lines = text.splitlines()
    assert len(lines) == 4 and lines[0] == "a: 200 of 200 shards left, 0 copied"
    assert lines[1] == "a: 180 of 200 shards left, 20 copied, about 45 s to go"
    assert lines[-1].startswith("a: drained, ")


def test_the_manager_may_be_away_for_a_while() -> None:
    away = [TransportError("gone")] * 100
    text = watch(Script(step(9), *away, step(0)), io.StringIO())
    assert "no manager answers, trying again" in text and text.splitlines()[-1].startswith("a: drained")
    with pytest.raises(TransportError, match="gone"):
        watch(Script(step(9), TransportError("gone")), io.StringIO())
    with pytest.raises(Refused):
        watch(Script(Refused(Status.UNAUTHORIZED, "no")), io.StringIO())


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (step(0, state="dead"), "is dead"), (step(5, state="left"), "is left"), ({**step(1), "nodes": []}, "forgotten"),
        (step(5, draining=False, state="running"), "was resumed meanwhile"),
    ],
)  # fmt: skip
def test_a_drain_that_cannot_end(last: dict[str, Any], says: str) -> None:
    out = Terminal()
    with pytest.raises(SimmError, match=says):
        watch(Script(step(9), last), out)
    assert out.getvalue().endswith("\n"), "the error has a line of its own"


def test_time_is_up_and_nobody_takes() -> None:
    out = io.StringIO()
    with pytest.raises(SimmError, match="9 shards are left after 30 s"):
        watch(Script(step(9, moving=0)), out, 30.0)
    assert "waiting for servers to take them" in out.getvalue()


def test_refusals_become_errors_of_the_right_kind() -> None:
    class Link:
        def __init__(self, status: Status) -> None:
            self.status = status

        def drain(self, name: str, on: bool) -> int:
            raise Refused(self.status, "says why")

    for refused, kind in (
        (Status.UNKNOWN_NODE, UsageError), (Status.UNAVAILABLE, SimmError), (Status.BUSY, SimmError),
        (Status.UNAUTHORIZED, Refused),
    ):  # fmt: skip
        with pytest.raises(kind, match="says why") as caught:
            nodes.request(Link(refused), "a", True)  # type: ignore[arg-type]
        assert type(caught.value) is kind


def test_states_in_words() -> None:
    def text(state: str, draining: bool, drained: bool) -> str:
        return nodes.state_text({"state": state, "draining": draining, "drained": drained})

    assert text("running", False, False) == "running" and text("draining", True, False) == "draining"
    assert text("draining", True, True) == "drained" and text("suspect", True, False) == "suspect, to drain"
    assert text("left", True, True) == "left, drained"
