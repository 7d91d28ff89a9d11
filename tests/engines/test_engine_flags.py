"""``simm engine NAME``: the released engines' own parsers take what it prints, and make of it what is meant.

They also take the command lines of docs/engines.md and of the README.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.connectors.hicache import facts
from simm.tools import engine as printed
from tests.engines.engine_processes import ROOT, Engine

MANAGER = "10.0.0.5:30001"
#: Programs of the documentation, by the name that the driver has for their parser.
PROGRAMS = {"sglang": "python -m sglang.launch_server", "vllm": "vllm serve", "lmcache-server": "lmcache server"}
PAGE, README = ((ROOT / name).read_text() for name in ("docs/engines.md", "README.md"))

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def parsed(engine: Engine, *names: str, **environment: str) -> dict[str, Any]:
    steps = [{"command": name} for name in names]
    ran = engine.run(MANAGER, 0, steps, driver="flags_driver.py", as_expected=False, **environment)
    assert list(ran.report) == list(names)
    return ran.report


def documented(program: str) -> list[list[str]]:
    """The words behind a program's name on each command line of the page, and in the README's table."""
    found = []
    for block in re.findall(r"^```[a-z]*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            _, named, words = line.partition(f"{PROGRAMS[program]} ")
            found += [shlex.split(words)] if named else []
    (_, *rows) = README.partition("| SGLang | vLLM | LMCache |")[2].strip().splitlines()
    names, starts = ([cell.strip(" `") for cell in row.strip("| ").split("|")] for row in rows[1:3])
    for name, start in zip(names, starts):
        _, named, words = start.partition(f"{PROGRAMS[program]} ")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert cli.main(["engine", name.removeprefix("simm engine "), "--manager", MANAGER, "--json"]) == 0
        flags = json.loads(said.getvalue())["flags"]
        found += [[part for word in words.split() for part in (flags if word == "FLAGS" else [word])]] if named else []
    return found


def takes_the_documentation(engine: Engine, program: str, least: int, **environment: str) -> None:
    lines = documented(program)
    assert len(lines) >= least
    steps: list[dict[str, Any]] = [{"command": program, "words": words} for words in lines]
    wrong = {"command": program, "words": [*lines[0], "--no-such-flag", "1"]}
    ran = engine.run(MANAGER, 0, [*steps, wrong], driver="flags_driver.py", as_expected=False, **environment)
    *said, control = ran.report["words"]
    assert said == [""] * len(lines), list(zip(lines, said))
    assert "--no-such-flag" in control


def test_sglang_takes_the_documentation(engine: Engine, whole_packages: str) -> None:
    takes_the_documentation(engine, "sglang", 4, ENGINE_PACKAGES=whole_packages)


def test_lmcache_takes_the_documentation(lmcache: Engine) -> None:
    takes_the_documentation(lmcache, "lmcache-server", 3, LMCACHE_TRACK_USAGE="false")


def test_vllm_takes_the_documentation(vllm: Engine) -> None:
    takes_the_documentation(vllm, "vllm", 6)


def test_sglang_has_all_settings_that_decide_what_pages_hold(engine: Engine) -> None:
    """A setting that is renamed would be None in all engines, and they would share what they must not."""
    ask = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    where = subprocess.run([engine.python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    names = set(re.findall(r'"(\w+)"', Path(where, "srt/arg_groups/field_order.py").read_text()))
    assert "model_path" in names
    assert not {*facts._WEIGHTS, *facts._NUMBERS, *facts._DRAFT, "load_format", "quantization_param_path"} - names


def test_sglang(engine: Engine, whole_packages: str) -> None:
    report = parsed(engine, "sglang", "sglang-builtin", "sglang-mooncake", ENGINE_PACKAGES=whole_packages)
    assert all((each["cache"], each["layout"]) == (True, "page_first") for each in report.values())
    assert [each["backend"] for each in report.values()] == ["dynamic", "simm", "mooncake"]
    own, builtin, mooncake = (each["extra"] for each in report.values())
    assert own == {**printed.SGLANG, "manager_address": MANAGER} and builtin == {"manager_address": MANAGER}
    assert mooncake == {"master_server_address": MANAGER, "local_hostname": "localhost"}


def test_lmcache(lmcache: Engine) -> None:
    report = parsed(lmcache, "lmcache", "lmcache-server", LMCACHE_TRACK_USAGE="false")
    extra = {f"remote_storage_plugin.simm.{name}": value for name, value in printed.LMCACHE.items()}
    extra["remote_storage_plugin.simm.manager_address"] = MANAGER
    assert report["lmcache"]["plugins"] == ["simm"] and report["lmcache"]["extra"] == extra
    assert report["lmcache"]["hash"] == "sha256_cbor"
    server = report["lmcache-server"]
    assert (server["module"], server["class"]) == ("simm.connectors.lmcache_server", "SimmL2Adapter")
    assert server["params"] == {"manager_address": MANAGER}


def test_vllm(vllm: Engine) -> None:
    """And vLLM's factories find the classes."""
    report = parsed(vllm, "vllm", "vllm-connector")
    tier, connector = report["vllm"], report["vllm-connector"]
    assert (tier["class"], tier["role"], tier["tiers"]) == ("OffloadingConnector", "kv_both", ["SimmTier"])
    assert tier["extra"]["secondary_tiers"] == [{**printed.VLLM, "manager_address": MANAGER}]
    assert (connector["class"], connector["role"], connector["tiers"]) == ("SimmConnector", "kv_both", [])
    assert connector["policy"] == "recompute" and connector["extra"] == {"manager_address": MANAGER}
