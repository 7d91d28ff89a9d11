"""``simm ctl`` on a live data server, with the manager and without it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.cli import COMMANDS
from simm.client import Client
from simm.tools.console import guarded
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a busy machine is not silent because it takes longer than a person would wait."""
    for module in ("workers", "entries", "tuning"):
        monkeypatch.setattr(f"simm.tools.ctl.{module}.ANSWER_S", 60.0)


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    with Cluster(new_folder(), memory="16M") as running:
        yield running


def ctl(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and output."""
    root, out = logging.getLogger("simm"), io.StringIO()
    before = root.handlers[:], root.propagate, root.level
    line = [*arguments, "--runtime-dir", str(cluster.folder / "run")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = guarded(lambda: COMMANDS["ctl"](line, "simm ctl"), "simm ctl")
    root.handlers[:], root.propagate = before[:2]
    root.setLevel(before[2])
    return code, out.getvalue()


def start_manager(cluster: Cluster) -> None:
    """Start the manager again, and wait until the data server has joined it and runs."""
    cluster.start_manager()
    running(cluster)


def running(cluster: Cluster) -> None:
    """Wait until the manager has heard the data server's heartbeat: READY comes before that."""
    there = ("node", "list", "--manager", cluster.manager)
    wait_until(lambda: (said := ctl(cluster, *there))[0] == 0 and "running" in said[1], "the data server runs")


def rows(cluster: Cluster, what: str) -> list[dict[str, Any]]:
    code, text = ctl(cluster, what, "--json")
    assert code in (0, 1)
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.quick
def test_what_clients_do_is_seen_also_without_a_manager(cluster: Cluster) -> None:
    with Client(cluster.manager, namespace="puts") as one, Client(cluster.manager, namespace="gets") as other:
        assert all(one.put(f"key {number}", b"x" * 5000) for number in range(20))
        assert all(one.get(f"key {number}") for number in range(20))
        assert not any(other.get(f"key {number}") for number in range(10))

        def seen() -> bool:
            found = {row["namespace"]: row for row in rows(cluster, "namespaces")}
            return found.get("puts", {}).get("hits") == 20 and found.get("gets", {}).get("gets") == 10

        wait_until(seen, "all is counted")
        found = {row["namespace"]: row for row in rows(cluster, "namespaces")}
        assert (found["puts"]["entries"], found["puts"]["bytes"], found["puts"]["clients"]) == (20, 100_000, 1)
        assert found["gets"]["hit_ratio"] == 0 and found["gets"]["misses"]["absent"] == 10
        clients = {row["namespace"]: row for row in rows(cluster, "clients")}
        assert clients["puts"]["pid"] == os.getpid() and clients["puts"]["bytes_put"] == 100_000
        assert clients["gets"]["gets"] == 10 and clients["gets"]["idle_s"] >= 0
        (worker,) = rows(cluster, "workers")
        assert worker["worker"] == f"{cluster.name}/0" and worker["clients"] == 2 and worker["entries"] == 20
        (chunks,) = rows(cluster, "slabs")
        assert (chunks["entries"], chunks["bytes"]) == (20, 100_000) and chunks["wasted_bytes"] < 20_000
        code, text = ctl(cluster, "why")
        assert code == 1 and "puts: 100.0%" in text and "one SIMM_NAMESPACE" in text
        assert ctl(cluster, "why", "puts")[0] == 0

        cluster.kill("manager")
        assert {row["namespace"] for row in rows(cluster, "clients")} == {"puts", "gets"}
        assert ctl(cluster, "workers")[0] == 0
        start_manager(cluster)


def test_a_worker_that_is_stopped_is_shown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.tools.ctl.workers.ANSWER_S", 1.0)
    pid = cluster.worker_stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        code, text = ctl(cluster, "workers")
        assert code == 1 and f"{cluster.name}/0" in text
        assert ctl(cluster, "clients")[0] == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ctl(cluster, "workers")[0] == 0, "it answers again")


