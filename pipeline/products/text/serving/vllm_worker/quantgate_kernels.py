"""What vLLM's workers are extended with (`--worker-extension-cls`): they say which kernels they dispatched.

Runs in vLLM's own environment: the standard library only, and nothing of this project.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_KERNELS = ("vllm.model_executor.kernels.", "vllm.model_executor.layers.fused_moe.")  # where their classes are defined


class KernelReport:
    """A base class that vLLM adds to its worker's."""

    def report_kernels(self) -> dict[str, dict[str, int]]:
        """Return the kernels of the loaded model, and of its draft model as "draft ...", by class of layer."""
        worker: Any = self
        drafts = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
        return count_kernels(worker.get_model().named_modules()) | {
            f"draft {layer}": kernels
            for layer, kernels in count_kernels(drafts.named_modules() if drafts else ()).items()
        }


def count_kernels(modules: Iterable[tuple[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the layers that run each kernel: class of layer -> kernel -> number; layers without a choice are left out.

    Args:
        modules: of a model, with their names.
    """
    counts: dict[str, Counter[str]] = {}
    for _, module in modules:
        if kernel := _name_attention(module) or _name_linear(module):  # attention may have a method for its cache
            counts.setdefault(type(module).__name__, Counter())[kernel] += 1
    return {layer: dict(sorted(kernels.items())) for layer, kernels in sorted(counts.items())}


def _name_linear(module: Any) -> str:
    """Return the scheme of a layer's weights, and the kernels that compute with them."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    scheme = getattr(module, "scheme", None) or method
    return " ".join(dict.fromkeys([type(scheme).__name__, *_find_kernels(scheme), *_find_kernels(method)]))


def _find_kernels(owner: Any) -> list[str]:
    attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
    kinds = [type(value) for value in attributes.values()]
    return sorted(kind.__name__ for kind in kinds if kind.__module__.startswith(_KERNELS) and "Kernel" in kind.__name__)


def _name_attention(module: Any) -> str:
    """Return the backend of an attention layer, with the version of FlashAttention where there are several.

    Also how it stores keys and values where the checkpoint says so: vLLM's own configuration still says "auto" then.
    """
    implementation = getattr(module, "impl", None)
    if implementation is None or not hasattr(module, "attn_backend"):
        return ""
    version = getattr(implementation, "vllm_flash_attn_version", None)
    cache = getattr(module, "kv_cache_dtype", "auto")
    name = type(implementation).__name__ + (f" {version}" if version is not None else "")
    return name + (f" cache_dtype={cache}" if cache != "auto" else "")
