"""``benchmarks/ttft.py`` with a tiny model and a real cluster: the logits over loaded blocks are those without a cache.

tests/unit/tools/test_ttft.py has what needs no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine_processes import DRIVER_S, PATIENT_MS, ROOT, Engine, Unavailable, engine_python

#: Runs the command, and then looks whether its checks see a wrong byte, a block that was not loaded, and nothing else.
_DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ttft
options = ["--size", "tiny", "--sizes", "300,640", "--conversations", "2", "--rounds", "1", "--block", "32"]
options += ["--dtype", "fp32", "--caches", "in-process,simm,simm-layers,simm-tcp"]
code = ttft.main([*options, "--threads", "1", "--json", sys.argv[2], "--chart", sys.argv[3]])

loads = ttft.main([*options[:-1], "simm,simm-tcp", "--loads", "1", "--json", sys.argv[4]])

pairs = ttft.main([*options[:-1], "in-process,simm,simm-tcp", "--paired", "2", "--json", sys.argv[5]])
pairs += ttft.main([*options[:-1], "simm,simm-tcp", "--paired", "1", "--add", "--json", sys.argv[5]])

import torch
from conversations import conversation
from ttft_model import SIZES, LayerPool, Model, Pool
report = {}
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    shape = SIZES["tiny"]
    model = Model(shape, 3, dtype)
    whole, part, layers = Pool(shape, 12, 32, dtype), Pool(shape, 12, 32, dtype), LayerPool(shape, 12, 32, dtype)
    prompt = conversation(3, 0, [370], shape.vocabulary)[0].prompt
    expected = model.prefill(prompt, whole)
    equal = []
    for there in range(12):
        for pool in (part, layers):
            pool.spoil()
            pool.copy_from(whole, 0, there)
            equal.append(torch.equal(model.prefill(prompt, pool, there), expected))
    part.copy_from(whole, 0, 12)
    same = [part.same(whole, 12), layers.same(whole, 11)]
    part.memory[5 * part.block_bytes + 6] ^= 0x40
    same += [part.same(whole, 5), part.same(whole, 6)]
    changed = torch.equal(model.prefill(prompt, part, 11), expected)
    part.spoil()
    lost = bool(model.prefill(prompt, part, 11).isfinite().all())
    other = torch.equal(model.prefill(prompt[1:], part), expected)
    report[name] = {"equal": equal, "changed": changed, "lost": lost, "other": other, "same": same}
print(json.dumps({"code": code, "loads": loads, "paired": pairs, **report}))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver says, and the samples that the command wrote."""
    try:
        engine = Engine(engine_python(), tmp_path_factory.mktemp("ttft"))
    except Unavailable as why:
        pytest.skip(f"no engine environment: {why}")
    files = [str(engine.folder / name) for name in ("samples.json", "chart.svg", "loads.json", "pairs.json")]
    done = subprocess.run(
        [engine.python, "-c", _DRIVER, str(ROOT / "benchmarks"), *files], capture_output=True, text=True,
        timeout=DRIVER_S, cwd=engine.folder,
        env={**os.environ, "TMPDIR": str(engine.folder), "SIMM_DEADLINE_MS": str(PATIENT_MS)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(Path(files[0]).read_text())
    assert [each["good"] for each in json.loads(Path(files[2]).read_text())["loads"]] == [True] * 4
    return {
        **json.loads(done.stdout.splitlines()[-1]), **written, "out": done.stdout, "svg": Path(files[1]).read_text(),
        "pairs": json.loads(Path(files[3]).read_text())["pairs"],
    }  # fmt: skip


@pytest.mark.engines
def test_every_first_token_is_that_of_no_cache(ran: dict[str, Any]) -> None:
    assert ran["code"] == ran["loads"] == 0, ran["out"]
    found = {(each["cache"], each["conversation"], each["tokens"]) for each in ran["samples"]}
    caches = ("none", "in-process", "simm", "simm-layers", "simm-tcp")
    assert found == {(name, talk, size) for name in caches for talk in range(2) for size in (300, 640)}
    for each in ran["samples"]:
        assert each["equal"] and each["blocks"] == each["expected"]
        assert (each["blocks"] > 0) == (each["cache"] != "none")
        assert each["moved"] == (each["blocks"] * 32 * 512 if each["cache"].startswith("simm") else 0)
    assert ran["svg"].count("<polyline") == len(caches) and "SiMM, TCP" in ran["out"]


@pytest.mark.engines
def test_pairs_are_of_one_prompt_and_say_who_is_ahead(ran: dict[str, Any]) -> None:
    assert ran["paired"] == 0, ran["out"]
    rounds = {(tokens, name): [0, 1] for tokens in (300, 640) for name in ("in-process", "simm-tcp")}
    rounds |= {(tokens, "simm-tcp"): [0, 1, 2] for tokens in (300, 640)}
    found: dict[tuple[int, str], list[int]] = {}
    for each in ran["pairs"]:
        found.setdefault((each["tokens"], each["cache"]), []).append(each["round"])
        assert each["good"] and each["moved"] == (each["tokens"] - 96) // 32 * 32 * 512
    assert found == rounds
    assert ran["out"].count("| first token later by |") == 2


@pytest.mark.engines
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prefill_over_a_prefix(ran: dict[str, Any], dtype: str) -> None:
    """Equal bit by bit for any prefix, in both layouts. A bit of a loaded block, and a block that was not, show."""
    assert ran[dtype]["equal"] == [True] * 24
    assert ran[dtype]["same"] == [True, True, True, False]
    assert not ran[dtype]["changed"] and not ran[dtype]["lost"] and not ran[dtype]["other"]
