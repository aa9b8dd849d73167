"""Are all tensors stored that a model needs? Asked before any work, of headers alone.

Transformers answers, as it knows what it fuses, ties or does without. It loads tensors without values, 8 B parameters
in a second. What was complete is remembered, as its import takes several. Not covered: quantised and composite models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.products.text.model_config import CONFIG_FILE, read_config
from pipeline.products.text.model_loading import hide_progress_bars
from pipeline.records.digests import digest_json
from pipeline.records.files import write_text
from pipeline.running.quiet import silence_torchao
from pipeline.running.weight_files import TensorInfo, read_tensors
from pipeline.settings.base import ENV

_ROUNDED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
_MAX_SHOWN = 300  # characters of another library's error


def check_complete(where: str, folder: Path, root: Path) -> None:
    """Refuse a config.json that transformers can't build, and weights that do not fit it, as `load_model` does."""
    config, stored = read_config(folder), read_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    dtypes = sorted({tensor.dtype for tensor in stored.values()})
    marker = root / ENV / "complete" / digest_json([config, shapes, dtypes, version("transformers")])
    if marker.is_file() or config.get("quantization_config") is not None or "text_config" in config:
        return
    if rounded := [name for name, tensor in stored.items() if tensor.dtype in _ROUNDED or _is_integer(name, tensor)]:
        raise SettingsError(
            f"{where}: {folder}: expected weights in floats, or a quantization_config in {CONFIG_FILE} that says how "
            f"they are rounded, got {len(rounded):,} tensors such as {rounded[0]!r} as {stored[rounded[0]].dtype}; "
            "take weights that transformers reads as they are rounded, or those that they were made of"
        )
    silence_torchao()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it draws a table of what is missing
    try:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # of any type, as configs are validated
        shown = " ".join(str(error).split())[:_MAX_SHOWN]
        raise SettingsError(f"{where}: {folder}: transformers can't load it: {type(error).__name__}: {shown}") from None
    try:
        with hide_progress_bars():
            _, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)].from_pretrained(
                None,
                config=settings,
                state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception:  # the stage that loads it says why
        return
    problems = ("missing", "mismatched", "unexpected")
    keys = {problem: _name_keys(info.get(f"{problem}_keys") or ()) for problem in problems}
    if found := {problem: names for problem, names in keys.items() if names}:
        said = ", ".join(f"{len(names):,} {problem}, such as {names[0]!r}" for problem, names in found.items())
        advice = f"weights and {CONFIG_FILE} do not belong together"
        if set(found) == {"unexpected"}:
            advice = f"remove them from the weights, or take the {CONFIG_FILE} that knows them"
        raise SettingsError(f"{where}: {folder}: tensors: {said}; {advice}")
    write_text(marker, "")


def _is_integer(name: str, tensor: TensorInfo) -> bool:
    """Say whether weights are stored as integers; buffers may be."""
    return name.endswith(".weight") and tensor.dtype[0] in "IU"


def _name_keys(keys: Iterable[Any]) -> list[str]:
    """Return the names of tensors; mismatched ones come with both shapes."""
    return sorted(str(key[0] if isinstance(key, tuple) else key) for key in keys)
