"""Load a checkpoint's weights and its tokenizer with plain transformers, where memory and kernels allow it.

So does the embedded engine: what is refused here could not be served either. Not covered: models that bring code of
their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.errors import CheckpointError
from pipeline.products.text.footprint import count_load_bytes
from pipeline.products.text.model_config import CONFIG_FILE, detect_format, read_config, show_error
from pipeline.running.environment import count_memory_mib, read_available_mib
from pipeline.running.gpu_failures import describe_gpu_failure
from pipeline.running.weight_files import read_tensors


def load_model(folder: Path, *, dtype: str, device: str | None = None) -> Any:
    """Load a checkpoint with plain transformers, in eval mode, and refuse incomplete weights.

    Args:
        folder: a checkpoint in one of `FORMATS`.
        dtype: "float32", "bfloat16", "float16", or "auto" for the stored one.
        device: such as "cuda:0": weights go there file by file, without a copy in the host's memory. None: the CPU.

    Raises:
        CheckpointError: it does not fit in memory, a kernel package is missing, or transformers refuses it. Or a
            tensor is missing or has another shape than config.json says.
    """
    check_memory(folder, dtype=dtype, available_bytes=read_free_bytes(device) if device else None)
    check_kernels(folder)
    from transformers import AutoModelForCausalLM

    try:
        with hide_progress_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map=None if device is None else {"": device},
                local_files_only=True,
                trust_remote_code=False,  # without it transformers asks at the terminal
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below; its own error only points at a table on stderr
            )
    except Exception as error:  # a model that it knows in part fails in any way
        if problem := describe_gpu_failure(error, remedy="use a smaller dtype or a larger machine"):
            raise CheckpointError(f"{folder}: while it was loaded: {problem}") from error
        raise CheckpointError(f"{folder}: transformers can't load it: {show_error(error)}") from error
    for problem in ("missing", "mismatched", "unexpected"):
        # transformers fills missing tensors with random numbers and only logs it
        # a mismatched key comes with its two shapes
        if keys := sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get(f"{problem}_keys") or ()):
            raise CheckpointError(
                f"{folder}: {len(keys)} {problem} tensors, such as {keys[0]!r}; weights and {CONFIG_FILE} "
                "do not belong together"
            )
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Load a checkpoint's tokenizer with plain transformers."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files surface as bare Exception from the tokenizer library
        raise CheckpointError(f"{folder}: transformers can't load the tokenizer: {show_error(error)}") from error


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Keep the progress bars of transformers and compressed-tensors out of logs."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    make = tqdm.__init__

    def make_hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs | {"disable": True})

    with patch.object(tqdm, "__init__", make_hidden):
        yield


def check_kernels(folder: Path) -> None:
    """Refuse a format whose kernels are in a package that is not installed, and say which."""
    config = read_config(folder)
    method = detect_format(folder, config, read_tensors(folder))
    if method not in ("gptq", "awq") or importlib.util.find_spec("gptqmodel"):
        return
    other = ", or convert it with compressed_tensors' AutoAWQ converter" if method == "awq" else ""
    raise CheckpointError(
        f"{folder}: {method!r} weights need the package gptqmodel, which is not installed; "
        f"`pip install gptqmodel==7.6.0 optimum==2.3.0`{other}"
    )


def check_memory(folder: Path, *, dtype: str, available_bytes: int | None = None) -> None:
    """Refuse a checkpoint whose weights alone would not fit in the memory that is free.

    Args:
        folder: the checkpoint.
        dtype: the number format that it would be loaded in.
        available_bytes: free memory; None asks the operating system.
    """
    needed = estimate_load_bytes(folder, dtype=dtype)
    free = read_free_bytes("cpu") if available_bytes is None else available_bytes
    if needed > free:
        raise CheckpointError(
            f"{folder}: its weights need {needed / 2**30:.2f} GiB in {dtype}, only {free / 2**30:.2f} GiB are free; "
            "use a smaller dtype or a larger machine"
        )


def estimate_load_bytes(folder: Path, *, dtype: str) -> int:
    """Estimate the memory that the loaded weights take, in bytes, without loading them.

    Packed weights count as unpacked, because transformers unpacks compressed-tensors.

    Args:
        folder: the checkpoint.
        dtype: "float32", "bfloat16", "float16", or "auto" for the stored one.
    """
    return count_load_bytes(read_tensors(folder), read_config(folder), dtype=dtype)


def read_free_bytes(device: str) -> int:
    """Return the memory in bytes that is free on a device of torch: "cpu", or a GPU."""
    if device == "cpu":
        return read_available_mib(count_memory_mib()) << 20
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
