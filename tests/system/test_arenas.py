"""Real servers and the arenas that they find at their start: names, warm starts, two clusters on one host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm import shm
from simm.arena.layout import HEADER_WORDS
from simm.net.channel import Channel
from simm.sdk.local_cluster import LocalCluster
from simm.wire import messages as M
from tests.support.child import ROOT
from tests.support.left_arenas import (
    KEYS,
    MIB,
    SEEN,
    all_of,
    fill,
    found,
    named,
    said,
    segments,
    spoil,
    stop_server,
    the_segment,
)
from tests.support.processes import HERE, Cluster, remove_left_by
from tests.support.waiting import wait_until

# -- real servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["-1", "-x-0"])
def test_servers_whose_names_begin_alike(nothing_is_left: Path, suffix: str) -> None:
    """``gpu`` starts, cold and warm, while an arena of ``gpu-1`` waits for its server."""
    short = f"{HERE}gpu"
    with named(short + suffix, "--warm") as longer:
        assert fill(longer, "longer") == KEYS
        stop_server(longer)
        kept = segments(longer.name)
        assert len(kept) == 1
        for arguments in ((), ("--warm",)):
            with named(short, *arguments) as server:
                assert fill(server, "shorter") == KEYS
                assert segments(longer.name) == kept
        assert segments(longer.name) == kept
        longer.start_server()
        assert found(longer) == all_of("longer")
        remove_left_by(short)


def test_a_user_may_call_a_server_local(nothing_is_left: Path) -> None:
    """Its arena is not an embedded cluster's, which the next start of anybody removes."""
    with named(f"local-{HERE}gpu", "--warm") as server, named(f"{HERE}other") as other:
        assert fill(server, "local") == KEYS
        stop_server(server)
        stop_server(other)
        other.start_server()
        server.start_server()
        assert found(server) == all_of("local")
        server.server_arguments = ()
        stop_server(server)
        server.start_server()
        stop_server(server)
        assert not segments(server.name)


def test_what_an_embedded_cluster_left_is_removed(make_cluster: Callable[..., Cluster], nothing_is_left: Path) -> None:
    with LocalCluster(32 * MIB) as embedded:
        (name, data) = sorted(name for name in os.listdir("/dev/shm") if f"-local-{os.getpid()}-" in name)
        live = make_cluster(memory="32M")
        assert os.path.exists(f"/dev/shm/{name}"), "it lives"
        os.kill(embedded.pids["dataserver"], 9)
        wait_until(lambda: not shm.is_locked(name), "it has ended")
        stop_server(live)
        live.start_server()
        assert not os.path.exists(f"/dev/shm/{name}") and not os.path.exists(f"/dev/shm/{data}")


