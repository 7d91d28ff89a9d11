#!/usr/bin/env python3
"""Time to the first token of the released SGLang on a CPU, over conversations of many turns, without and with SiMM.

    PYTHON benchmarks/multi_turn.py --conversations 2 --json multi_turn.json

PYTHON is what ``scripts/engine-env`` prints; the script asks ``scripts/engine-env --whole`` for the rest. The engine
needs 14 GiB of available memory, as its host pool leaves 10 GB to others.

A GPT-2 with weights of a seed answers the conversations of ``conversations.py``. One engine has no cache. The other
one has SGLang's hierarchical cache and SiMM. Its own caches are flushed before each turn, as if the turn had come to
another engine: what it does not compute comes out of SiMM. Tokens must be equal and log-probabilities almost so.
SGLang says where a prompt's tokens came from. CUDA's copies and events are replaced as in the tests
(``tests/engines/plugin``).

Times include SGLang's scheduler, which polls, and its copies between host pool and device pool. ``ttft.py`` has the
share that is the store's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for folder in (str(HERE), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from conversations import conversation  # noqa: E402

VOCABULARY, PAGE = 512, 64
#: A turn's history is asked again until the storage has all of its pages, at most so often.
ATTEMPTS = 20
FLUSH_S = 60.0
#: Log-probabilities may differ by this much: pages that are loaded are followed by shorter batches.
CLOSE = 1e-3


def model(folder: Path, shape: dict[str, int], seed: int) -> str:
    """Return the folder of a GPT-2 with weights of a seed, made once."""
    where = folder / "model"
    if not (where / "config.json").exists():
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, initializer_range=0.1, **shape)
        GPT2LMHeadModel(config).to(torch.float32).save_pretrained(where)
    return str(where)


def ask(engine: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the first token, its log-probability, the time to it, and from where the prompt's tokens came."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    began = time.perf_counter()
    answer = engine.generate(input_ids=list(prompt), sampling_params=sampling, return_logprob=True)
    seconds = time.perf_counter() - began
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "ttft": seconds, "token": answer["output_ids"][0], "logprob": meta["output_token_logprobs"][0][0],
        "storage": details.get("storage", 0), "cached": meta["cached_tokens"],
    }  # fmt: skip


def flush(engine: Any) -> None:
    """Flush the engine's own caches. SGLang refuses while it still stores pages. Raises RuntimeError in the end."""
    until = time.monotonic() + FLUSH_S
    while not engine.flush_cache().success:
        if time.monotonic() > until:
            raise RuntimeError("SGLang does not flush its caches")
        time.sleep(0.05)


