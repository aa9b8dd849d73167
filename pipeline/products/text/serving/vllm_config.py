"""The configuration file of a candidate for `vllm serve --config`, and whether a release of vLLM would take it.

Which keys there are, and of speculative decoding above all, changes from release to release. So each
release's own options are recorded (`schemas/vllm-*.json`, written by scripts/record_vllm_schema.py in
that release's environment) and a file is checked against those before anything starts. A release that
was not recorded checks the file itself when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import fingerprint
from pipeline.records.speculation import SpeculativeConfig

CONFIG_FILE = "vllm.yaml"
SCHEMAS = Path(__file__).with_name("schemas")
SCORE_TOKENS = 2  # beyond the context: a scored sequence has one token more, and vLLM must generate another
OWN_OPTIONS = (
    "model",
    "served-model-name",
    "host",
    "port",
    "dtype",
    "max-model-len",
    "speculative-config",
    "config",
    "fingerprint-mode",
    "fingerprint-value",
    "per-request-spec-decode-metrics",
    "tensor-parallel-size",
    "data-parallel-size",
    "worker-extension-cls",
)
# without which a release serves all the same: it is not asked for them where they came later
_LATER_OPTIONS = ("fingerprint-mode", "fingerprint-value", "per-request-spec-decode-metrics")
# what names a file beside the checkpoint, which no digest would cover
FILE_OPTIONS = ("chat-template", "tokenizer", "hf-config-path", "lora-modules", "generation-config")
_METHODS = {"prompt_lookup": "ngram"}  # vLLM's name for it


def build_config(candidate: Candidate, *, needs_scores: bool) -> dict[str, Any]:
    """Return the options of `vllm serve` for a candidate; paths are relative to the project root.

    Args:
        candidate: what to serve.
        needs_scores: evals ask for the log-probabilities of given tokens.
    """
    serving = candidate.serving
    config: dict[str, Any] = {
        "model": candidate.checkpoint.path,
        "served-model-name": [candidate.name],
        "host": "127.0.0.1",
        "dtype": serving.dtype,
        "max-model-len": serving.context_length + (SCORE_TOKENS if needs_scores else 0),
        # its own fingerprint does not see weights, and every reply carries this one
        "fingerprint-mode": "custom",
        "fingerprint-value": fingerprint(candidate.facts),
    }
    if serving.speculative is not None:
        config["speculative-config"] = build_speculative_config(serving.speculative)
        config["per-request-spec-decode-metrics"] = "summary"
    taken = read_options(str(serving.version))
    lacking = set() if taken is None else set(_LATER_OPTIONS) - taken.keys()
    return {key: value for key, value in config.items() if key not in lacking} | serving.options


def read_options(version: str) -> dict[str, Any] | None:
    """Return the options that a recorded release of vLLM takes, each with its JSON schema; None: not recorded."""
    path = SCHEMAS / f"vllm-{version}.json"
    if not path.is_file():
        return None
    options: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["properties"]
    return options


def build_speculative_config(speculative: SpeculativeConfig) -> dict[str, Any]:
    """Return vLLM's nested speculative config."""
    config: dict[str, Any] = {
        "method": rename_method(speculative.method),
        "num_speculative_tokens": speculative.num_tokens,
    }
    if speculative.draft_path:
        config["model"] = speculative.draft_path
    return config | speculative.options


def rename_method(method: str | None) -> str | None:
    """Return vLLM's name of a speculative method."""
    return _METHODS.get(method, method) if method else None


def render_config(config: dict[str, Any]) -> str:
    """Write a config as YAML, one option a line: JSON is YAML."""
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())


def check_config(config: dict[str, Any], *, version: str, where: str) -> None:
    """Refuse options that the recorded release of vLLM does not have, or of another type.

    Args:
        config: some of the options, or all of them.
        version: of the release; one that was not recorded checks them itself when it starts.
        where: the candidate, as a path into params.yaml.

    Raises:
        SettingsError: names the option, what the release takes, and what came.
    """
    path = SCHEMAS / f"vllm-{version}.json"
    if not path.is_file():
        return
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
    for error in validator.iter_errors(config):
        at = ".".join(map(str, error.absolute_path)) or "options"
        raise SettingsError(
            f"{where}: vLLM {version} does not take {at}: {error.message[:300]}; correct "
            "engine.options or the speculative step"
        )


def check_options(options: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that quantgate sets itself, and those that name files: neither would be fingerprinted."""
    for key, value in options.items():
        if key in FILE_OPTIONS and (key, value) not in (("generation-config", "auto"), ("generation-config", "vllm")):
            raise SettingsError(
                f"{where}.engine.options.{key}: expected no file beside the checkpoint, whose changes "
                f"nobody would see, got {value!r}; put it into the checkpoint's folder"
            )
        if key in OWN_OPTIONS:
            raise SettingsError(
                f"{where}.engine.options.{key}: expected an option that quantgate does not set itself; "
                "remove it, it follows from `serving`, the checkpoint, the steps or other settings of the engine"
            )
