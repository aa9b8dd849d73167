"""The folder of a network: config.json, and weights in safetensors. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.records.evaluations import Checkpoint
from pipeline.running.weight_files import read_tensors
from pipeline.running.weight_folders import build_checkpoint, read_config_file

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: no folder, no file, or no JSON object.
    """
    return read_config_file(folder / CONFIG_FILE, "the network's config", if_missing="correct the path")


def read_network_checkpoint(folder: Path, *, root: Path, kind: str) -> Checkpoint:
    """Check a network's folder and return its record.

    Args:
        folder: with config.json and safetensors.
        root: project root, which the record's path is relative to when the folder is inside it.
        kind: what it is.

    Raises:
        CheckpointError: no weights, pickle weights, or a damaged file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json and model.safetensors, found none")
    made = build_checkpoint(folder, read_tensors(folder).values(), root=root, kind=kind, format="dense")
    return made.model_copy(update={"dtype": "int8"}) if made.dtype == "I8" else made
