"""F12: processes that write at random into all that they can map of an arena, while others put and get.

Clients with checksums get exact bytes or misses. No process of the server and no client dies of a signal. When the
writing has ended, the server is well again, with the same supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from simm.client import Client
from tests.support.child import Child, module_command
from tests.support.measures import measured
from tests.support.other_user import GID, command_as, let_through, needs_root
from tests.support.pace import Pace
from tests.support.processes import Cluster, new_folder
from tests.support.scribbler import Judge
from tests.support.waiting import wait_until

TOKEN: Final = "a token of sixteen bytes or more"
#: When the writing has ended, the server is well again after that, seconds.
WELL_S: Final = 2.0
#: A server is well if so many rounds of puts and gets in a row succeed.
ROUNDS: Final = 10

JUDGES: Final = (("shm", "checksum"), ("tcp", "checksum"), ("shm", "plain"))

#: A data server whose workers believe their arena, and mend nothing, as before.
NO_VAULT: Final = ("-c", """if True:
    import importlib, sys
    from simm.arena.store import Store
    real = Store.create
    Store.create = lambda *arguments, vault, **more: real(*arguments, **more)
    again = Store.recover
    Store.recover = lambda *arguments, vault, **more: again(*arguments, **more)
    sys.exit(importlib.import_module("simm." + sys.argv[1]).main(sys.argv[2:]))
