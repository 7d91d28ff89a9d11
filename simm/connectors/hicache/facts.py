"""Which of SGLang's settings decide what its pages hold. Engines that differ in one of them share nothing.

A setting that matters and is left out here gives wrong tokens. One that is here and does not matter costs hits, and
only between engines that differ in it. So what is in doubt is here. What an engine chooses for speed alone is not:
backends of kernels, graphs, and formats that load the same weights in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from ..described import contents_of, of_environment, of_loader

#: Returns settings of the engine by name, as ``served_NAME``; nothing if they are not known.
Served = Callable[..., dict[str, Any]]

#: Which weights the model runs with, besides its name, and how. A hook may change what a layer returns.
_WEIGHTS: Final = (
    "quantization", "modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile",
    "kt_method", "kt_weight_path", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token",
    "json_model_override_args", "decrypted_config_file", "model_impl", "mm_process_config",
    "enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision", "forward_hooks",
    "enable_precise_embedding_interpolation", "rl_on_policy_target", "enable_deterministic_inference",
    "model_config_parser", "context_length",
)  # fmt: skip
#: The same, of what SGLang's arguments do not tell: variables of its environment.
WEIGHTS_VARIABLES: Final = (
    "SGLANG_USE_MODELSCOPE", "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_MODEL_ARCH",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "SGLANG_FP8_IGNORED_LAYERS", "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG", "SGLANG_HUMMING_INPUT_QUANT_CONFIG", "SGLANG_CPU_QUANTIZATION",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN", "SGLANG_DSV4_FP4_EXPERTS", "SGLANG_QUANT_ALLOW_DOWNCASTING",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
)  # fmt: skip
#: How a page's numbers are kept.
_NUMBERS: Final = (
    "dtype", "kv_cache_dtype", "mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer",
)  # fmt: skip
#: The same, and in which order numbers lie in memory of one form: variables of SGLang's environment. Pages are copies
#: of the device's memory, and some kernels shuffle it for themselves.
NUMBERS_VARIABLES: Final = (
    "SGLANG_USE_HND_KVCACHE", "SGLANG_USE_AITER", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
    "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS", "SGLANG_DSV4_KV_LAYOUT", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
    "SGLANG_DSV4_UNIFIED_KV_FP8", "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE", "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
    "SGLANG_HIP_DSV41_INDEX_K_PAGE8", "SGLANG_OPT_USE_ONLINE_COMPRESS", "SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
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
    known = {**served(*_WEIGHTS), **of_environment(WEIGHTS_VARIABLES)}
    loader = served("model_loader_extra_config")
    known |= {name: of_loader(value) for name, value in loader.items()}
    if served("load_format").get("served_load_format") == "dummy":
        known["dummy"] = True  # all other formats load the same weights
    return known


def of_numbers(served: Served) -> dict[str, Any]:
    """Return how numbers are kept. Scales of an FP8 pool by the contents of their file, or its path if it is not read.

    Two hosts may have GPUs that encode FP8 in different ways, or for which kernels keep numbers in another order.
    """
    known: dict[str, Any] = {
        **served(*_NUMBERS), **served(*RESOLVED), **of_environment(NUMBERS_VARIABLES), "fp8": _fp8(), "hip": _hip(),
    }  # fmt: skip
    path = served("quantization_param_path").get("served_quantization_param_path")
    if path:
        known["kv_scales"] = contents_of(str(path))
    return known


def of_draft(served: Served) -> dict[str, Any]:
    """Return which draft model there is, if any."""
    known = served(*_DRAFT)
    if served("speculative_draft_load_format").get("served_speculative_draft_load_format") == "dummy":
        known["draft_dummy"] = True  # all other formats load the same weights
    return known


def _fp8() -> str | None:
    """Return how SGLang encodes numbers of 8 bits in this process; None where it has no such numbers."""
    for name in _KERNELS:
        dtype = getattr(sys.modules.get(name), "fp8_dtype", None)
        if dtype is not None:
            return str(dtype)
    return None


def _hip() -> bool:
    """Return whether SGLang's kernels in this process are those for AMD's GPUs."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return getattr(version, "hip", None) is not None
