"""Are all tensors stored that a model needs? Asked before any work, of headers alone.

Transformers itself answers, as it knows which names it fuses, ties or does without. It loads tensors without values:
of 8 B parameters that takes a second. What was complete is remembered, as its import takes several. Not covered:
quantised and composite checkpoints, and values, NaN among them; the stages that load these refuse them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.products.text.checkpoints import CONFIG_FILE, hide_progress_bars, read_config
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.files import write_text
from pipeline.running.quiet import silence_torchao
from pipeline.running.weight_files import read_tensors
from pipeline.settings.base import ENV

MEMORY = ENV / "complete.json"  # digests of configs with shapes that lacked nothing


def check_complete(folder: Path, root: Path) -> None:
    """Refuse weights that do not fit their config, as `load_model` does.

    Args:
        folder: the checkpoint.
        root: of the project, under which is remembered what was complete.

    Raises:
        CheckpointError: a tensor is missing, has another shape than config.json says, or belongs to no layer.
    """
    config = read_config(folder)
    if "quantization_config" in config or "text_config" in config:
        return
    shapes = {name: tensor.shape for name, tensor in read_tensors(folder).items()}
    key = digest_json([config, shapes, version("transformers"), digest_file(Path(__file__))])
    try:
        known = list(json.loads((root / MEMORY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = []
    if key in known:
        return
    for problem, names in _compare(folder, shapes).items():
        if names:
            raise CheckpointError(
                f"{folder}: {len(names)} {problem} tensors, such as {min(names)!r}; weights and {CONFIG_FILE} "
                "do not belong together"
            )
    write_text(root / MEMORY, json.dumps([*known, key]))


def _compare(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, set[str]]:
    """Return what transformers finds missing, mismatched or unexpected; nothing where it can't build the model."""
    silence_torchao()
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with hide_progress_bars():
            _, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception:  # of which the config's validation raises bare ones; the stage that loads it says why
        return {}
    finally:
        logging.set_verbosity(verbosity)
    return {
        "missing": set(info["missing_keys"]),
        "mismatched": {name for name, *_ in info["mismatched_keys"]},
        "unexpected": set(info["unexpected_keys"]),
    }
