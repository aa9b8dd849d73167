"""The step that stores the linear layers of a U-Net or transformer in 8 bits, as diffusers does it with torchao.

diffusers' own `TorchAoConfig` quantises while it loads, and its `save_pretrained` writes what came of it: tensors in
safetensors, and in config.json the config by which any diffusers loads them. So a candidate is a pipeline folder as
any other. What was written is read back and proved (`quantize_proof.py`).

Linear layers alone are covered, because diffusers quantises no other: convolutions keep the number format `dtype`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import CheckpointError
from pipeline.products.images.folders import find_weights, read_index
from pipeline.products.images.linear_layers import choose_layers
from pipeline.products.images.quantize_proof import prove_quantized
from pipeline.products.images.results import StepResult
from pipeline.products.images.settings import QuantizeStep
from pipeline.records.serving import PipelineServing

_CONFIG = "config.json"
_ONE_FILE = "1000GB"  # larger than any part


def run_quantize(folder: Path, serving: PipelineServing, *, step: QuantizeStep) -> StepResult:
    """Rewrite a part of a pipeline folder; the record holds what it saved and how far weights moved.

    Args:
        folder: the candidate's own copy.
        serving: so far.
        step: part, scheme, the format of everything else, and what is left out.

    Raises:
        SettingsError: a pattern matches no linear layer, or none is left.
        CheckpointError: what was written is not the source, quantised as it was asked.
    """
    part, made = folder / step.part, folder / f".{step.part}.new"
    name = str(read_index(folder)[step.part][1])
    layers = _list_linear(name, part)
    asked = choose_layers(layers, step.exclude)
    _write(name, part, made, step, [layer for layer in layers if layer not in set(asked)])
    proof = prove_quantized(made, part, step, asked, layers)
    check_loads(name, made, step, asked)
    shutil.rmtree(part)
    made.rename(part)
    return StepResult(serving.model_copy(update={"unet_dtype": step.dtype}), proof.record, coverage=proof.coverage)


def _list_linear(name: str, part: Path) -> list[str]:
    """Return the linear layers of a part, by its class and config alone."""
    import diffusers

    # it warns that INT8 beside other formats than bfloat16 is not supported; what comes of it is proved here
    diffusers.utils.logging.set_verbosity_error()

    made_by = getattr(diffusers, name)
    with torch.device("meta"):
        module = made_by.from_config(made_by.load_config(part))
    return [layer for layer, child in module.named_modules() if isinstance(child, nn.Linear)]


def _write(name: str, part: Path, made: Path, step: QuantizeStep, excluded: list[str]) -> None:
    """Quantise a part and save it, byte for byte the same each time."""
    import diffusers
    from torchao import quantization

    config = diffusers.TorchAoConfig(getattr(quantization, step.scheme)(), modules_to_not_convert=excluded)
    dtype = getattr(torch, step.dtype)
    module = getattr(diffusers, name).from_pretrained(
        part, quantization_config=config, torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    module.save_pretrained(made, safe_serialization=True, max_shard_size=_ONE_FILE)
    sort_header(find_weights(made))
    path = made / _CONFIG
    written = json.loads(path.read_text(encoding="utf-8"))
    written.pop("_name_or_path", None)  # where it lay while it was made
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def sort_header(path: Path) -> None:
    """Sort the metadata of a safetensors file, which the library writes in another order each time."""
    made = path.with_suffix(".sorted")
    with path.open("rb") as source, made.open("wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target)
    made.replace(path)


def check_loads(name: str, made: Path, step: QuantizeStep, asked: list[str]) -> None:
    """Refuse what plain diffusers does not load as it was asked.

    Raises:
        CheckpointError: names the layer that is of another kind.
    """
    import diffusers
    from torchao.utils import TorchAOBaseTensor

    module = getattr(diffusers, name).from_pretrained(
        made, torch_dtype=getattr(torch, step.dtype), use_safetensors=True, local_files_only=True
    )
    for layer in asked:
        weight: Any = module.get_submodule(layer).weight
        if not isinstance(weight, TorchAOBaseTensor):
            raise CheckpointError(f"{made}: {layer}: expected {step.scheme} as diffusers loads it, found float weights")
        if rounds_inputs(weight) != step.rounds_inputs:
            asks, came = ("rounds inputs", "leaves them") if step.rounds_inputs else ("leaves inputs", "rounds them")
            raise CheckpointError(f"{made}: {layer}: expected {step.scheme}, which {asks}, found one that {came}")


def rounds_inputs(weight: Any) -> bool:
    """Say whether a layer with this weight rounds its inputs while it runs."""
    return getattr(weight, "act_quant_kwargs", None) is not None
