"""The resolved configuration of a running vLLM: the part that can change an answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.products.text.checkpoints import read_json

_SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_RESOLVED = {
    "model_config": (
        "dtype",
        "max_model_len",
        "quantization",
        "seed",
        "enforce_eager",
        "logprobs_mode",
        "override_generation_config",
    ),
    "cache_config": ("block_size", "cache_dtype", "enable_prefix_caching"),
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ),
    "speculative_config": (
        "method",
        "num_speculative_tokens",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "rejection_sample_method",
        "draft_sample_method",
        "quantization",
        "kv_cache_dtype",
        "use_heterogeneous_vocab",
    ),
    "attention_config": ("backend",),
    "kernel_config": ("linear_backend", "moe_backend"),
    "compilation_config": ("mode", "cudagraph_mode"),
    "device_config": ("device",),
}


def read_resolved(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's resolved configuration, "section.key" -> value; empty where the server does not state it."""
    config = server_info.get("vllm_config")
    if not isinstance(config, Mapping):
        return {}
    return {
        f"{section}.{key}": values[key]
        for section, keys in _RESOLVED.items()
        if isinstance(values := config.get(section), Mapping)
        for key in keys
        if key in values
    }


def read_sampling(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that apply to a request which does not set them.

    vLLM takes them from the checkpoint's generation_config.json unless `generation-config` says otherwise.

    Args:
        folder: the checkpoint.
        options: of `vllm serve`.
    """
    path = folder / "generation_config.json"
    source = options.get("generation-config", "auto")
    generation_config = read_json(path) if source == "auto" and path.is_file() else {}
    merged = {**generation_config, **(options.get("override-generation-config") or {})}
    return {"source": source} | {key: merged[key] for key in _SAMPLING if key in merged}