@pytest.mark.quick
def test_exit_codes(cluster: Cluster, tmp_path: Path) -> None:
    assert ctl(cluster, "workers", "--server", "nobody")[0] == 2
    line = [sys.executable, "-m", "simm", "ctl", "workers", "--runtime-dir", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr


# -- values, settings and the cluster ----------------------------------------------------------------


def test_keys_and_evict(cluster: Cluster) -> None:
    with Client(cluster.manager, namespace="keep") as keep, Client(cluster.manager, namespace="drop") as drop:
        assert all(keep.put(f"k{number}", b"k" * 100) for number in range(5))
        assert all(drop.put(f"d{number}", b"d" * (1000 + number)) for number in range(30))
        assert drop.get("d3") is not None
        found = json.loads(ctl(cluster, "keys", "large", "drop", "--most", "3", "--json")[1])
        assert [row["bytes"] for row in found] == [1029, 1028, 1027] and found[0]["namespace"] == "drop"
        assert found[0]["digest"] == drop.digest("d29").hex() and found[0]["age_s"] < 600
        hot = json.loads(ctl(cluster, "keys", "hot", "drop", "--json")[1])
        assert [row["digest"] for row in hot] == [drop.digest("d3").hex()]
        sample = json.loads(ctl(cluster, "keys", "--json")[1])
        assert len(sample) == 20 and len({row["digest"] for row in sample}) == 20
        assert ctl(cluster, "keys", "cold")[0] == 2 and ctl(cluster, "evict")[0] == 2

        (row,) = json.loads(ctl(cluster, "evict", "drop", "--larger", "1020", "--dry-run", "--json")[1])
        assert (row["found"], row["evicted"]) == (10, 0) and drop.get("d29") is not None, "nothing has changed"
        (row,) = json.loads(ctl(cluster, "evict", "drop", "--larger", "1020", "--most", "4", "--json")[1])
        assert (row["found"], row["evicted"]) == (4, 4)
        assert ctl(cluster, "evict", "drop", "--older", "1h")[0] == 0 and drop.get("d0") is not None
        (row,) = json.loads(ctl(cluster, "evict", "drop", "--json")[1])
        assert row["evicted"] == 26 and not any(drop.exists_many([f"d{number}" for number in range(30)]))
        assert all(keep.exists_many([f"k{number}" for number in range(5)])), "another namespace's stay"

        assert drop.put("again", b"x") and drop.get("again")
        code, text = ctl(cluster, "namespaces", "flush", "drop", "--manager", cluster.manager)
        assert code == 0 and "nobody can read" in text
        wait_until(lambda: drop.get("again") is None, "its values are unreadable")
        # Its client may hear of the epoch after the server; until then a put is refused.
        wait_until(lambda: drop.put("again", b"y"), "it goes on with a new epoch")
        assert keep.get("k0")
        sessions = {row["kind"] for row in rows(cluster, "sessions")}
        assert sessions >= {"client", "server"}


@pytest.mark.quick
def test_settings_change_in_all_processes_and_stay_over_a_restart_of_the_worker(cluster: Cluster) -> None:
    def value(name: str) -> str:
        (row,) = json.loads(ctl(cluster, "settings", "get", name, "--json")[1])
        return str(row["value"])

    names = {row["name"] for row in json.loads(ctl(cluster, "settings", "--json")[1])}
    assert names == {
        "log_level", "poll_us", "move_mib_s", "slow_ms", "policy", "keep_share", "keep_namespace_share", "near_share"
    }  # fmt: skip
    assert ctl(cluster, "settings", "set", "poll_us", "77")[0] == 0 and value("poll_us") == "77"
    wait_until(lambda: rows(cluster, "workers")[0].get("poll_us") == 77, "the worker has it")
    assert ctl(cluster, "settings", "set", "log_level", "debug")[0] == 0
    log = cluster.log("dataserver")

    def logs_more() -> bool:
        """The worker hears of the setting later, and logs something then of a client that comes."""
        with Client(cluster.manager) as client:
            client.get("x")
        return " DEBUG " in log.read_text()

    wait_until(logs_more, "processes log more", pause_s=0.1)
    with Client(cluster.manager) as client:
        assert client.put("kept", b"k" * 4096) and client.keep(["kept"], 600, "hard") == [True]
        for setting, new in (("policy", "sieve"), ("keep_share", "80"), ("keep_namespace_share", "0")):
            assert ctl(cluster, "settings", "set", setting, new)[0] == 0 and value(setting) == new
        wait_until(lambda: rows(cluster, "workers")[0].get("policy") == "sieve", "the worker has it")
        wait_until(lambda: not client.put("late", b"k", ttl=600, keep="hard"), "no more may be kept")
        assert client.get("kept") == b"k" * 4096, "what is kept stays"
        (row,) = (each for each in rows(cluster, "namespaces") if each["namespace"] == "default")
        assert row["kept_bytes"] >= 4096 and "hard kept: " in ctl(cluster, "namespaces")[1]
        assert ctl(cluster, "settings", "set", "keep_namespace_share", "70")[0] == 0
        wait_until(lambda: client.put("late", b"k", ttl=600, keep="hard"), "again")
    os.kill(rows(cluster, "workers")[0]["pid"], signal.SIGKILL)
    wanted = {"poll_us": 77, "policy": "sieve"}.items()
    wait_until(lambda: wanted <= rows(cluster, "workers")[0].items(), "its successor has it too")
    assert value("keep_share") == "80"
    for bad in (("set", "memory", "1G"), ("set", "poll_us", "x"), ("get", "memory"), ("set", "poll_us"), ("show",)):
        assert ctl(cluster, "settings", *bad)[0] == 2
    assert value("poll_us") == "77" and "an operator has set poll_us to 77, from 50" in log.read_text()
    assert ctl(cluster, "settings", "set", "log_level", "info")[0] == 0
    assert ctl(cluster, "settings", "--server", "nobody")[0] == 2

    at_manager = ("--of-manager", "--manager", cluster.manager, "--json")
    found = {row["name"]: row["value"] for row in json.loads(ctl(cluster, "settings", "list", *at_manager)[1])}
    assert found["moves_at_once"] == "2048"
    (row,) = json.loads(ctl(cluster, "settings", "set", "moves_at_once", "9", *at_manager)[1])
    assert row["value"] == "9" and row["started_with"] == "2048"
    assert ctl(cluster, "settings", "set", "poll_us", "9", *at_manager)[0] == 2

    afar = ("--of", cluster.name, "--manager", cluster.manager, "--json")
    (row,) = json.loads(ctl(cluster, "settings", "set", "poll_us", "88", *afar)[1])
    assert row["server"] == cluster.name and row["value"] == "88" and value("poll_us") == "88"
    wait_until(lambda: rows(cluster, "workers")[0].get("poll_us") == 88, "the worker has it")
    assert ctl(cluster, "settings", "set", "poll_us", "x", *afar)[0] == 2
    every = ("--of", "*", "--manager", cluster.manager, "--json")
    (row,) = json.loads(ctl(cluster, "settings", "set", "policy", "reuse", *every)[1])
    assert row["server"] == cluster.name and row["value"] == "reuse" and value("policy") == "reuse"
    assert ctl(cluster, "settings", "set", "policy", "best", *every)[0] == 2
    assert ctl(cluster, "settings", "--of", "nobody", "--manager", cluster.manager)[0] == 2


def test_the_cluster_with_a_manager_and_without(cluster: Cluster) -> None:
    there = ("--manager", cluster.manager)
    running(cluster)
    code, text = ctl(cluster, "node", "list", *there)
    assert code == 0 and cluster.name in text and "running" in text
    found = json.loads(ctl(cluster, "node", "summary", *there, "--json")[1])
    assert found["nodes"] == 1 and found["shards"] == 16384 and found["states"] == {"running": 1}
    (row,) = json.loads(ctl(cluster, "shard", "list", *there, "--json")[1])
    assert row["worker"] == f"{cluster.name}/0" and row["runs"] == [[0, 16383]] and row["moving_in"] == 0
    code, text = ctl(cluster, "node", "drain", cluster.name, "--no-wait", *there)
    assert code == 1, "no other server could hold its shards"
    assert ctl(cluster, "node", "drain", "nobody", *there)[0] == 2 and ctl(cluster, "node", "drain", *there)[0] == 2

    cluster.kill("manager")
    code, text = ctl(cluster, "node", "list", *there)
    assert code == 1 and cluster.name in text and "no manager answers" in text
    assert json.loads(ctl(cluster, "node", "summary", *there, "--json")[1])["shards"] == 16384
    code, text = ctl(cluster, "shard", "list", *there)
    assert code == 1 and "0-16383" in text
    assert ctl(cluster, "settings", "set", "move_mib_s", "512")[0] == 0, "the admin socket needs no manager"
    assert ctl(cluster, "keys")[0] == 0 and ctl(cluster, "sessions")[0] == 0
    assert ctl(cluster, "namespaces", "flush", "x", "--timeout", "1s", *there)[0] == 2
    start_manager(cluster)


def test_upstreams_commands_by_their_names(cluster: Cluster) -> None:
    there = ("--manager", cluster.manager)
    running(cluster)
    code, text = ctl(cluster, "cluster", "status", *there)
    assert code == 0 and "16,384 shards" in text and f"{cluster.name}  running" in text
    found = json.loads(ctl(cluster, "cluster", "status", *there, "--json")[1])
    assert found["epoch"] > 0 and found["nodes"][0]["node"] == cluster.name and not found["trouble"]
    (row,) = json.loads(ctl(cluster, "server", "status", cluster.name, *there, "--json")[1])
    assert (row["server"], row["worker"], row["state"], row["shards"]) == (cluster.name, 0, "running", 16384)
    assert ctl(cluster, "server", "status", "nobody", *there)[0] == 2
    assert ctl(cluster, "server", *there)[0] == 2 and ctl(cluster, "cluster", *there)[0] == 2

    flags = json.loads(ctl(cluster, "gflag", "list", "--json")[1])
    assert flags == json.loads(ctl(cluster, "settings", "list", "--json")[1])
    (flag,) = json.loads(ctl(cluster, "gflag", "set", "move_mib_s", "700", "--json")[1])
    assert flag["value"] == "700" and "700" in ctl(cluster, "gflag", "get", "move_mib_s")[1]

    # The only server cannot be emptied: the manager refuses, by name and by address.
    for server in (cluster.name, row["address"]):
        assert ctl(cluster, "node", "set", server, "DEAD", *there)[0] == 1
    code, text = ctl(cluster, "node", "set", row["address"], "1", *there)
    assert code == 0 and f"{cluster.name}: takes its share" in text
    for bad in (("set", "127.0.0.1:1", "1"), ("set", cluster.name, "2"), ("set", cluster.name), ("list", "x")):
        assert ctl(cluster, "node", *bad, *there)[0] == 2

    with Client(cluster.manager) as client:
        assert client.put("kv-key", b"\x00its bytes")
    assert ctl(cluster, "kv", "exist", "kv-key", *there) == (0, "kv-key: stored\n")
    line = [sys.executable, "-m", "simm", "ctl", "kv", "get", "kv-key", *there]
    assert subprocess.run(line, capture_output=True, check=True).stdout == b"\x00its bytes"
    assert ctl(cluster, "kv", "del", "kv-key", *there)[0] == 0
    assert ctl(cluster, "kv", "exist", "kv-key", *there) == (1, "kv-key: not stored\n")
    assert ctl(cluster, "kv", "put", "kv-key", *there)[0] == 2

    cluster.kill("manager")
    for what in ("cluster", "server"):
        code, text = ctl(cluster, what, "status", *there)
        assert code == 1 and cluster.name in text and "no manager answers" in text and "serving" in text
    for argv, key in ((["status"], "servers"), (["node", "list"], "nodes")):
        at = [sys.executable, "-m", "simm", *argv, "--runtime-dir", str(cluster.folder / "run"), *there]
        done = subprocess.run(at, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and cluster.name in done.stdout and "no manager answers" in done.stdout, done
        shown = json.loads(subprocess.run([*at, "--json"], capture_output=True, text=True, check=False).stdout)
        assert shown[key][0]["shards"] == 16_384 and "no manager answers" in shown["trouble"]
    start_manager(cluster)


def test_top_shows_the_cluster_with_a_manager_and_without(cluster: Cluster) -> None:
    def top() -> str:
        out, root = io.StringIO(), logging.getLogger("simm")
        before = root.handlers[:], root.propagate, root.level
        line = ["--every", "0.2s", "--count", "2", "--manager", cluster.manager, "--runtime-dir",
                str(cluster.folder / "run")]  # fmt: skip
        with contextlib.redirect_stdout(out):
            assert guarded(lambda: COMMANDS["top"](line, "simm top"), "simm top") == 0
        root.handlers[:], root.propagate = before[:2]
        root.setLevel(before[2])
        return out.getvalue()

    with Client(cluster.manager, namespace="seen-by-top") as client:
        assert client.put("k", b"x" * 5000) and client.get("k")
        # A test before this one may have ended the manager: the server joins the next one, and then runs.
        # The second view has rates, which are 0 once what the client did has been counted.
        wanted = ("seen-by-top", f"{cluster.name}  running", "gets 0/s")
        text = wait_until(lambda: all(map((said := top()).__contains__, wanted)) and said, "its counts")
        assert text.count("simm top") == 2 and f"{cluster.name}  running" in text and str(os.getpid()) in text
        cluster.kill("manager")
        text = top()
        assert "no manager answers" in text and "seen-by-top" in text and f"{cluster.name}/0  serving" in text
        start_manager(cluster)


def test_values_of_an_arena_whose_data_has_no_name() -> None:
    """With a group it is a sealed memfd, which the worker passes: also to who only looks at values, or evicts them."""
    with Cluster(new_folder(), memory="16M", server_arguments=("--group", str(os.getgid()))) as cluster:
        segment = next(name for name in os.listdir("/dev/shm") if f"-{cluster.name}-" in name)
        assert not os.path.exists(f"/dev/shm/{segment}.data"), "the positive control"
        with Client(cluster.manager, namespace="sealed") as client:
            assert all(client.put(f"key {number}", b"x" * 5000) for number in range(20))
        found = {row["namespace"]: row for row in rows(cluster, "namespaces")}
        assert (found["sealed"]["entries"], found["sealed"]["bytes"]) == (20, 100_000)
        assert sum(row["entries"] for row in rows(cluster, "slabs")) == 20
        assert len(rows(cluster, "keys")) == 20
        code, said = ctl(cluster, "evict", "sealed", "--json")
        assert code == 0 and json.loads(said)[0]["evicted"] == 20


def test_an_arena_that_cannot_be_read_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are missing from the table, which says so and is no success."""
    monkeypatch.setattr("simm.tools.ctl.workers.Asked.reader", None)
    for what in ("keys", "namespaces", "slabs"):
        code, said = ctl(cluster, what)
        assert code == 1 and "its arena cannot be read by this user" in said, what
