"""The resolved configuration of a running vLLM: the part that can change an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.products.text.model_config import read_json
from pipeline.products.text.serving.client import Client
from pipeline.products.text.settings import KERNEL_REPORT
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig

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


async def read_kernels(client: Client, server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernels that the workers of a running vLLM dispatched, where they were extended to say so."""
    config = server_info.get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, Mapping) else None
    if not isinstance(parallel, Mapping) or parallel.get("worker_extension_cls") != KERNEL_REPORT:
        return {}
    reports = (await client.call("/collective_rpc", {"method": "report_kernels"}))["results"]
    alike = all(report == reports[0] for report in reports)
    return {"kernels": reports[0] if alike else {f"worker {i}": report for i, report in enumerate(reports)}}


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


def read_drafts(metrics: str, drafts: SpeculativeConfig) -> SpeculationCounts | None:
    """Return what speculation did since the start, over all requests; None where nothing was drafted.

    Args:
        metrics: the text of `/metrics`.
        drafts: how the server drafts.
    """
    kept = dict(_read_counter(metrics, "spec_decode_num_accepted_tokens_per_pos", by="position"))
    total = {
        name: sum(value for _, value in _read_counter(metrics, name))
        for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "generation_tokens")
    }
    if not total["spec_decode_num_draft_tokens"]:
        return None
    positions = tuple(kept.get(str(place), 0) for place in range(drafts.num_tokens))
    return SpeculationCounts(
        method=drafts.method,
        num_tokens=drafts.num_tokens,
        # each pass gives the tokens that it accepts and one more
        num_target_forwards=max(total["spec_decode_num_drafts"], total["generation_tokens"] - sum(positions)),
        num_completion_tokens=total["generation_tokens"],
        num_drafted=total["spec_decode_num_draft_tokens"],
        accepted_by_position=positions,
    )


def _read_counter(metrics: str, name: str, *, by: str = "") -> Iterator[tuple[str, int]]:
    """Yield the values of a counter of vLLM's, with one of its labels: values of one label are added up."""
    sums: dict[str, int] = {}
    for labels, value in re.findall(rf"^vllm:{name}_total(?:\{{(.*)\}})? (\S+)$", metrics, re.MULTILINE):
        match = re.search(rf'\b{by}="([^"]*)"', labels) if by else None
        key = match.group(1) if match else ""
        sums[key] = sums.get(key, 0) + round(float(value))
    yield from sums.items()