def run_engine(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask one engine all turns, and return a row for each."""
    import sglang

    talks = [conversation(request["seed"], n, request["sizes"], VOCABULARY) for n in range(request["conversations"])]
    engine = sglang.Engine(
        model_path=model(Path(request["folder"]), request["shape"], request["seed"]), device="cpu", random_seed=1,
        attention_backend="torch_native", sampling_backend="pytorch", grammar_backend="none", dtype="float32",
        skip_tokenizer_init=True, disable_cuda_graph=True, disable_overlap_schedule=True, page_size=PAGE,
        max_total_tokens=2 * request["sizes"][-1] + 4 * PAGE, chunked_prefill_size=-1, mem_fraction_static=0.9,
        log_level="warning", **request["options"],
    )  # fmt: skip
    rows = []
    try:
        ask(engine, talks[0][0].prompt[: PAGE + 1])
        for number, turns in enumerate(talks):
            for turn in turns:
                history = turn.history // PAGE * PAGE
                # The turns between, which nobody measures. SGLang stores pages behind the answer.
                for _ in range(ATTEMPTS if request["stored"] else 0):
                    if ask(engine, turn.prompt[: history + 1])["storage"] >= history:
                        break
                    flush(engine)
                flush(engine)
                row = ask(engine, turn.prompt)
                rows.append({"conversation": number, "tokens": len(turn.prompt), "history": history, **row})
                print(rows[-1], file=sys.stderr, flush=True)
    finally:
        engine.shutdown()
    return rows


def child(request: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """Run an engine in a process of its own. Raises RuntimeError if it brings no result."""
    whole = subprocess.run(
        [str(ROOT / "scripts" / "engine-env"), "--whole"], capture_output=True, text=True, check=False
    )
    if whole.returncode:
        raise RuntimeError(whole.stderr.strip() or "scripts/engine-env --whole failed")
    engines = ROOT / "tests" / "engines"
    path = [str(ROOT), str(engines / "plugin"), str(engines / "shim"), whole.stdout.strip().splitlines()[-1]]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
        **environment,
    }  # fmt: skip
    result = Path(request["folder"]) / "result.json"
    result.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, __file__, "--engine", json.dumps(request)], env=environment, check=False)
    if done.returncode or not result.exists():
        raise RuntimeError(f"the engine ended with {done.returncode}")
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def differences(plain: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each turn whose first token is another one with the cache, or whose history was not stored."""
    lines = []
    for one, two in zip(plain, stored, strict=True):
        where = f"conversation {one['conversation']}, {one['tokens']:,} tokens"
        if one["token"] != two["token"] or abs(one["logprob"] - two["logprob"]) > CLOSE:
            lines.append(f"{where}: {two['token']} ({two['logprob']:.4f}), not {one['token']} ({one['logprob']:.4f})")
        if two["storage"] < two["history"]:
            lines.append(f"{where}: {two['storage']} of {two['history']} tokens came out of the storage")
    return lines


def table(plain: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> str:
    """Return medians for each size as a table in Markdown."""
    lines = ["| prompt | no cache | SiMM | of no cache | out of SiMM |", "|---|---|---|---|---|"]
    for tokens in sorted({row["tokens"] for row in plain}):
        pairs = [(one, two) for one, two in zip(plain, stored, strict=True) if one["tokens"] == tokens]
        one, two, share, storage = (
            statistics.median(values)
            for values in zip(*((a["ttft"], b["ttft"], b["ttft"] / a["ttft"], b["storage"]) for a, b in pairs))
        )
        lines.append(f"| {tokens:,} | {one:.2f} s | {two:.2f} s | {share:.3f} | {storage:,.0f} tokens |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="512,1024,2048", help="tokens of the measured prompts")
    parser.add_argument("--conversations", type=int, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of the model (default 12)")
    parser.add_argument("--width", type=int, default=768, metavar="N", help="of the model, of 64 a head (default 768)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn here")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        request = json.loads(options.engine)
        (Path(request["folder"]) / "result.json").write_text(json.dumps(run_engine(request)))
        return 0
    from simm.sdk.local_cluster import LocalCluster
    from simm.tools.engine import SGLANG

    sizes = [int(word) for word in options.sizes.split(",")]
    shape = {"n_positions": sizes[-1] + PAGE, "n_embd": options.width, "n_layer": options.layers,
             "n_head": options.width // 64}  # fmt: skip
    request = {"sizes": sizes, "conversations": options.conversations, "seed": options.seed, "shape": shape}
    with tempfile.TemporaryDirectory(prefix="simm-turns-") as folder, LocalCluster("1G") as cluster:
        common = {**request, "folder": folder}
        plain = child({**common, "stored": False, "options": {"disable_radix_cache": True}})
        stored = child(
            {**common, "stored": True, "options": {
                "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": "page_first",
                "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
                "enable_cache_report": True, "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps({**SGLANG, "manager_address": cluster.manager}),
            }}, SIMM_TOKEN_FILE=cluster.token_file,
        )  # fmt: skip
    print(table(plain, stored))
    wrong = differences(plain, stored)
    for line in wrong:
        print(f"FAILED {line}")
    if options.json is not None:
        options.json.write_text(json.dumps({"request": request, "none": plain, "simm": stored}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
