"""Read a checkpoint's config.json, and find in it what is about text.

What reads headers and what loads weights both import it. Whether config.json fits the weights is asked in
`checkpoints.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json: an object with a `model_type`.

    Raises:
        CheckpointError: there is no such folder or file, or it is another one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found none; correct the path or make it")
    config = read_json(folder / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / CONFIG_FILE}: expected a `model_type`, got {config.get('model_type')!r}")
    return config


def find_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is about text: of a composite model one of several, else the whole."""
    return config.get("text_config") or config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file, other JSON and damage are each a CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a file, found none; copy it from the source") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {show_error(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def show_error(error: BaseException) -> str:
    """Return another library's error in one line: its type, and the start of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
