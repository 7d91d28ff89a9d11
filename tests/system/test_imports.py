"""Which modules a process loads, looked at in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import pytest

#: ``import simm.client`` loads at most so many modules of SiMM, packages' own files aside: those of its calls, a module
#: a topic, and what makes digests, buffers and options.
CLIENT_MODULES_MAX: Final = 22
#: Standard library modules that only some calls need: a third of the time that the import takes beyond numpy's.
NEEDED_LATER: Final = {"asyncio", "concurrent.futures", "difflib", "ipaddress", "pathlib", "urllib.parse"}
#: Optional paths of a client, loaded where they are chosen.
OPTIONAL: Final = ("simm.gpu", "simm.rdma", "simm.verbs", "simm.sdk.rdma_", "simm.sdk.tcp", "simm.sdk.ops.replicas",
                   "simm.sdk.ops.if_absent",
    "simm.sdk.ops.rdma_ranges", "simm.tracing", "simm.sdk.tracing.",
)  # fmt: skip

_USE: Final = """
from simm.client import Client
with Client({manager!r}, namespace="imports", deadline_s=30.0) as client:
    assert client.wait_ready(60.0)
    data = bytearray(50_000)
    assert client.put("k", data) and client.put_many(["a", "b"], [b"1", b"2"]) == [True, True]
    assert client.get_into("k", data) == 50_000 and client.get_many(["a", "b"]) == [b"1", b"2"]
    assert client.exists("k") and client.delete("k")
    assert [worker["path"] for worker in client.stats()["workers"]] == ["shm"]
"""
_FIRST_TOGETHER: Final = """
import threading
from simm.client import Client
start, got = threading.Barrier(4), []
def first():
    start.wait()
    with Client({manager!r}, namespace="imports", path="tcp", replicas=2, deadline_s=30.0) as client:
        got.append(client.put("k", b"v") and client.get("k") == b"v")
threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert got == [True] * 4, got
"""


def loaded_by(code: str) -> list[str]:
    """Return the names of all modules that a new process has loaded when it has run ``code``."""
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def optional(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(OPTIONAL)]


def test_importing_the_client_loads_little() -> None:
    names = loaded_by("import simm.client")
    own = {name for name in names if name.split(".")[0] == "simm"}
    packages = {name.rpartition(".")[0] for name in own}  # their own files only say what they are for
    assert len(own - packages) <= CLIENT_MODULES_MAX, own
    assert not optional(names)
    assert not NEEDED_LATER & (set(names) - set(loaded_by("import numpy")))


@pytest.mark.parametrize("module", ["client", "kv", "testing", "dataserver", "server.stream", "server.worker"])
def test_no_module_loads_the_gpu(module: str) -> None:
    assert not [name for name in loaded_by(f"import simm.{module}") if name.startswith("simm.gpu")]


def test_a_client_beside_its_worker_loads_no_other_path(cluster: Any) -> None:
    assert not optional(loaded_by(_USE.format(manager=cluster.manager)))


def test_threads_may_load_a_path_at_the_same_time(cluster: Any) -> None:
    names = loaded_by(_FIRST_TOGETHER.format(manager=cluster.manager))
    assert "simm.sdk.tcp" in names
    assert "simm.sdk.ops.replicas" in names


def test_a_client_loads_no_psutil(cluster: Any) -> None:
    """It takes 10 ms and is for servers and commands."""
    assert "psutil" not in loaded_by(_USE.format(manager=cluster.manager))
