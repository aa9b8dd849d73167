"""How a loaded model answers many requests at once: its attention, its sizes, the library's config, and their facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.products.text.serving import paged_attention, prefix_cache, varlen_attention
from pipeline.products.text.serving.input_rounding import leaves_the_gpu
from pipeline.products.text.serving.sizing import (
    DeviceFacts,
    EngineSizes,
    choose_sizes,
    count_forward_tokens,
    read_cache_facts,
)
from pipeline.records.serving import ServingConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configs of mixtures call their number
_MEMORY_FIELDS = ("num_blocks", "max_memory_percent")  # how much memory was free: see `sizing`


@dataclass(frozen=True)
class Batching:
    """How one server batches."""

    attention: str  # of the model that generates
    config: Any  # transformers' ContinuousBatchingConfig; None: requests are answered one by one
    max_forward_tokens: int  # of a batch that is scored

    @property
    def facts(self) -> dict[str, Any]:
        """What can change an answer."""
        fields = vars(self.config) if self.config is not None else {}
        plain = {k: v for k, v in fields.items() if isinstance(v, bool | int | float | str | None)}
        return {
            "attention": self.attention,
            "max_forward_tokens": self.max_forward_tokens,
            **{name: value for name, value in plain.items() if name not in _MEMORY_FIELDS},
        }


def plan_batching(
    model: Any, serving: ServingConfig, device: DeviceFacts, *, kv_cache_gib: float | None = None
) -> Batching:
    """Decide how a model is batched.

    Args:
        model: on its device, with the attention of plain generation.
        serving: what was asked for.
        device: of the model.
        kv_cache_gib: size of the cache; None: as much as is useful, and fits.

    Raises:
        EngineError: not even one context fits.
    """
    config = model.config.get_text_config()
    if not serving.continuous_batching:
        return Batching(model.config._attn_implementation, None, count_forward_tokens(device.kind, config.vocab_size))
    usual = {"use_cuda_graph": False} if _leaves_the_gpu(model) else {}
    sizes = choose_sizes(
        device,
        read_cache_facts(config, model.dtype.itemsize),
        concurrency=serving.concurrency,
        context_length=serving.context_length,
        options=usual | serving.options,
        kv_cache_gib=kv_cache_gib,
    )
    attention = choose_attention(model)
    prefix_cache.register()
    return Batching(attention, build_batching_config(sizes, attention, serving.concurrency), sizes.max_forward_tokens)


def _leaves_the_gpu(model: Any) -> bool:
    """Whether a forward pass needs the CPU half way, which no graph can hold.

    Which expert gets how many tokens may be read back. Where inputs are imitated in few bits by compressed-tensors' own
    code, it copies numbers there in each pass.
    """
    config = model.config.get_text_config()
    has_experts = any(getattr(config, name, None) for name in _EXPERTS)
    return has_experts or any(map(leaves_the_gpu, model.modules()))


def choose_attention(model: Any) -> str:
    """Return the attention of a model under continuous batching, which is registered where it is ours.

    The name is never left to the library: it would look for a kernel on the hub.
    """
    plain = model.config._attn_implementation
    if plain == "sdpa" and paged_attention.supports(model.config):
        if model.device.type == "cpu":
            paged_attention.register()
            return paged_attention.NAME
        if varlen_attention.supports(model):
            varlen_attention.register()
            return varlen_attention.NAME
    return f"paged|{plain}"


def build_batching_config(sizes: EngineSizes, attention: str, concurrency: int) -> Any:
    """Return the library's continuous batching config.

    Args:
        sizes: of the server.
        attention: of the model; masks keep batches from overlapping.
        concurrency: requests in flight.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        max_batch_tokens=sizes.max_batch_tokens,
        use_cuda_graph=sizes.use_cuda_graph,
    )
    if sizes.use_cuda_graph:
        # a graph has the logits of as many requests as there may be
        config.max_requests_per_batch = concurrency
        config.use_async_batching = attention == varlen_attention.NAME
    return config
