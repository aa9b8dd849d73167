"""Write a network of the project as a checkpoint folder: config.json, model.safetensors, card.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file


def save_network(model: Any, folder: Path, settings: dict[str, object]) -> None:
    """Write a network and what made it.

    Args:
        model: a torch module with a `config` that JSON holds.
        folder: is made if absent.
        settings: go to card.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (folder / "card.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
