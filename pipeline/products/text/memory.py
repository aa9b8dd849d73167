"""Will a checkpoint fit in memory? An estimate from file headers, before anything is loaded.

The estimate covers weights, calibration activations, one block's GPTQ Hessians and the interpreter.
It is meant to catch factors, not percents. Disk space and GPU memory are not covered.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.products.text.settings import Calibration, TextProduct, WeightStep
from pipeline.running.hub import locate_checkpoint
from pipeline.running.weight_files import TensorInfo, read_tensors

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROCESS_MIB = 700  # a Python process with torch and transformers imported
_PACKED = (".weight_packed", ".qweight")  # eight INT4 weights in one int32
_LINEARS_PER_BLOCK = 7  # q, k, v, o, gate, up, down: their Hessians live at the same time
_MIB = 1 << 20


@dataclass(frozen=True)
class WeightSizes:
    """What matters about a checkpoint's tensors."""

    num_weights: int  # after unpacking INT4
    max_in_features: int  # the widest input of any two-dimensional weight


@dataclass(frozen=True)
class MemoryNeed:
    """What one activity of one candidate takes at its peak, in MiB."""

    candidate: str
    checkpoint: str
    activity: str  # "serving" or "quantising"
    weights_mib: int
    other_mib: int


def measure_weights(tensors: dict[str, TensorInfo]) -> WeightSizes:
    """Sum up the tensors of a checkpoint as they will be in memory, INT4 unpacked."""
    num_weights = sum(t.num_elements * (8 if name.endswith(_PACKED) else 1) for name, t in tensors.items())
    widths = [t.shape[1] for name, t in tensors.items() if len(t.shape) == 2 and not name.endswith(_PACKED)]
    return WeightSizes(num_weights, max(widths, default=0))


def estimate_needs(product: TextProduct, root: Path) -> list[MemoryNeed]:
    """Estimate what serving and quantising take, for every candidate that is served from a folder."""
    needs = []
    for name, candidate in product.candidates.items():
        if not candidate.engine.is_attached:
            sizes = _measure(candidate.checkpoint, root)
            step = candidate.speculative
            draft = _measure(step.draft, root).num_weights if step and step.draft else 0
            served = WeightSizes(sizes.num_weights + draft, sizes.max_in_features)
            needs.append(_serving_need(name, candidate.checkpoint, served, product))
            needs += [
                _quantising_need(name, candidate.checkpoint, sizes, step.calibration)
                for step in candidate.steps
                if isinstance(step, WeightStep)
            ]
    return needs


def _measure(reference: str, root: Path) -> WeightSizes:
    return measure_weights(read_tensors(locate_checkpoint(reference, root)))


def _serving_need(name: str, checkpoint: str, sizes: WeightSizes, product: TextProduct) -> MemoryNeed:
    # a quarter of the weights again for the key-value cache and one layer's unpacked copy
    num_servers = product.resources.num_servers
    weights = sizes.num_weights * _DTYPE_BYTES[product.serving.dtype] / _MIB
    return MemoryNeed(
        name,
        checkpoint,
        "serving",
        weights_mib=math.ceil(weights * num_servers),
        other_mib=math.ceil((_PROCESS_MIB + weights / 4) * num_servers),
    )


def _quantising_need(name: str, checkpoint: str, sizes: WeightSizes, calibration: Calibration | None) -> MemoryNeed:
    # float32 throughout; each block's inputs and outputs are kept for every calibration token
    tokens = calibration.num_samples * calibration.max_tokens if calibration else 0
    activations = tokens * sizes.max_in_features * 4 * 2
    hessians = _LINEARS_PER_BLOCK * sizes.max_in_features**2 * 4
    return MemoryNeed(
        name,
        checkpoint,
        "quantising",
        weights_mib=math.ceil(sizes.num_weights * 4 / _MIB),
        other_mib=math.ceil((activations + hessians) / _MIB) + _PROCESS_MIB,
    )


def check_needs(needs: list[MemoryNeed], *, total_mib: int, available_mib: int) -> list[str]:
    """Return a warning for each need above what is free now.

    Raises:
        CheckpointError: weights alone exceed the machine's memory, so no retry can help.
    """
    warnings = []
    for need in needs:
        where = f"candidates.{need.candidate} ({need.checkpoint})"
        if need.weights_mib > total_mib:
            raise CheckpointError(
                f"{where}: {need.activity} takes {need.weights_mib:,} MiB for the weights alone and "
                f"this machine has {total_mib:,} MiB; use a larger machine"
            )
        peak = need.weights_mib + need.other_mib
        if peak > available_mib:
            lever = "resources.num_servers" if need.activity == "serving" else "calibration.num_samples"
            warnings.append(
                f"{where}: {need.activity} takes about {peak:,} MiB ({need.weights_mib:,} of them weights) "
                f"and {available_mib:,} MiB are free; it may be killed: close programs, or lower {lever}"
            )
    return warnings


def read_available_mib(total_mib: int, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that is free now in MiB, at most `total_mib`; all of it where the system won't say."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return total_mib
    return min(total_mib, int(match.group(1)) >> 10) if match else total_mib
