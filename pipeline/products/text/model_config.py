"""Read a checkpoint's config.json, and find in it what is about text and how weights are stored.

What reads headers and what loads weights both import it. Whether config.json fits the weights is asked in
`checkpoints.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError

CONFIG_FILE = "config.json"
FORMATS = ("dense", "compressed-tensors", "gptq", "awq")
SCORE_CAP = "attn_logit_softcapping"  # of Gemma 2; neither torch's attention nor ours applies it
PACKED = (".weight_packed", ".qweight")  # ends of the names of tensors that hold packed weights


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
    if not isinstance(find_text(config), dict):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: text_config: expected a mapping, got {find_text(config)!r}; copy it again"
        )
    return config


def find_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is about text: of a composite model one of several, else the whole."""
    return config.get("text_config") or config


def find_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model has by its config.json; None: it does not say, or has no bound.

    transformers knows the older keys by the name of the first.
    """
    text = find_text(config)
    found = (text.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def read_score_cap(text: Mapping[str, Any]) -> float:
    """Return the cap on attention scores that a config of text asks for; 0: none."""
    cap = text.get(SCORE_CAP)
    return float(cap) if isinstance(cap, int | float) else 0.0


def detect_format(folder: Path, config: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """Return "dense" or the quantisation format that config.json declares (one of `FORMATS`).

    Args:
        folder: the checkpoint.
        config: its config.json.
        tensors: the names of what it stores.

    Raises:
        CheckpointError: the format is another one, or tensors are packed and none is declared.
    """
    settings = config.get("quantization_config")
    if settings is None:
        if packed := next((n for n in tensors if n.endswith(PACKED)), None):
            raise CheckpointError(
                f"{folder}: tensor {packed!r} is packed, but {CONFIG_FILE} has no `quantization_config`; "
                "add the settings it was quantised with"
            )
        return "dense"
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in FORMATS[1:]:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: quantization_config.quant_method: expected one of "
            f"{', '.join(FORMATS[1:])}, got {method!r}"
        )
    return str(method)


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
