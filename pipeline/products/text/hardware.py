"""What vLLM does with a scheme on a machine: runs it as asked, leaves inputs alone, or has no kernel.

A look-up by the compute capability of NVIDIA GPUs, for warnings before any work. What ran, the engine itself is asked.
Sources: the pages on FP8, INT8 and INT4 in vLLM's documentation, its pull request 49376 on NVFP4, and for the CPU what
release 0.32 loaded and refused (`python -m benchmarks.scheme_equality --vllm PYTHON`).
Not covered: GPUs of other makers, and mixtures of experts, whose kernels are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.products.text.model_config import SCORE_CAP, find_text, read_config, read_score_cap
from pipeline.products.text.schemes import NumberFormat, Scheme, read_format
from pipeline.products.text.settings import CandidateSettings, TextProduct, VllmEngine
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.running.hub import locate_checkpoint

Capability = tuple[int, int]  # of an NVIDIA GPU, such as (9, 0)

RUNS, FALLS_BACK, NO_KERNEL = "runs as asked", "leaves inputs as they are", "has no kernel"
_TURING, _ADA, _HOPPER, _BLACKWELL = (7, 5), (8, 9), (9, 0), (10, 0)


def predict_run(scheme: Scheme, gpu: Capability | None) -> str:
    """Return what vLLM does with a scheme: `RUNS`, `FALLS_BACK` or `NO_KERNEL`.

    Args:
        scheme: of a linear layer.
        gpu: the compute capability; None: an x86 CPU.
    """
    inputs, weights = scheme.input_activations, scheme.weights
    if gpu is None:
        return RUNS if _runs_on_cpu(weights, inputs) else NO_KERNEL
    if gpu < _TURING:
        return NO_KERNEL
    if inputs is None:
        return RUNS
    if inputs.type == "int":
        return RUNS if weights.num_bits == 8 and gpu < _BLACKWELL else NO_KERNEL
    if weights.type == "int":
        return RUNS if gpu == _HOPPER else NO_KERNEL
    return RUNS if gpu >= (_BLACKWELL if inputs.scale_dtype else _ADA) else FALLS_BACK


def _runs_on_cpu(weights: NumberFormat, inputs: NumberFormat | None) -> bool:
    """Whether vLLM runs it on x86: integers with integer inputs, four bits alone, 8-bit floats with a scale a row."""
    if inputs is None:
        return weights.type == "int" and weights.num_bits == 4
    if weights.type != inputs.type:
        return False
    return weights.type == "int" or (weights.num_bits == 8 and weights.strategy == "channel")


def check_ranks(product: TextProduct, num_gpus: int) -> None:
    """Refuse a step that more ranks share than there are GPUs, or that ranks can't share without one.

    Raises:
        SettingsError: with the path of the key.
    """
    for name, candidate in product.candidates.items():
        for i, step in enumerate(candidate.steps):
            if not isinstance(step, QuantizeStep) or step.world_size == 1:
                continue
            where = f"candidates.{name}.steps.{i}.world_size"
            if num_gpus and step.world_size > num_gpus:
                raise SettingsError(f"{where}: expected at most {num_gpus}, one rank a GPU, got {step.world_size}")
            # ranks on a CPU share the weights, and each would move the scales
            if not num_gpus and (step.algorithm == "awq" or step.smoothing_strength is not None):
                raise SettingsError(
                    f"{where}: expected 1, as llm-compressor shares AWQ and SmoothQuant among GPUs alone, got "
                    f"{step.world_size} without a GPU; lower it"
                )


def warn_of_fallbacks(product: TextProduct, root: Path, gpus: tuple[Capability, ...]) -> list[str]:
    """Return what vLLM will not run as asked on this machine, or at all, a line a candidate.

    Args:
        product: settings.
        root: the project root, which checkpoints are relative to.
        gpus: of this machine; none: its CPU serves.
    """
    place = f"compute capability {'.'.join(map(str, min(gpus)))}" if gpus else "a CPU"
    lines = []
    for name, candidate in product.candidates.items():
        if not isinstance(candidate.engine, VllmEngine):
            continue
        runs = {s.name: predict_run(s, min(gpus) if gpus else None) for s in _list_schemes(candidate, root)}
        lines += [
            f"candidates.{name}: vLLM {run} for {scheme} on {place}; what is measured here is not what other "
            "hardware would run"
            for scheme, run in runs.items()
            if run != RUNS
        ]
    return lines


def warn_of_score_caps(product: TextProduct, root: Path) -> list[str]:
    """Return a line on candidates of which the embedded engine leaves out the cap on attention scores, if any."""
    capped = [
        name
        for name, candidate in product.candidates.items()
        if candidate.engine.is_embedded
        and read_score_cap(find_text(read_config(locate_checkpoint(candidate.checkpoint, root))))
    ]
    if not capped:
        return []
    return [
        f"{', '.join(capped)}: the embedded engine leaves out {SCORE_CAP} of config.json, as transformers does by "
        "default; where the engine that ships applies it, as vLLM does, name that one"
    ]


def _list_schemes(candidate: CandidateSettings, root: Path) -> Iterator[Scheme]:
    """Yield the schemes of a candidate: of its step, or of the checkpoint that came quantised."""
    steps = [step for step in candidate.steps if isinstance(step, QuantizeStep)]
    for step in steps:
        yield from step.schemes
    if steps:
        return
    settings = read_config(locate_checkpoint(candidate.checkpoint, root)).get("quantization_config") or {}
    for group in (settings.get("config_groups") or {}).values():
        inputs = read_format(group["input_activations"]) if group.get("input_activations") else None
        if group.get("weights"):
            yield Scheme.model_construct(weights=read_format(group["weights"]), input_activations=inputs)
