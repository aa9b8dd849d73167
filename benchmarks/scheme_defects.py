"""Does the quantising step refuse its own output when something is wrong with it? A line a scheme and a defect.

Each preset of `kind: quantize`, and an FP8 cache, is made from a checkpoint. Between saving and checking, one thing in
the saved weights is changed: a scale is doubled, a zero point moves by one, a layer is left dense, the stored scale of
an input is doubled, or that of a cache is 1. Zero points are packed eight a word, so eight rows move.

    python -m benchmarks.scheme_defects [--checkpoint models/agent]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.texts import load_calibration_texts
from pipeline.errors import QuantizationError
from pipeline.products.text.optimize import llm_compressor
from pipeline.products.text.optimize.quantize import quantize
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.step_settings import Calibration, KvCache, QuantizeStep

CALIBRATION = Calibration(sources=["prose"], num_samples=16, max_tokens=256, length_exponent=0.0)
LAYER, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn"

Change = Callable[[dict[str, Any]], None]


def main() -> None:
    """Print a table; exit with 1 where a defect passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("models/agent"))
    checkpoint = parser.parse_args().checkpoint
    print("| scheme | defect | what the step says |\n|---|---|---|")
    num_passed = 0
    for name, step in _list_steps().items():
        for defect, change in _list_defects(step, checkpoint).items():
            said = try_defect(checkpoint, step, change)
            num_passed += said is None
            print(f"| {name} | {defect} | {said or 'NOTHING: it passed'} |", flush=True)
    raise SystemExit(1 if num_passed else 0)


def try_defect(checkpoint: Path, step: QuantizeStep, change: Change) -> str | None:
    """Run a step whose saved weights are changed before they are checked; return what it says, None if it passes."""
    from safetensors.torch import load_file, save_file

    save = llm_compressor.save_compressed

    def save_changed(model: Any, folder: Path) -> None:
        save(model, folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with tempfile.TemporaryDirectory() as folder, patch.object(llm_compressor, "save_compressed", save_changed):
        made = Path(folder) / "made"
        try:
            quantize(checkpoint, made, step=step, calibration_set=load_calibration_texts())
        except QuantizationError as error:
            return str(error).replace(f"{made}: ", "")
    return None


def _list_steps() -> dict[str, QuantizeStep]:
    steps = {
        name: QuantizeStep(kind="quantize", scheme=name, calibration=CALIBRATION if scheme.needs_calibration else None)
        for name, scheme in PRESETS.items()
    }
    cache = KvCache(dtype="fp8")
    cached = QuantizeStep(kind="quantize", scheme="FP8_DYNAMIC", kv_cache=cache, calibration=CALIBRATION)
    return steps | {"FP8_DYNAMIC, FP8 cache": cached}


def _list_defects(step: QuantizeStep, checkpoint: Path) -> dict[str, Change]:
    if step.kv_cache is not None:
        return {f"{part} is 1": _set_one(f"{ATTENTION}.{part}") for part in ("k_scale", "v_scale")}
    (scheme,) = step.schemes
    defects: dict[str, Change] = {"a scale x 2": _double_scale, "a layer left dense": _leave_dense(checkpoint)}
    if not scheme.weights.symmetric:
        defects["a zero point + 1"] = _move_zero
    if scheme.needs_calibration:
        defects["an input's scale x 2"] = _double_input
    return defects


def _double_scale(weights: dict[str, Any]) -> None:
    _double(weights[f"{LAYER}.weight_scale"].view(-1), 0)


def _double_input(weights: dict[str, Any]) -> None:
    name = next(name for name in weights if name.startswith(f"{LAYER}.input"))
    _double(weights[name], 0)


def _double(tensor: Any, place: int) -> None:
    import torch

    if tensor.dtype == torch.uint8:  # a power of two, by its exponent
        tensor[place] += 1
    else:
        tensor[place] = (tensor[place].float() * 2).to(tensor.dtype)


def _move_zero(weights: dict[str, Any]) -> None:
    weights[f"{LAYER}.weight_zero_point"] += 0x11111111


def _set_one(name: str) -> Change:
    return lambda weights: weights[name].fill_(1)


def _leave_dense(checkpoint: Path) -> Change:
    from safetensors.torch import load_file

    dense = load_file(checkpoint / "model.safetensors")[f"{LAYER}.weight"]

    def leave(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith(f"{LAYER}.")]:
            del weights[name]
        weights[f"{LAYER}.weight"] = dense

    return leave


if __name__ == "__main__":
    main()
