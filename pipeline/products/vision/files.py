"""The folder of a network: config.json and weights in safetensors, or an .onnx file. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.products.vision.onnx_files import FORMAT, find_onnx, inspect_onnx
from pipeline.records.evaluations import Checkpoint
from pipeline.running.weight_files import read_tensors
from pipeline.running.weight_folders import build_checkpoint, read_config_file

CONFIG_FILE = "config.json"
_NO_WEIGHTS = (".json", ".py")  # beside an .onnx file; all else is its external data


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; beside an .onnx file it may be left out, and is empty.

    Raises:
        CheckpointError: no folder, no file, or no JSON object.
    """
    if not (folder / CONFIG_FILE).exists() and find_onnx(folder):
        return {}
    return read_config_file(
        folder / CONFIG_FILE, "the network's config", if_missing="correct the path, or put an .onnx file there"
    )


def read_network_checkpoint(folder: Path, *, root: Path, kind: str) -> Checkpoint:
    """Check a network's folder and return its record.

    Args:
        folder: with config.json and safetensors, or an .onnx file.
        root: project root, which the record's path is relative to when the folder is inside it.
        kind: what it is.

    Raises:
        CheckpointError: no weights, pickle weights, or a damaged file.
    """
    if path := find_onnx(folder):
        return _describe_onnx(path, root=root, kind=kind)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: expected a folder with config.json and model.safetensors, found none; or with an .onnx file"
        )
    made = build_checkpoint(folder, read_tensors(folder).values(), root=root, kind=kind, format="dense")
    return made.model_copy(update={"dtype": "int8"}) if made.dtype == "I8" else made


def _describe_onnx(path: Path, *, root: Path, kind: str) -> Checkpoint:
    """Return the record of an .onnx file's folder; how many parameters there are ONNX Runtime does not tell."""
    given = inspect_onnx(path, batch_size=1)
    made = build_checkpoint(path.parent, (), root=root, kind=kind, format=FORMAT)
    weights = [path.parent / name for name in made.files if not name.endswith(_NO_WEIGHTS)]
    return made.model_copy(update={"dtype": given.dtype, "num_bytes": sum(file.stat().st_size for file in weights)})
