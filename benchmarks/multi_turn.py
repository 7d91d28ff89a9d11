#!/usr/bin/env python3
"""Time to the first token of the released SGLang or vLLM on a CPU, over conversations of many turns, with and without
SiMM.

    PYTHON benchmarks/multi_turn.py --conversations 2 --json multi_turn.json
    PYTHON benchmarks/multi_turn.py --with vllm

Each takes a minute or two on two cores. PYTHON is what ``scripts/engine-env`` prints, for vLLM ``scripts/engine-env
vllm``. For SGLang the script asks ``scripts/engine-env --whole`` for the rest; that engine needs 14 GiB of available
memory, as its host pool leaves 10 GB to others.

A GPT-2 with weights of a seed answers the conversations of ``conversations.py``. One engine has no cache. The other
one has SGLang's hierarchical cache and SiMM, or vLLM's prefix cache and SiMM's connector. Its own caches are flushed
before each turn, as if the turn had come to another engine: what it does not compute comes out of SiMM. Tokens must be
equal and log-probabilities almost so. The engine says where a prompt's tokens came from. CUDA's copies and events,
which SGLang makes, are replaced as in the tests (``tests/engines/plugin``).

Times include the engine's scheduler, which polls in SGLang, and its copies. ``ttft.py`` has the share that is the
store's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for folder in (str(HERE), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from conversations import Turn, conversation  # noqa: E402

TESTS = ROOT / "tests" / "engines"
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


class Engine(Protocol):
    """An engine that has started."""

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the first token, its log-probability, the time to it, and from where the prompt's tokens came."""

    def flush(self) -> bool:
        """Flush the engine's own caches; return False if it still stores what is in them."""

    def shutdown(self) -> None:
        """End it."""


