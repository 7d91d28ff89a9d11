"""The calls of FlexKV's remote tier, which is Mooncake's store, over SiMM; ``flexkv_driver.py`` says whose they are.

FlexKV's own client of that store, and its planner, run out of a checkout of FlexKV that SIMM_FLEXKV names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine_processes import DRIVER_S, HERE, PATIENT_MS, Engine
from tests.support.child import child_environment
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S

BLOCKS = 12
STORED = {"stored FlexKV": BLOCKS, "stored FlexKV_swa": BLOCKS}
READ = {"read FlexKV": BLOCKS, "read FlexKV_swa": BLOCKS}
NONE = {"read FlexKV": 0, "read FlexKV_swa": 0}
#: What the planner finds of a prompt: blocks, and blocks with a window.
WHOLE, NOTHING = {"prefix": BLOCKS, "window": BLOCKS}, {"prefix": 0, "window": 0}

Step = dict[str, Any]


def worker(prompt: str, **more: Any) -> Step:
    return {"role": "worker", "prompt": prompt, "flip": None, "store": False, "clear": False, "blocks": BLOCKS, **more}


def planner(prompt: str) -> Step:
    return {"role": "planner", "prompt": prompt, "blocks": BLOCKS}


#: Processes, each with its namespace, its steps, and what these find.
PROCESSES: dict[str, tuple[str, list[tuple[Step, Step]]]] = {
    "a process that stores": ("model", [
        (planner("one"), NOTHING), (worker("one", store=True), {**STORED, **READ}),
        (worker("damaged", store=True, flip=[3, 17]), {**STORED, **READ, "wrong": [["FlexKV", 3, 17]]}),
    ]),
    "another one": ("model", [
        (planner("one"), WHOLE), (worker("one"), READ), (worker("two"), NONE), (worker("one", ranks=2), NONE),
        (worker("damaged"), {**READ, "wrong": [["FlexKV", 3, 17]]}),
    ]),
    "another model, which is not in FlexKV's keys": ("other", [
        (planner("one"), NOTHING), (worker("one"), NONE), (worker("kept", store=True), {**STORED, **READ}),
    ]),
    "one that clears": ("model", [(worker("one", clear=True), READ), (planner("one"), NOTHING)]),
    "which reaches no further than its namespace": ("other", [(planner("kept"), WHOLE)]),
}  # fmt: skip


@contextmanager
def master(folder: Path) -> Iterator[dict[str, Any]]:
    """A cluster whose manager has pages, as FlexKV looks for those of Mooncake's master."""
    with (
        ServerProcess("manager", folder, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0") as manager,
        ServerProcess(
            "dataserver", folder, "--manager", manager.address, "--memory", "64M", "--listen", "127.0.0.1:0", "--name",
            f"t-{folder.name}", "--runtime-dir", str(folder / "run"),
        ),
    ):  # fmt: skip
        yield {"manager": manager.address, "pages": int(manager.http.rpartition(":")[2].rstrip("/"))}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """What the processes have found, one after the other."""
    folder: Path = tmp_path_factory.mktemp("flexkv")
    reports = {}
    with master(folder) as at:
        for name, (namespace, steps) in PROCESSES.items():
            request = {"steps": [{**step, **at} for step, _ in steps]}
            command = [
                sys.executable, "-m", "simm.connectors.mooncake", "--namespace", namespace, "--", sys.executable,
                str(HERE / "flexkv_driver.py"), json.dumps(request),
            ]  # fmt: skip
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=WAIT_S, cwd=folder,
                env=child_environment(SIMM_DEADLINE_MS=str(PATIENT_MS)),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            reports[name] = json.loads(done.stdout)
    return reports


@pytest.mark.engines
@pytest.mark.parametrize("name", PROCESSES)
def test_what_flexkv_finds(found: dict[str, list[Step]], name: str) -> None:
    """A worker starts, its codes are FlexKV's for success, and all that it reads is right but for what was damaged."""
    started = {"warm": True, "answered": True, "codes": [0, 0, 0, 0], "wrong": []}
    wanted = [{**(started if step["role"] == "worker" else {}), **counts} for step, counts in PROCESSES[name][1]]
    assert found[name] == wanted


@pytest.mark.engines
def test_flexkvs_own_client_and_planner(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes that store, find, read and clear, and one of another model, in a namespace of its own."""
    checkout = os.environ.get("SIMM_FLEXKV", "")
    if not checkout:
        pytest.skip(
            "FlexKV is in no package index (pip download flexkv: no matching distribution), and its repository "
            "github.com/taco-project/FlexKV could not be reached; SIMM_FLEXKV may name a checkout of it"
        )
    steps: list[list[tuple[str, list[Any]]]] = [
        [("match", [0, 0]), ("write", [BLOCKS, BLOCKS, 0]), ("write", [BLOCKS, BLOCKS, 0])],
        [("match", [BLOCKS, BLOCKS]), ("read", [BLOCKS, BLOCKS, 0])],
        [("match", [0, 0]), ("read", [0, 0, BLOCKS])],
        [("clear", []), ("match", [0, 0]), ("read", [0, 0, BLOCKS])],
    ]
    namespaces = ["model", "model", "other", "model"]
    folder: Path = tmp_path_factory.mktemp("own-flexkv")
    with master(folder) as at:
        config = folder / "flexkv.json"
        config.write_text(json.dumps({
            "master_addr": at["manager"], "master_metrics_port": at["pages"], "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp", "device_name": "", "local_hostname": "127.0.0.1", "global_segment_size": 0,
            "enable_ssd_offload": False, "ssd_offload_path": None, "max_get_batch_bytes": 150_000,
            "max_put_batch_bytes": 150_000,
        }))  # fmt: skip
        for namespace, wanted in zip(namespaces, steps):
            todo = [[name, "one", BLOCKS] for name, _ in wanted]
            request = {"checkout": checkout, "config": str(config), "steps": todo}
            done = subprocess.run(
                [
                    engine.python, "-m", "simm.connectors.mooncake", "--namespace", namespace, "--", engine.python,
                    str(HERE / "flexkv_own_driver.py"), json.dumps(request),
                ], capture_output=True, text=True, timeout=DRIVER_S, cwd=folder,
                env=child_environment(SIMM_DEADLINE_MS=str(PATIENT_MS)),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            assert json.loads(done.stdout) == [found for _, found in wanted], done.stderr[-2000:]
