"""Defects of weights and of what lies beside them in a checkpoint's folder, as a quantiser's bug would leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file

BLOCK = "model.layers.1"  # the middle one of three
LAYER = f"{BLOCK}.mlp.down_proj"
BITS = 4
Tensors = dict[str, Any]


def edit_tensors(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    """Return what changes the tensors of a checkpoint's folder."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def shift_values(tensors: Tensors) -> None:
    """Read one layer with a zero-point that is off by one."""
    _edit_values(tensors, LAYER, lambda values: values + 1)


def stretch_scale(tensors: Tensors) -> None:
    """Multiply the scale of one layer's first group by 1.5."""
    tensors[f"{LAYER}.weight_scale"][0, 0] *= 1.5


def drop_bit(tensors: Tensors) -> None:
    """Leave every layer of one block 3 bits: every other value of the 16."""
    for name in [name for name in tensors if name.startswith(BLOCK) and name.endswith(".weight_packed")]:
        _edit_values(tensors, name.removesuffix(".weight_packed"), lambda values: 2 * torch.round(values / 2))


def _edit_values(tensors: Tensors, layer: str, change: Callable[[Any], Any]) -> None:
    shape = torch.Size(tensors[f"{layer}.weight_shape"].tolist())
    values = unpack_from_int32(tensors[f"{layer}.weight_packed"], BITS, shape)
    half = 2 ** (BITS - 1)
    changed = change(values.float()).clamp(-half, half - 1).to(torch.int8)
    tensors[f"{layer}.weight_packed"] = pack_to_int32(changed, BITS)


def change_weight(tensors: Tensors) -> None:
    """Move one scale or weight by what hardly any answer shows."""
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point() and tensor.ndim == 2)
    tensors[name][0, 0] *= 1.01


def save_again(folder: Path) -> None:
    """Write the same tensors into two shards, in the reverse order, with other metadata."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, reverse=True)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt", "saved": "again"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def drop_template(folder: Path) -> None:
    """Lose the chat template."""
    (folder / "chat_template.jinja").unlink()


def lose_stop(folder: Path) -> None:
    """Let answers end at the padding token, which is never generated."""
    for file in ("config.json", "generation_config.json"):
        data = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(data | {"eos_token_id": data["pad_token_id"]}), encoding="utf-8")