class SGLang:
    """SGLang; with SiMM's backend of its hierarchical cache, if it stores."""

    def __init__(self, request: dict[str, Any], path: str) -> None:
        import sglang

        options: dict[str, Any] = {"disable_radix_cache": True}
        if request["manager"]:
            from simm.tools.engine import SGLANG

            options = {
                "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": "page_first",
                "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
                "enable_cache_report": True, "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps({**SGLANG, "manager_address": request["manager"]}),
            }  # fmt: skip
        self._engine: Any = sglang.Engine(
            model_path=path, device="cpu", random_seed=1, attention_backend="torch_native",
            sampling_backend="pytorch", grammar_backend="none", dtype="float32", skip_tokenizer_init=True,
            disable_cuda_graph=True, disable_overlap_schedule=True, page_size=PAGE,
            max_total_tokens=2 * request["sizes"][-1] + 4 * PAGE, chunked_prefill_size=-1, mem_fraction_static=0.9,
            log_level="warning", **options,
        )  # fmt: skip

    @staticmethod
    def environment() -> dict[str, str]:
        """Return what it needs in its environment. Raises RuntimeError if that cannot be had."""
        whole = subprocess.run(
            [str(ROOT / "scripts" / "engine-env"), "--whole"], capture_output=True, text=True, check=False
        )
        if whole.returncode:
            raise RuntimeError(whole.stderr.strip() or "scripts/engine-env --whole failed")
        path = [str(ROOT), str(TESTS / "plugin"), str(TESTS / "shim"), whole.stdout.strip().splitlines()[-1]]
        return {"PYTHONPATH": os.pathsep.join(path)}

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        began = time.perf_counter()
        answer = self._engine.generate(input_ids=list(prompt), sampling_params=sampling, return_logprob=True)
        seconds = time.perf_counter() - began
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return {
            "ttft": seconds, "token": answer["output_ids"][0], "logprob": meta["output_token_logprobs"][0][0],
            "storage": details.get("storage", 0), "cached": meta["cached_tokens"],
        }  # fmt: skip

    def flush(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def shutdown(self) -> None:
        self._engine.shutdown()


class VLLM:
    """vLLM, its core in a process of its own as in a server; with SiMM's connector, if it stores."""

    def __init__(self, request: dict[str, Any], path: str) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if request["manager"]:
            from simm.tools.engine import VLLM_CONNECTOR

            extra = {"manager_address": request["manager"], "staging_mb": 1024}
            options["kv_transfer_config"] = KVTransferConfig(**VLLM_CONNECTOR, kv_connector_extra_config=extra)
        longest, shape = request["sizes"][-1] + PAGE, request["shape"]
        self._llm: Any = LLM(
            path, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=PAGE, seed=1,
            max_model_len=longest, max_num_batched_tokens=longest, enable_prefix_caching=bool(options),
            kv_cache_memory_bytes=3 * longest * shape["n_layer"] * shape["n_embd"] * 2 * 4, **options,
        )  # fmt: skip
        self._sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=0, detokenize=False)

    @staticmethod
    def environment() -> dict[str, str]:
        """Return what it needs in its environment."""
        return {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS / "shim"))), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
        }  # fmt: skip

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        asked = [{"prompt_token_ids": list(prompt)}]
        began = time.perf_counter()
        (answer,) = self._llm.generate(asked, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        (output,), cached = answer.outputs, answer.num_cached_tokens or 0
        (probable,) = output.logprobs
        token = output.token_ids[0]
        # Its own cache was flushed: what is cached came out of SiMM.
        return {
            "ttft": seconds, "token": token, "logprob": probable[token].logprob, "storage": cached, "cached": cached
        }

    def flush(self) -> bool:
        return bool(self._llm.llm_engine.engine_core.reset_prefix_cache(False, False))

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


ENGINES: Mapping[str, type[SGLang | VLLM]] = {"sglang": SGLang, "vllm": VLLM}


def flush(engine: Engine) -> None:
    """Flush the engine's own caches. Raises RuntimeError if it does not in the end."""
    until = time.monotonic() + FLUSH_S
    while not engine.flush():
        if time.monotonic() > until:
            raise RuntimeError("the engine does not flush its caches")
        time.sleep(0.05)


def other_message(seed: int, number: int, turn: Turn, round: int) -> list[int]:
    """Return a turn's prompt with another message: the one before it is stored when it has been answered."""
    draw = random.Random(f"message/{seed}/{number}/{round}/{len(turn.prompt)}")
    fresh = [draw.randrange(VOCABULARY) for _ in turn.prompt[turn.history :]]
    return [*turn.prompt[: turn.history], *fresh]


def run_engine(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask one engine all turns, and return a row for each."""
    talks = [conversation(request["seed"], n, request["sizes"], VOCABULARY) for n in range(request["conversations"])]
    make: Callable[[dict[str, Any], str], Engine] = ENGINES[request["engine"]]
    engine = make(request, model(Path(request["folder"]), request["shape"], request["seed"]))
    rows = []
    try:
        engine.ask(talks[0][0].prompt[: PAGE + 1])
        for number, turns in enumerate(talks):
            for turn in turns:
                history = turn.history // PAGE * PAGE
                # The turns between, which nobody measures. Engines store pages behind the answer.
                for _ in range(ATTEMPTS if request["manager"] else 0):
                    if engine.ask(turn.prompt[: history + 1])["storage"] >= history:
                        break
                    flush(engine)
                for each in range(request["rounds"]):
                    flush(engine)
                    row = engine.ask(turn.prompt if not each else other_message(request["seed"], number, turn, each))
                    rows.append(
                        {"conversation": number, "tokens": len(turn.prompt), "history": history, "round": each, **row}
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    finally:
        engine.shutdown()
    return rows


def child(request: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """Run an engine in a process of its own. Raises RuntimeError if it brings no result."""
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
        **ENGINES[request["engine"]].environment(), **environment,
    }  # fmt: skip
    result = Path(request["folder"]) / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    # vLLM logs to stdout. Engines have processes of their own, which a group ends with.
    engine = subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno(), start_new_session=True)
    try:
        status = engine.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
    if status or not result.exists():
        raise RuntimeError(f"the engine ended with {status}")
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def differences(plain: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each turn whose first token is another one with the cache, or whose history was not stored."""
    lines = []
    for one, two in zip(plain, stored, strict=True):
        where = f"conversation {one['conversation']}, {one['tokens']:,} tokens, round {one['round']}"
        if one["token"] != two["token"] or abs(one["logprob"] - two["logprob"]) > CLOSE:
            lines.append(f"{where}: {two['token']} ({two['logprob']:.4f}), not {one['token']} ({one['logprob']:.4f})")
        if two["storage"] < two["history"]:
            lines.append(f"{where}: {two['storage']} of {two['history']} tokens came out of the storage")
    return lines


def table(plain: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> str:
    """Return medians over the conversations for each size as a table in Markdown. The fastest round of a turn counts.

    What else a machine does makes a round slower, never faster, and the two engines run one after the other.
    """
    lines = ["| prompt | no cache | SiMM | of no cache | out of SiMM |", "|---|---|---|---|---|"]
    one, two = fastest(plain), fastest(stored)
    for tokens in sorted({size for size, _ in one}):
        turns = [turn for turn in one if turn[0] == tokens]
        without, with_simm, share, storage = (
            statistics.median(values)
            for values in zip(*(
                (one[turn]["ttft"], two[turn]["ttft"], two[turn]["ttft"] / one[turn]["ttft"], two[turn]["storage"])
                for turn in turns
            ))
        )  # fmt: skip
        lines.append(f"| {tokens:,} | {without:.2f} s | {with_simm:.2f} s | {share:.3f} | {storage:,.0f} tokens |")
    return "\n".join(lines)


def fastest(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the fastest round of each turn, by its tokens and conversation."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        turn = row["tokens"], row["conversation"]
        if turn not in found or row["ttft"] < found[turn]["ttft"]:
            found[turn] = row
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="512,1024,2048", help="tokens of the measured prompts")
    parser.add_argument("--conversations", type=int, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each turn (default 3)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the model (default 6)")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="of the model, of 64 a head (default 512)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn here")
    parser.add_argument("--with", dest="engine", choices=list(ENGINES), default="sglang", help="(default sglang)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        request = json.loads(options.child)
        (Path(request["folder"]) / "result.json").write_text(json.dumps(run_engine(request)))
        return 0
    from simm.sdk.local_cluster import LocalCluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the engine and the cluster
    sizes = [int(word) for word in options.sizes.split(",")]
    shape = {"n_positions": sizes[-1] + PAGE, "n_embd": options.width, "n_layer": options.layers,
             "n_head": options.width // 64}  # fmt: skip
    request = {
        "engine": options.engine, "sizes": sizes, "conversations": options.conversations, "seed": options.seed,
        "rounds": options.rounds, "shape": shape,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="simm-turns-") as folder, LocalCluster("1G") as cluster:
        common = {**request, "folder": folder}
        plain = child({**common, "manager": ""})
        stored = child({**common, "manager": cluster.manager}, SIMM_TOKEN_FILE=cluster.token_file)
    print(table(plain, stored))
    wrong = differences(plain, stored)
    for line in wrong:
        print(f"FAILED {line}")
    if options.json is not None:
        options.json.write_text(json.dumps({"request": request, "none": plain, "simm": stored}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
