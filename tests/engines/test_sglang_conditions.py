"""SiMM's own backend in the released SGLang where not all is as it was: installed by pip, in a store that is full
of pages of another size, and while its servers pause.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import BUILD_S, ROOT, Cluster, Engine
from tests.support.child import child_environment
from tests.support.waiting import WAIT_S

SEED = 20_261_127
#: Of 221 KB each: a prompt of 31 MB, of which two fill the store.
PAGES = 140
FILL = 4

Step = dict[str, Any]

pytestmark = pytest.mark.engines


def case(command: str, prompt: str, pages: int = PAGES, **more: Any) -> Step:
    fields = {"prompt": prompt, "pool": "mla", "layout": "page_first", "layers": 12, "backend": "dynamic", **more}
    return {"command": command, "case": {**fields, "pages": pages}}


@pytest.fixture(scope="module")
def cluster(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("conditions-cluster"), "36M", servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed SiMM, out of a copy: it builds in the folder that it is given."""
    folder = tmp_path_factory.mktemp("installed")
    source, target = folder / "source", folder / "target"
    shutil.copytree(ROOT / "simm", source / "simm", ignore=shutil.ignore_patterns("__pycache__"))
    for each in ROOT.iterdir():
        if each.is_file() and each.name != ".git":
            shutil.copy2(each, source)
    options = ["--quiet", "--no-input", "--no-deps", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("no package index is reached, which pip takes setuptools from")
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def summary(cluster: Cluster) -> dict[str, Any]:
    asked = [sys.executable, "-m", "simm", "ctl", "node", "summary", "--manager", cluster.address, "--json"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=WAIT_S, env=child_environment())
    found: dict[str, Any] = json.loads(said.stdout)
    return found


@pytest.mark.slow
def test_another_page_size_in_a_full_store(engine: Engine, cluster: Cluster, installed: Path) -> None:
    """And by the package that pip installs."""

    def run(tokens: int, steps: list[Step]) -> None:
        ran = engine.run(
            cluster.address, SEED, steps, driver="connector_driver.py", as_expected=False, installed=installed,
            ENGINE_PAGE_TOKENS=str(tokens),
        )  # fmt: skip
        assert ran.report["ok"], f"{ran.report['steps']}\n{ran.said}\n{cluster.logs()}"
        assert Path(ran.report["simm_kv"]).is_relative_to(installed)

    run(16, [case("write", f"old/{number}") for number in range(FILL)])
    assert summary(cluster)["evictions"] > 0
    prompt = "new"
    run(32, [case("write", prompt, PAGES // 2), case("read", prompt, PAGES // 2)])
    run(16, [case("absent", prompt), case("write", prompt), case("read", prompt)])


def test_servers_pause_for_ten_seconds(engine: Engine, cluster: Cluster) -> None:
    pids = [each.pid for each in cluster.servers]
    step = {**case("paused", "paused", 40, servers=pids), "warns": True}
    ran = engine.run(cluster.address, SEED, [step], driver="connector_driver.py", as_expected=False)
    assert ran.report["ok"], f"{ran.report['steps']}\n{ran.said}\n{cluster.logs()}"
