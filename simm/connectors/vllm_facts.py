"""Which of vLLM's settings decide what its blocks hold. Engines that differ in one of them share nothing.

A setting that matters and is left out gives wrong tokens. One that is here and does not matter costs hits, and only
between engines that differ in it. So what is in doubt is here. Nothing here imports vLLM.
"""

from __future__ import annotations

import platform
import sys
from typing import Any, Final

from .described import of_environment, of_loader

#: Of vLLM's configurations: what decides what blocks hold, besides the model's name and data type. Of kernels that only
#: round in another way there is nothing. ``max_model_len`` chooses factors of LongRoPE and scales of attention.
MODEL: Final = (
    "quantization_config", "hf_config_path", "config_format", "code_revision", "model_impl", "model_class_overrides",
    "max_model_len",
)  # fmt: skip
MEDIA: Final = (
    "language_model_only", "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method",
    "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
)  # fmt: skip
DRAFT: Final = ("model", "revision", "code_revision", "quantization")
CACHE: Final = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
ATTENTION: Final = (
    "indexer_kv_dtype", "indexer_sparse_logits", "use_non_causal", "use_prefill_query_quantization",
    "disable_flashinfer_q_quantization",
)  # fmt: skip
#: What vLLM's configurations do not tell: variables of its environment. Some decide in which order numbers lie in
#: memory of one form.
VARIABLES: Final = (
    "VLLM_USE_MODELSCOPE", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
)  # fmt: skip
#: Names of one encoding of a KV cache of bytes, that of FP8 with a mantissa of 3 bits on this platform. Workers replace
#: one by another in their copy of the configuration while they load a model with sparse attention, and the scheduler's
#: stays. Where one of them packs numbers in another way, chunks have other shapes.
_E4M3: Final = frozenset(("auto", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"))
#: What FP8 is on most platforms.
_COMMON: Final = "torch.float8_e4m3fn"
#: How adapters are applied. Which one it is, a block's hash says.
ADAPTERS: Final = ("lora_dtype", "target_modules", "enable_tower_connector_lora")


def of_memory(vllm_config: Any) -> dict[str, Any]:
    """Return what else must be equal for two blocks to be interchangeable, without their form."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    facts: dict[str, Any] = {
        "dtype": model.dtype, "quantization": model.quantization, "cache_dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo, "overrides": getattr(model, "hf_overrides", None),
        "draft": [getattr(draft, name, None) for name in DRAFT],
        "draft_cache_dtype": getattr(speculative, "kv_cache_dtype", None) if draft is not None else None,
        "cache_dtype_skip_layers": getattr(cache, "kv_cache_dtype_skip_layers", None), "fp8": _fp8(),
        **of_environment(VARIABLES),
    }  # fmt: skip
    parts = (
        (model, MODEL), (getattr(model, "multimodal_config", None), MEDIA), (cache, CACHE),
        (getattr(vllm_config, "attention_config", None), ATTENTION),
        (getattr(vllm_config, "lora_config", None), ADAPTERS),
    )  # fmt: skip
    for part, names in parts:
        facts |= {name: getattr(part, name, None) for name in names}
    load = getattr(vllm_config, "load_config", None)
    facts["model_loader_extra_config"] = of_loader(getattr(load, "model_loader_extra_config", None))
    if getattr(model, "original_max_model_len", None) == -1:
        # It is made smaller to fit the memory, by another number at each start, but only after the model was loaded for
        # the full one.
        facts["max_model_len"] = "automatic"
    if getattr(load, "load_format", None) == "dummy":
        facts["dummy"] = True  # all other formats load the same weights
    return facts


def of_kernels(vllm_config: Any, layer: str) -> tuple[str, str, str]:
    """Return what decides in which order a layer's numbers lie in a CPU's memory, beside its form.

    It is the processor, the layer's backend and its instruction set: each packs keys and values for its own kernels.
    """
    config = getattr(vllm_config, "compilation_config", None)
    made = (getattr(config, "static_forward_context", None) or {}).get(layer)
    isa = getattr(made, "isa", None)
    return platform.machine(), _backend(made), str(isa) if isa is not None else f"amx {_has_amx()}"


def numbers_of(vllm_config: Any) -> str:
    """Return how a KV cache of bytes keeps its numbers: the data type by vLLM's name, and how FP8 is encoded here.

    All sides of an engine have the same text, see :data:`_E4M3`. Raises AttributeError for another configuration.
    """
    name = vllm_config.cache_config.cache_dtype
    return f"{'fp8' if name in _E4M3 else name}/{_fp8()}"


def uncommon_fp8() -> str:
    """Return how FP8 is encoded here if it is not as on most platforms; "" else, or if it is not known.

    With KV caches of any type some layers may have it, as those of an indexer.
    """
    encoding = _fp8()
    return "" if encoding in (None, _COMMON) else str(encoding)


def _fp8() -> str | None:
    """Return how vLLM encodes numbers of 8 bits on this platform, as some GPUs do it otherwise; None if not known."""
    try:
        return str(sys.modules["vllm.platforms"].current_platform.fp8_dtype())
    except Exception:  # no platform, or none that says so
        return None


def _backend(layer: Any) -> str:
    """Return the name of a layer's attention backend; "" if it is not known."""
    try:
        return str(layer.get_attn_backend().get_name())
    except Exception:  # another vLLM's layer
        return ""


def _has_amx() -> bool | None:
    """Return whether this processor has AMX, by which vLLM chooses an instruction set; None if not known."""
    try:
        return bool(sys.modules["torch"].cpu._is_amx_tile_supported())
    except Exception:  # no torch, or one that does not say so
        return None
