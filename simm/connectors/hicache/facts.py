"""Which of SGLang's settings decide what its pages hold. Engines that differ in one of them share nothing.

A setting that matters and is left out here gives wrong tokens. One that is here and does not matter costs hits, and
only between engines that differ in it. So what is in doubt is here. What an engine chooses for speed alone is not:
backends of kernels, graphs, and formats that load the same weights in another way.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..described import of_loader

#: Returns settings of the engine by name, as ``served_NAME``; nothing if they are not known.
Served = Callable[..., dict[str, Any]]

#: Which weights the model runs with, besides its name, and how. A hook may change what a layer returns.
_WEIGHTS: Final = (
    "quantization", "modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile",
    "kt_method", "kt_weight_path", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token",
    "json_model_override_args", "decrypted_config_file", "model_impl", "mm_process_config",
    "enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision", "forward_hooks",
    "enable_precise_embedding_interpolation",
)  # fmt: skip
#: How a page's numbers are kept.
_NUMBERS: Final = (
    "dtype", "kv_cache_dtype", "mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer",
)  # fmt: skip
#: What SGLang turns on by itself where it can, so that its arguments do not tell it: which tokens' states pages have.
RESOLVED: Final = ("enable_decoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay")
#: Where SGLang says how numbers of 8 bits are encoded on this GPU, in 0.5.23 and before. Pools name the memory's type,
#: which is the same for all encodings.
_KERNELS: Final = ("sglang.kernels.ops.quantization.fp8_kernel", "sglang.srt.layers.quantization.fp8_kernel")
#: What a draft model's pages hold.
_DRAFT: Final = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_window_size",
    "speculative_draft_sink_size", "decrypted_draft_config_file", "uno_lora_path",
)  # fmt: skip


def of_weights(served: Served) -> dict[str, Any]:
    """Return what tells a model of one name from another one, but for its path and revision."""
    known = served(*_WEIGHTS)
    loader = served("model_loader_extra_config")
    known |= {name: of_loader(value) for name, value in loader.items()}
    if served("load_format").get("served_load_format") == "dummy":
        known["dummy"] = True  # all other formats load the same weights
    return known


def of_numbers(served: Served) -> dict[str, Any]:
    """Return how numbers are kept. Scales of an FP8 pool by the contents of their file, or its path if it is not read.

    Two hosts may have other files under one path, or the same file under two. They may have GPUs that encode FP8 in
    different ways, too.
    """
    known: dict[str, Any] = {**served(*_NUMBERS), **served(*RESOLVED), "fp8": _fp8()}
    path = served("quantization_param_path").get("served_quantization_param_path")
    if path:
        try:
            known["kv_scales"] = hashlib.blake2b(Path(path).read_bytes(), digest_size=12).hexdigest()
        except OSError:
            known["kv_scales"] = str(path)
    return known


def of_draft(served: Served) -> dict[str, Any]:
    """Return which draft model there is, if any."""
    return served(*_DRAFT)


def _fp8() -> str | None:
    """Return how SGLang encodes numbers of 8 bits in this process; None where it has no such numbers."""
    for name in _KERNELS:
        dtype = getattr(sys.modules.get(name), "fp8_dtype", None)
        if dtype is not None:
            return str(dtype)
    return None
