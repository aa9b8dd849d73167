"""Models that bring code of their own are refused by name, before anything imports that code.

`trust_remote_code` would run it in this process, with everything that this process may do. A checkpoint whose
config.json names code beside a model type that transformers has itself is loaded by transformers' own class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.products.text.model_config import CONFIG_FILE, read_config, read_json

_TOKENIZER_FILE = "tokenizer_config.json"


def check_own_code(folder: Path) -> None:
    """Refuse a model or a tokenizer that only its own code can load.

    Raises:
        CheckpointError: names the file, the code and what transformers would have to know.
    """
    config = read_config(folder)
    kind = config["model_type"]
    if code := _name_code(config, "AutoModelForCausalLM", "AutoModel", "AutoConfig"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise _refuse(folder / CONFIG_FILE, "model type", kind, code)
    path = folder / _TOKENIZER_FILE
    tokenizer = read_json(path) if path.is_file() else {}
    if code := _name_code(tokenizer, "AutoTokenizer"):
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

        name = str(tokenizer.get("tokenizer_class"))
        if kind not in TOKENIZER_MAPPING_NAMES and tokenizer_class_from_name(name) is None:
            raise _refuse(path, "tokenizer", name, code)


def _name_code(config: dict[str, Any], *classes: str) -> str | None:
    """Return the first code that a file names for one of transformers' classes; None: it names none."""
    named = config.get("auto_map")
    if not isinstance(named, dict):
        return str(named) if named else None
    return next((str(named[name]) for name in classes if named.get(name)), None)


def _refuse(path: Path, what: str, name: str, code: str) -> CheckpointError:
    from importlib.metadata import version

    return CheckpointError(
        f"{path}: expected a {what} that transformers {version('transformers')} has, got {name!r}, which needs "
        f"trust_remote_code to run {code}: code of a checkpoint is never run here; use a release of transformers that "
        "has it, or serve it elsewhere with engine openai"
    )
