"""Which of vLLM's settings decide what its blocks hold. Engines that differ in one of them share nothing.

A setting that matters and is left out gives wrong tokens. One that is here and does not matter costs hits, and only
between engines that differ in it. So what is in doubt is here. Nothing here imports vLLM.
"""

from __future__ import annotations

from typing import Any, Final

#: Of vLLM's configurations of models: what decides what blocks hold, besides name and data type.
MODEL: Final = ("quantization_config", "hf_config_path", "code_revision", "model_impl", "language_model_only")
MEDIA: Final = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
DRAFT: Final = ("model", "revision", "quantization")


def of_memory(vllm_config: Any) -> dict[str, Any]:
    """Return what else must be equal for two blocks to be interchangeable, without their form."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    facts = {
        "dtype": model.dtype, "quantization": model.quantization, "cache_dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo, "overrides": getattr(model, "hf_overrides", None),
        "draft": [getattr(draft, name, None) for name in DRAFT],
        "draft_cache_dtype": getattr(speculative, "kv_cache_dtype", None) if draft is not None else None,
        "cache_dtype_skip_layers": getattr(cache, "kv_cache_dtype_skip_layers", None),
    }  # fmt: skip
    facts |= {name: getattr(model, name, None) for name in MODEL}
    media = getattr(model, "multimodal_config", None)
    facts |= {name: getattr(media, name, None) for name in MEDIA}
    if getattr(getattr(vllm_config, "load_config", None), "load_format", None) == "dummy":
        facts["dummy"] = True  # all other formats load the same weights
    return facts
