"""Runs a whole released engine that publishes its KV cache events, and does what it is told. Started by the tests.

    python events_driver.py REQUEST_JSON

Needs what the engine's own driver needs (``whole_driver.py``, ``vllm_whole_driver.py``), whose model and options it
has. A request is ``{"engine": "sglang" or "vllm", "folder": ..., "events": {...}, "options": {...}}``: ``events`` is
the engine's own configuration of its publisher. The first line on stdout is a JSON object with the engine's version.
Then each line of stdin is a command, and each further line of stdout its result: ``{"generate": tokens, "salt": text or
null}`` generates greedily, and says what the engine itself has reported as cached; ``"report": true`` lets vLLM publish
what it has found of the prompt as if it were new. ``{"forget": true}`` resets the engine's cache. The engine is shut
down at the end of stdin. Nothing of it is replaced.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 8


class SGLang:
    """SGLang's engine: its scheduler, which publishes, is a process of its own."""

    def __init__(self, folder: Path, events: dict[str, Any], options: dict[str, Any]) -> None:
        import sglang
        import whole_driver

        self.version = sglang.__version__
        self.engine = sglang.Engine(
            model_path=whole_driver.model(folder, 1), kv_events_config=json.dumps(events), enable_cache_report=True,
            **{**whole_driver.OPTIONS, **options},
        )  # fmt: skip

    def generate(self, tokens: list[int], salt: str | None, report: bool) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer: Any = self.engine.generate(input_ids=tokens, sampling_params=sampling, cache_salt=salt)
        return {"tokens": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]}

    def forget(self) -> bool:
        import whole_driver

        return whole_driver.flush(self.engine, time.monotonic() + whole_driver.STORED_S)

    def shutdown(self) -> None:
        self.engine.shutdown()


class VLLM:
    """vLLM's engine: its scheduler, which publishes, is in this process."""

    def __init__(self, folder: Path, events: dict[str, Any], options: dict[str, Any]) -> None:
        import vllm
        import vllm_whole_driver
        from vllm.config import KVEventsConfig

        self.version = vllm.__version__
        self.llm = vllm.LLM(
            vllm_whole_driver.model(folder, "gpt2", 1), kv_events_config=KVEventsConfig(**events),
            enable_prefix_caching=True, **{**vllm_whole_driver.OPTIONS, **options},
        )  # fmt: skip

    def generate(self, tokens: list[int], salt: str | None, report: bool) -> dict[str, Any]:
        from vllm import SamplingParams

        prompt: Any = {"prompt_token_ids": tokens, **({} if salt is None else {"cache_salt": salt})}
        sampling = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False,
            extra_args={"kv_cache_report_mode": "full"} if report else None,
        )  # fmt: skip
        (answer,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        return {"tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens}

    def forget(self) -> bool:
        return bool(self.llm.llm_engine.engine_core.reset_prefix_cache(False, False))

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


ENGINES: dict[str, Any] = {"sglang": SGLang, "vllm": VLLM}


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[request["engine"]](Path(request["folder"]), request["events"], request["options"])
    try:
        print(json.dumps({"version": engine.version}), file=report, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if "generate" in command:
                result: Any = engine.generate(command["generate"], command["salt"], command["report"])
            else:
                result = engine.forget()
            print(json.dumps(result), file=report, flush=True)
    finally:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
