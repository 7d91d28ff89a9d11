"""Runs the whole released SGLang engine with a small model on a CPU. Started by the tests, as a process.

    python whole_driver.py REQUEST_JSON

Needs what ``scripts/engine-env --whole`` prints, and the repository, ``shim/`` and ``plugin/``, on PYTHONPATH. A
request is ``{"folder": ..., "weights": seed, "kind": "gpt2" or "opt", "layers": 2, "options": {...}, "storage":
tokens}``: the model is made from the seed, the options are those of ``sgl.Engine``. Each prompt is generated greedily;
then the engine's own caches are flushed and all are generated again, until ``storage`` tokens of each come out of the
storage backend, or once if that is 0. The only line on stdout is a JSON object: ``first`` and ``last`` have the tokens,
their log-probabilities and where the prompt's tokens came from.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 400, 8, 512
#: Seconds until pages that do not come back end the run. Not a speed limit: storing them is a matter of milliseconds.
STORED_S = 120.0
#: Of ``sgl.Engine``, for a CPU.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_overlap_schedule": True, "dtype": "float32",
    "max_total_tokens": 4096, "page_size": 16, "random_seed": 1, "chunked_prefill_size": -1, "log_level": "info",
    "mem_fraction_static": 0.9,  # a ceiling, as other programs take memory while the engine starts
}  # fmt: skip


def model(folder: Path, seed: int, kind: str = "gpt2", layers: int = 2) -> str:
    """Return the folder of a model of this kind with random weights, made once.

    SGLang's GPT-2 fails with more than one rank: it stores the heads of all in each (``num_kv_heads=total_num_heads``).
    Its OPT does not.
    """
    where = folder / f"{kind}-{layers}-{seed}"
    if not (where / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(seed)
        # Large weights, so that what a token attends to decides on the next one.
        few: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        made: Any
        if kind == "opt":
            made = transformers.OPTForCausalLM(transformers.OPTConfig(
                hidden_size=128, word_embed_proj_dim=128, ffn_dim=256, num_hidden_layers=layers, num_attention_heads=2,
                max_position_embeddings=1024, init_std=0.3, **few,
            ))  # fmt: skip
        else:
            made = transformers.GPT2LMHeadModel(transformers.GPT2Config(
                n_positions=1024, n_embd=128, n_layer=layers, n_head=2, initializer_range=0.3, **few,
            ))  # fmt: skip
        made.to(torch.float32).save_pretrained(where)
    return str(where)


def prompts() -> list[list[int]]:
    dice = random.Random(20_261_123)
    return [[dice.randrange(1, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(2)]


def generate(engine: Any) -> list[dict[str, Any]]:
    """Generate for each prompt, one after the other."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    made = []
    for prompt in prompts():
        answer = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)
        meta = answer["meta_info"]
        made.append({
            "tokens": answer["output_ids"], "logprobs": [each[0] for each in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"], **(meta.get("cached_tokens_details") or {}),
        })  # fmt: skip
    return made


def flush(engine: Any, until: float) -> bool:
    """Empty the engine's own caches, which it refuses while something is on its way. Return whether it did."""
    while not engine.flush_cache().success:
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang

    engine = sglang.Engine(
        model_path=model(Path(request["folder"]), request["weights"], request["kind"], request["layers"]), **OPTIONS,
        **request["options"],
    )
    try:
        first = generate(engine)
        until = time.monotonic() + STORED_S
        while True:
            flush(engine, until)
            last = generate(engine)
            if all(each.get("storage", 0) >= request["storage"] for each in last) or time.monotonic() > until:
                break
    finally:
        engine.shutdown()
    print(json.dumps({"sglang": sglang.__version__, "first": first, "last": last}), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