def test_a_reserved_name_is_refused(nothing_is_left: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simm.dataserver", "--name", "local-1-0123abcd", "--runtime-dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "choose another --name" in done.stderr and not done.stdout


# -- warm starts of real servers -----------------------------------------------------------------------


@pytest.fixture
def left_warm(nothing_is_left: Path) -> Iterator[Cluster]:
    """A cluster whose data server was stopped with --warm and KEYS values."""
    with named(f"{HERE}warm", "--warm") as cluster:
        assert fill(cluster) == KEYS
        stop_server(cluster)
        yield cluster


@pytest.mark.quick
def test_a_warm_start_has_all_values(left_warm: Cluster) -> None:
    name = the_segment(left_warm).name
    left_warm.start_server()
    assert found(left_warm) == all_of() and the_segment(left_warm).name == name
    assert "set aside" not in said(left_warm)
REAL = ["the next layout", "cut short", "longer", "fewer sets"]


#: A data server whose workers cannot recover any arena.
NO_RECOVERY = ("-c", """if True:
    import importlib, sys
    from simm.arena.store import Store
    from simm.errors import CorruptionError
    def recover(*_arguments, **_more):
        raise CorruptionError("it contradicts itself")
    Store.recover = recover
    sys.exit(importlib.import_module("simm." + sys.argv[1]).main(sys.argv[2:]))
""")


@pytest.mark.parametrize("what", [*REAL, "no recovery"])
def test_a_server_comes_up_cold_and_says_why(left_warm: Cluster, what: str) -> None:
    """It serves, nothing is left of the old segment, and one line names it and the reason. Then it is warm again."""
    old = the_segment(left_warm)
    if what in SEEN:
        damage, reason = SEEN[what]
        spoil(old, damage)
    else:
        left_warm.script, reason = NO_RECOVERY, "cannot be recovered: it contradicts itself"
    left_warm.start_server()
    left_warm.script = ()
    assert not old.exists() and the_segment(left_warm).name != old.name
    lines = [line for line in said(left_warm).splitlines() if old.name in line and reason in line]
    assert len(lines) == 1, said(left_warm)
    assert "set aside" in said(left_warm) and "Traceback" not in said(left_warm)
    assert not any(found(left_warm))
    assert left_warm.worker_stats()["incarnation"] == 1
    assert fill(left_warm, "anew") == KEYS
    stop_server(left_warm)
    left_warm.start_server()
    assert found(left_warm) == all_of("anew")


def size_of(metadata: Path) -> int:
    return metadata.stat().st_size + metadata.with_name(f"{metadata.name}.data").stat().st_size


def test_another_size_or_another_group(left_warm: Cluster) -> None:
    """The size that is asked for is the one it gets; who may map it is settled without losing anything."""
    old = the_segment(left_warm)
    left_warm.server_arguments = ("--warm", "--group", str(os.getegid()))
    left_warm.start_server()
    assert found(left_warm) == all_of() and old.stat().st_mode & 0o777 == 0o640
    stop_server(left_warm)
    left_warm.server_arguments = ("--warm",)
    left_warm.start_server()
    assert found(left_warm) == all_of() and old.stat().st_mode & 0o777 == 0o600
    stop_server(left_warm)
    left_warm.memory = "48M"
    left_warm.start_server()
    assert not old.exists() and size_of(the_segment(left_warm)) == 48 * MIB
    assert f"{old.name} is set aside and removed, and its worker starts cold: it has 32 MiB" in said(left_warm)
    assert fill(left_warm) == KEYS


def test_an_arena_that_breaks_while_it_is_served(left_warm: Cluster) -> None:
    """A running server's worker that cannot recover ends the server soon, with the reason. The next start is cold."""
    left_warm.script = NO_RECOVERY
    left_warm.start_server()
    left_warm.script = ()
    segment = the_segment(left_warm)
    process = left_warm.processes["dataserver"]
    os.kill(left_warm.worker_stats()["pid"], signal.SIGKILL)
    assert process.wait() == 1
    assert said(left_warm).count(f"{segment.name} cannot be recovered") == 3
    assert "start again, which will be cold" in said(left_warm) and not segment.exists()
    left_warm.start_server()
    assert fill(left_warm) == KEYS


def test_a_header_that_breaks_while_it_is_served(left_warm: Cluster) -> None:
    """It ended the server. Now the next worker goes by what its predecessor has kept, and so does a warm start."""
    left_warm.start_server()
    segment = the_segment(left_warm)
    pid = left_warm.worker_stats()["pid"]
    with open(segment, "r+b") as file:
        file.write(b"\xff" * 8 * HEADER_WORDS)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: found(left_warm) == all_of(), "another worker, with all values")
    stop_server(left_warm)
    left_warm.start_server()
    assert found(left_warm) == all_of() and the_segment(left_warm) == segment


# -- two clusters on one host --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as they stopped", "the other way round"])
def test_two_clusters_with_servers_of_one_name(nothing_is_left: Path, order: str) -> None:
    """Both are stopped with --warm and started again: each has all of its own values, and none of the other's."""
    name = f"{HERE}two"
    with named(name, "--warm") as first, named(name, "--warm") as second:
        assert fill(first, "first") == fill(second, "second") == KEYS
        kept = segments(name)
        assert len(kept) == 2
        for cluster in (first, second):
            stop_server(cluster)
        pairs = [(first, "first"), (second, "second")]
        if order != "as they stopped":
            pairs.reverse()
        for cluster, tag in pairs:
            cluster.start_server()
            assert found(cluster) == all_of(tag)
        assert segments(name) == kept
        assert "neither used nor removed" in said(pairs[0][0])


@pytest.mark.parametrize("arguments", [(), ("--warm",)], ids=str)
def test_a_new_cluster_beside_one_that_sleeps(nothing_is_left: Path, arguments: tuple[str, ...]) -> None:
    """It starts cold, has no value of the first, and leaves it what it has; the first is warm again afterwards."""
    name = f"{HERE}two"
    with named(name, "--warm") as first:
        assert fill(first, "first") == KEYS
        stop_server(first)
        (kept,) = segments(name)
        with named(name, *arguments) as second:
            assert not any(found(second))
            assert fill(second, "second") == KEYS and found(second) == all_of("second")
            (line,) = [line for line in said(second).splitlines() if "neither used nor removed" in line]
            assert f"rm /dev/shm/{kept} /dev/shm/{kept}.data" in line
            stop_server(second)
            assert kept in segments(name)
            first.start_server()
            assert found(first) == all_of("first")
            stop_server(first)


