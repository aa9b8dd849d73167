"""Are all tensors stored that a model needs? Asked before any work, of headers alone.

Transformers answers, as it knows which names it fuses, ties or does without. It loads tensors without values: of 8 B
parameters in a second. What was complete is remembered, as its import takes several. Not covered: values, and
checkpoints that are quantised or composite.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.products.text.checkpoints import CONFIG_FILE, hide_progress_bars, read_config
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.files import write_text
from pipeline.running.quiet import silence_torchao
from pipeline.running.weight_files import read_tensors
from pipeline.settings.base import ENV

Shapes = dict[str, tuple[int, ...]]


def check_complete(folder: Path, root: Path) -> None:
    """Refuse weights that do not fit config.json, as `load_model` does; `root` is the project's.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or belongs to no layer.
    """
    config, shapes = read_config(folder), {name: tensor.shape for name, tensor in read_tensors(folder).items()}
    key = digest_json([config, shapes, version("transformers"), digest_file(Path(__file__))])
    marker = root / ENV / "complete" / key
    if marker.is_file() or "quantization_config" in config or "text_config" in config:
        return
    for problem, names in _compare(folder, shapes).items():
        if names:
            raise CheckpointError(
                f"{folder}: {len(names)} {problem} tensors, such as {names[0]!r}; weights and {CONFIG_FILE} "
                "do not belong together"
            )
    write_text(marker, "")


def _compare(folder: Path, shapes: Shapes) -> dict[str, list[str]]:
    """Return the names that do not fit by what is wrong; none where transformers can't build the model."""
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
    except Exception:  # validation of a config raises bare ones; the stage that loads it says why
        return {}
    finally:
        logging.set_verbosity(verbosity)
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    return {
        "missing": sorted(info["missing_keys"]),
        "mismatched": sorted(mismatched),
        "unexpected": sorted(info["unexpected_keys"]),
    }
