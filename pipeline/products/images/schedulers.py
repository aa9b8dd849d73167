"""The options that the schedulers of the installed diffusers have, read from their source: importing takes seconds.

diffusers ignores an option that a scheduler does not have, and keeps those of other schedulers in a config on
purpose, so that one can be swapped for another and back. A name that no scheduler has is a mistake.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, SettingsError, suggest

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
_NOISE_SEED = "noise_sampler_seed"  # of a scheduler that draws noise of its own, by no generator


def check_scheduler(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a scheduler that diffusers does not have or whose noise no seed decides, and an option that none has.

    Raises:
        CheckpointError: names the file, the option and the nearest one.
    """
    name = str(config.get("_class_name"))
    options = read_options(name)
    if options is None:
        raise CheckpointError(
            f"{path}: _class_name: expected a scheduler of diffusers, got {name!r}; correct it or "
            "save the pipeline again"
        )
    for option in config:
        if option not in options and not option.startswith("_") and option not in _read_all_options():
            raise CheckpointError(
                f"{path}: {option}: expected an option of {name}, which would ignore this one; "
                f"{suggest(option, options) or 'remove it'}"
            )
    if _NOISE_SEED in options and config.get(_NOISE_SEED) is None:
        raise CheckpointError(
            f"{path}: {_NOISE_SEED}: expected a number, as {name} draws noise that no seed of a prompt decides, got "
            "None; set it, or save the pipeline with another scheduler"
        )


def check_thresholding(path: Path) -> None:
    """Refuse a scheduler that knows no dynamic thresholding.

    Args:
        path: of its config.

    Raises:
        SettingsError: names the setting and the scheduler.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    name = config.get("_class_name")
    # of a known class its own options: a config keeps those of the class that it was made from
    if "dynamic_thresholding_ratio" not in (read_options(str(name)) or config):
        raise SettingsError(
            f"dynamic_threshold_percentile: expected a scheduler with dynamic thresholding (DDIM, "
            f"DPM-Solver++, UniPC), got {name}; remove it or change the "
            "pipeline's scheduler"
        )


def read_options(name: str) -> frozenset[str] | None:
    """Return the options of a scheduler class; None for an unknown one."""
    text = next((text for text in _read_sources() if f"class {name}(" in text), None)
    return None if text is None else _parse_options(text)[name]


@cache
def _read_sources() -> tuple[str, ...]:
    spec = importlib.util.find_spec("diffusers")
    folders = [Path(place) / "schedulers" for place in (spec.submodule_search_locations or [])] if spec else []
    return tuple(
        file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.rglob("scheduling_*.py"))
    )


@cache
def _read_all_options() -> frozenset[str]:
    return frozenset(
        option for text in _read_sources() for options in _parse_options(text).values() for option in options
    )


@cache
def _parse_options(text: str) -> dict[str, frozenset[str]]:
    """Return the arguments of each class's constructor."""
    return {
        node.name: frozenset(
            a.arg
            for function in node.body
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
            for a in (*function.args.args, *function.args.kwonlyargs)
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    }