def test_a_manager_that_lost_its_state_keeps_a_warm_server_warm(nothing_is_left: Path) -> None:
    """Another server has the map. The manager listens, and tells nobody an id that it is about to give up."""
    # Of two servers one is dead after five heartbeats without a word, and its values are lost.
    with named(f"{HERE}stays") as stays:
        sleeper = Cluster(stays.folder, "32M", server_arguments=("--warm",))
        sleeper.name, sleeper.manager = f"{HERE}sleeps", stays.manager
        log_of = stays.log("dataserver")
        try:
            sleeper.start_server()

            def settled() -> bool:
                with contextlib.closing(Channel.tcp(*address(stays), 10.0)) as channel:
                    status = json.loads(channel.call(M.ClusterStatus(0)).json)
                shards = [worker["shards"] for node in status["nodes"] for worker in node["workers"]]
                return len(shards) == 2 and min(shards) > 8000 and not status.get("shards_moving")

            wait_until(settled, "each has its half")
            assert fill(stays) == KEYS
            stop_server(sleeper)
            stays.kill("manager")
            shutil.rmtree(stays.folder / "state")
            before = segments(sleeper.name)
            assert len(before) == 1
            # It looks for the manager before that one starts: one without its state waits some seconds only for the
            # servers of the map that it is told, and a busy machine may need longer to start one.
            returning = sleeper.launch_server()
            wait_until(lambda: "asking the manager" in log_of.read_text(), "it asks")
            stays.start_manager()
            returning.wait_ready()
            assert segments(sleeper.name) == before
            wait_until(settled, "each has its half")
            assert found(stays) == all_of()
            assert "set aside" not in log_of.read_text() and "neither used" not in log_of.read_text()
        finally:
            if "dataserver" in sleeper.processes:
                sleeper.processes["dataserver"].clean_up()
            remove_left_by(sleeper.name)


def address(cluster: Cluster) -> tuple[str, int]:
    host, _, port = cluster.manager.rpartition(":")
    return host, int(port)


def test_a_server_whose_manager_is_replaced_by_another_clusters(nothing_is_left: Path) -> None:
    """It drops what it has before it joins, so no client of the new cluster finds a value of the old one."""
    with named(f"{HERE}moved", "--warm") as cluster:
        assert fill(cluster, "old") == KEYS
        with named(f"{HERE}native") as other:
            assert fill(other, "new") == KEYS
            stop_server(other)
            other.kill("manager")
            cluster.kill("manager")
            shutil.rmtree(cluster.folder / "state")
            shutil.copytree(other.folder / "state", cluster.folder / "state")
            pid = cluster.worker_stats()["pid"]
            cluster.start_manager()

            # Each of these waits until the server takes a put, so it has joined the other cluster then.
            assert not any(found(cluster)), "a value of the other cluster"
            assert fill(cluster, "mixed") == KEYS and found(cluster) == all_of("mixed")
            assert cluster.worker_stats()["pid"] == pid and "drop them and join again" in said(cluster)
        stop_server(cluster)
        cluster.start_server()
        assert found(cluster) == all_of("mixed"), "and what it has now is the new cluster's"


def test_a_start_that_waits_for_the_manager_can_be_stopped(left_warm: Cluster) -> None:
    """Nothing was decided, so nothing was done: the next start is warm."""
    left_warm.kill("manager")
    segment = the_segment(left_warm)
    before = segment.read_bytes()
    process = left_warm.launch_server()
    wait_until(lambda: "asking the manager" in said(left_warm), "it asks", 60)
    process.end()
    assert segment.read_bytes() == before
    left_warm.start_manager()
    left_warm.start_server()
    assert found(left_warm) == all_of()


def test_a_server_that_never_had_a_shard_leaves_nothing(nothing_is_left: Path) -> None:
    with named(f"{HERE}never", "--warm") as cluster:
        stop_server(cluster)
        remove_left_by(cluster.name)
        cluster.kill("manager")
        process = cluster.launch_server()
        wait_until(lambda: segments(cluster.name), "its arena is there", 60)
        wait_until(lambda: "is process" in said(cluster).partition("set aside")[0], "its worker", 60)
        process.end()
        assert not segments(cluster.name)
        cluster.start_manager()
