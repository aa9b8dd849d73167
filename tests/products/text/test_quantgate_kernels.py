"""What vLLM's workers say of the kernels that they dispatched."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from pipeline.products.text.serving.vllm_worker.quantgate_kernels import KernelReport, count_kernels
from tests.paths import ROOT

FOLDER = ROOT / "pipeline/products/text/serving/vllm_worker"


def make(name: str, module: str = "vllm.model_executor.kernels.linear.marlin", **attributes: Any) -> Any:
    """Return an object of a class of this name, as vLLM's module defines it."""
    kind = type(name, (SimpleNamespace,), {"__module__": module})
    return kind(**attributes)


SCHEME = make("CompressedTensorsWNA16", "vllm.x", kernel=make("MacheteLinearKernel"), bits=4)
PACKED = make(
    "QKVParallelLinear", "vllm.x", quant_method=make("CompressedTensorsLinearMethod", "vllm.x"), scheme=SCHEME
)
FP8_METHOD = make("Fp8PerTensorOnlineLinearMethod", "vllm.x", fp8_linear=make("CutlassFP8ScaledMMLinearKernel"))
HEAD = make("ParallelLMHead", "vllm.x", quant_method=make("UnquantizedEmbeddingMethod", "vllm.x"))
FLASH = make("FlashAttentionImpl", "vllm.x", vllm_flash_attn_version=3)
CACHE_METHOD = make("Fp8KVCacheMethod", "vllm.x")
ATTENTION = make("Attention", "vllm.x", impl=FLASH, attn_backend=object(), quant_method=CACHE_METHOD)


def test_layers_are_counted_by_the_kernel_that_runs_them() -> None:
    fp8 = make("RowParallelLinear", "vllm.x", quant_method=FP8_METHOD)
    modules = [PACKED, PACKED, fp8, HEAD, ATTENTION, make("RMSNorm", "vllm.x")]
    assert count_kernels((str(i), module) for i, module in enumerate(modules)) == {
        "Attention": {"FlashAttentionImpl 3": 1},
        "ParallelLMHead": {"UnquantizedEmbeddingMethod": 1},
        "QKVParallelLinear": {"CompressedTensorsWNA16 MacheteLinearKernel": 2},
        "RowParallelLinear": {"Fp8PerTensorOnlineLinearMethod CutlassFP8ScaledMMLinearKernel": 1},
    }


def test_a_cache_of_few_bits_is_named_by_what_its_layers_store() -> None:
    """vLLM's configuration says "auto" where the checkpoint asks for one: a cache that was stored so was refused."""
    layers = [make("Attention", "vllm.x", impl=FLASH, attn_backend=object(), kv_cache_dtype=d) for d in ("fp8", "auto")]
    assert count_kernels((str(i), module) for i, module in enumerate(layers)) == {
        "Attention": {"FlashAttentionImpl 3 cache_dtype=fp8": 1, "FlashAttentionImpl 3": 1}
    }


def test_a_draft_model_is_told_apart() -> None:
    class Worker(KernelReport):
        def get_model(self) -> Any:
            return SimpleNamespace(named_modules=lambda: [("a", PACKED)])

        def get_draft_model(self) -> Any:
            return SimpleNamespace(named_modules=lambda: [("a", HEAD)])

    assert list(Worker().report_kernels()) == ["QKVParallelLinear", "draft ParallelLMHead"]


def test_it_needs_nothing_of_this_project() -> None:
    code = "import sys; import quantgate_kernels; assert not any(m.startswith('pipeline') for m in sys.modules)"
    subprocess.run([sys.executable, "-S", "-c", code], cwd="/", env={"PYTHONPATH": str(FOLDER)}, check=True)
