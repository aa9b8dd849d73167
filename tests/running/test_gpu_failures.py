"""What is said of a device without memory and of one that died: torch's texts, as it writes them."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.running.gpu_failures import describe_gpu_failure, explain_gpu_failure

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 312.00 MiB is "
    "free. Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory 70.10 GiB is "
    "allocated by PyTorch, and 1.25 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
DEAD = (
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/ for "
    "more information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
SEE = "; see nvidia-smi, and dmesg for Xid"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            torch.OutOfMemoryError(FULL.format(own="78.80 GiB")),
            "out of memory on GPU 0: 2.00 GiB needed, 312.00 MiB of 79.11 GiB free",
            id="full",
        ),
        pytest.param(
            RuntimeError("CB worker died during request chat-3: " + FULL.format(own="38.80 GiB")),
            "out of memory on GPU 0: 2.00 GiB needed, 312.00 MiB of 79.11 GiB free, 40.01 GiB held by other processes: "
            "end them (nvidia-smi lists them)",
            id="a-second-process-told-by-a-thread",
        ),
        pytest.param(
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors"),
            "out of memory: CUDA error: out of memory",
            id="driver",
        ),
        pytest.param(
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "out of memory: 4000000000000 bytes needed",
            id="host",
        ),
        pytest.param(MemoryError(), "out of memory: the system gives no more", id="python"),
        pytest.param(
            RuntimeError(DEAD),
            f"the GPU or its driver failed: CUDA error: unspecified launch failure{SEE}",
            id="launch-failure",
        ),
        pytest.param(
            RuntimeError("CUDA driver error: unknown error"),
            f"the GPU or its driver failed: CUDA driver error: unknown error{SEE}",
            id="driver-gone",
        ),
        pytest.param(
            RuntimeError("CUDA error: device-side assert triggered\nCompile with"),
            f"the GPU or its driver failed: CUDA error: device-side assert triggered{SEE}",
            id="assert",
        ),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle)`"),
            "the GPU or its driver failed: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( "
            f"handle)`{SEE}",
            id="library",
        ),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
            f"the GPU or its driver failed: CUDNN_STATUS_EXECUTION_FAILED{SEE}",
            id="cudnn",
        ),
        pytest.param(
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            "out of memory: CUDNN_STATUS_ALLOC_FAILED",
            id="cudnn-full",
        ),
        pytest.param(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), None, id="cudnn-lacks-it"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
            None,
            id="cublas-lacks-it",
        ),
        pytest.param(RuntimeError("CUDA error: invalid argument\nSearch for"), None, id="a-wrong-call"),
        pytest.param(
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            None,
            id="a-wrong-build",
        ),
        pytest.param(RuntimeError("CUDA error: operation not supported"), None, id="an-old-card"),
        pytest.param(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None, id="a-mistake"),
        pytest.param(ValueError("prompt: expected a text"), None, id="a-request"),
    ],
)
def test_a_device_that_failed_is_one_line(error: Exception, said: str | None) -> None:
    if said and said.startswith("out of memory"):
        said = f"{said}; lower x"
    assert describe_gpu_failure(error, remedy="lower x") == said


def test_a_cause_says_what_is_missing() -> None:
    """llm-compressor names no size, and gives advice about its own options instead."""
    error = torch.OutOfMemoryError("Sequential pipeline ran out of memory. Please consider choosing")
    error.__cause__ = torch.OutOfMemoryError(FULL.format(own="78.80 GiB"))
    said = "out of memory on GPU 0: 2.00 GiB needed, 312.00 MiB of 79.11 GiB free; lower x"
    assert describe_gpu_failure(error, remedy="lower x") == said


def test_a_failure_is_explained_with_what_was_worked_on() -> None:
    explaining = explain_gpu_failure("checking", remedy="lower x", error_type=QuantizationError)
    with pytest.raises(QuantizationError) as caught, explaining:
        raise RuntimeError(DEAD)
    assert str(caught.value) == f"checking: the GPU or its driver failed: CUDA error: unspecified launch failure{SEE}"
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_gpu_failure("a batch", remedy="lower it"):
        raise RuntimeError("shapes differ")


def test_a_real_allocation_that_fails_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert str(describe_gpu_failure(caught.value, remedy="")).startswith("out of memory: 1125899906842624 bytes needed")