""")


@pytest.fixture
def make(nothing_is_left: Path) -> Iterator[Callable[..., Cluster]]:
    """Start clusters: ``make(group=True)`` with a group and a token."""
    with contextlib.ExitStack() as stack:

        def start(*, group: bool = False, **more: Any) -> Cluster:
            folder = new_folder()
            if group:
                let_through(folder)
                (folder / "token").write_text(TOKEN)
                (folder / "token").chmod(0o600)
                more["environment"] = {"SIMM_TOKEN_FILE": str(folder / "token")}
            arguments = ("--group", str(GID)) if group else ()
            return stack.enter_context(Cluster(folder, "64M", server_arguments=arguments, **more))

        yield start


def storm(cluster: Cluster, who: str, scribbler: list[str], seconds: float, token: str = "") -> dict[str, Any]:
    """Let clients and a scribbler run for so long, and until all clients have got values. Return what the clients say.

    Asserts everything that must hold but the bytes.
    """
    server = cluster.processes["dataserver"]
    before = server.pid
    with contextlib.ExitStack() as stack:
        judges = {
            (path, checksum): stack.enter_context(
                Child(
                    module_command("tests.support.scribbler", "judge", cluster.manager, token, path, checksum),
                    talks=True, log=cluster.folder / f"judge-{path}-{checksum}.log", name=f"judge {path} {checksum}",
                )
            )
            for path, checksum in JUDGES
        }  # fmt: skip
        for judge in judges.values():
            wait_until(partial(got_more, judge, {"hits": 0}), f"{judge.name} gets values")
        first = {key: judge.ask({}) for key, judge in judges.items()}
        with Child(scribbler, talks=True, log=cluster.folder / "scribbler.log", name="scribbler") as wild:
            wild.expect("begun")
            until = time.monotonic() + seconds
            wait_until(lambda: time.monotonic() > until, "the dose is over", seconds + 60)
            for key, judge in judges.items():
                wait_until(partial(got_more, judge, first[key]), f"{judge.name} gets values still")
            with Pace() as pace:
                writes = json.loads(wild.rest())["writes"]
                assert wild.process.returncode == 0, wild.said()
                began = time.monotonic()
                took = well_after(cluster, token, began)
            log = cluster.log("dataserver").read_text()
            workers = log.count("dataserver: worker 0 is process")
            pace.check("well again after a scribbler", took, WELL_S, who=who, workers=workers)
        said = {}
        for key, judge in judges.items():
            said[key] = judge.ask({})
            assert not judge.rest() and judge.process.returncode == 0, f"{judge.name}\n{judge.said()}"
            assert "Traceback" not in judge.said(), judge.said()
            assert said[key]["longest_s"] < 5.0 + pace.limit(WELL_S), f"{judge.name}: a call beyond its deadline"
    assert server.pid == before and server.running and cluster.processes["manager"].running
    log = cluster.log("dataserver").read_text()
    assert " by SIG" not in log, [line for line in log.splitlines() if " by SIG" in line]
    assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    assert "stream of worker 0 (process" not in log.replace("stream of worker 0 is process", ""), "a stream has died"
    for key, counts in said.items():
        measured(
            f"{who} scribbles, {key[0]} {key[1]}: wrong values", counts["wrong"], "values", hits=counts["hits"],
            misses=counts["misses"], puts=counts["puts"], refused=counts["refused"], writes=writes,
        )  # fmt: skip
    return said


def got_more(judge: Child, before: dict[str, Any]) -> bool:
    """Return True if a client has got values since it said ``before``."""
    return bool(judge.ask({})["hits"] > before["hits"])


def well_after(cluster: Cluster, token: str, began: float) -> float:
    """Return how long after ``began`` the server takes all values of a new client and gives them back, from then on."""
    with Client(cluster.manager, namespace="judged", token=token or None, deadline_s=5.0, checksum=True) as client:
        judge = Judge(client, "well")
        everything = list(judge.values)

        def well() -> bool:
            return judge.put(everything) and client.get_many(everything) == list(judge.values.values())

        at = began
        rounds = 0
        while rounds < ROUNDS:
            if well():
                rounds += 1
            else:
                assert time.monotonic() - began < 60.0, "the server is not well"
                rounds, at = 0, time.monotonic()
        return at - began


def assert_exact(said: dict[Any, Any]) -> None:
    """Nobody with a checksum has got wrong bytes."""
    for (path, checksum), counts in said.items():
        if checksum == "checksum":
            assert not counts["wrong"], f"{path}: {counts['examples']}"
        assert counts["paths"] == path


def of_the_group(make: Callable[..., Cluster], seconds: float) -> None:
    cluster = make(group=True)
    uds = str(cluster.folder / "run" / f"{cluster.name}.0.sock")
    worker = cluster.worker_stats()["pid"]
    program = command_as("tests.support.scribbler.main('member', *sys.argv[1:])", uds)
    said = storm(cluster, "a member", program, seconds, TOKEN)
    assert_exact(said)
    assert cluster.worker_stats()["pid"] == worker, "he cannot reach what would end a worker"


def of_the_servers_user(make: Callable[..., Cluster], seconds: float) -> None:
    cluster = make()
    said = storm(cluster, "an owner", module_command("tests.support.scribbler", "owner", cluster.name), seconds)
    assert_exact(said)
    assert "were overwritten by others: mended" in cluster.log("dataserver").read_text(), "it hit what is mended"


@needs_root
@pytest.mark.fault("F12", ci=3)
def test_a_member_of_the_group_scribbles(make: Callable[..., Cluster], amount: float) -> None:
    of_the_group(make, amount)


@needs_root
@pytest.mark.fault("F12", whole=60)
@pytest.mark.slow
def test_a_member_of_the_group_scribbles_long(make: Callable[..., Cluster], amount: float | None) -> None:
    of_the_group(make, amount or 60)


@pytest.mark.fault("F12", ci=3)
def test_a_process_of_the_servers_user_scribbles(make: Callable[..., Cluster], amount: float) -> None:
    of_the_servers_user(make, amount)


@pytest.mark.fault("F12", whole=60)
@pytest.mark.slow
def test_a_process_of_the_servers_user_scribbles_long(make: Callable[..., Cluster], amount: float | None) -> None:
    of_the_servers_user(make, amount or 60)


# -- controls: that the tests above can fail ---------------------------------------------------------------


def spoil(cluster: Cluster, where: str, rng: random.Random) -> None:
    """Overwrite a part of the arena once."""
    (meta,) = (path for path in Path("/dev/shm").iterdir() if f"-{cluster.name}-" in path.name and path.suffix == "")
    if where == "data":
        path = meta.with_name(f"{meta.name}.data")
        with open(path, "r+b") as file:
            for at in range(0, os.fstat(file.fileno()).st_size - 4096, 4096):
                os.pwrite(file.fileno(), rng.randbytes(64), at)
    else:
        with open(meta, "r+b") as file:
            os.pwrite(file.fileno(), rng.randbytes(132 << 10), 0)


def test_control_wrong_bytes_are_seen(make: Callable[..., Cluster]) -> None:
    """A client without checksums gets what somebody has written into the data; one with checksums does not."""
    cluster = make()
    for checksum in (False, True):
        with Client(cluster.manager, path="shm", deadline_s=60.0, checksum=checksum) as client:
            judge = Judge(client, f"control {checksum}")
            wait_until(lambda: judge.put(list(judge.values)), "all values are stored")  # noqa: B023
            with client.pin(list(judge.values)) as pins:
                spoil(cluster, "data", random.Random(1))
                judge.look_at(list(judge.values), pins)
            assert bool(judge.counts["wrong"]) != checksum, judge.counts
            for key, got in zip(judge.values, client.get_many(list(judge.values))):
                judge.look(key, got, "get")
            assert bool(judge.counts["wrong"]) != checksum, judge.counts


@pytest.mark.parametrize("script", [(), NO_VAULT])
def test_control_header_and_shard_words_do_not_mend_themselves(
    make: Callable[..., Cluster], script: tuple[str, ...]
) -> None:
    """One stroke over both: the values are back at once, or for a worker that mends nothing never."""
    cluster = make(script=script)
    with Client(cluster.manager, deadline_s=1.0) as client:
        judge = Judge(client, "control")
        everything = list(judge.values)
        wait_until(lambda: judge.put(everything), "all values are stored")
        pid = cluster.worker_stats()["pid"]
        spoil(cluster, "header and shard words", random.Random(1))
        if not script:
            wait_until(lambda: client.get_many(everything) == list(judge.values.values()), "the values are back")
            assert cluster.worker_stats()["pid"] == pid
            return
        until = time.monotonic() + WELL_S
        wait_until(lambda: time.monotonic() > until, "time enough to be well")
        for _ in range(20):
            assert client.get_many(everything) != list(judge.values.values())
