"""What makes one way of serving another: facts by section, one digest over them, and the name of what differs.

    checkpoint    digest of the folder, and of each file to say which one changed
    serving       settings that can change an answer; no address, no path
    libraries     versions
    engine        the engine's own configuration after its defaults
    sampling      sampling defaults that apply to a request which does not set them
    environment   environment variables that can change an answer, and the scripts of the command, which may set more
    hardware      device and instruction sets

The first three follow from params.yaml and the built candidate, the others only a running server can
tell. An endpoint that can't be asked lacks sections; what one side lacks is not compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.records.digests import digest_json, name_changed_file

Facts = Mapping[str, Any]

RUNTIME_SECTIONS = ("engine", "sampling", "environment", "hardware")
SECTIONS = ("checkpoint", "serving", "libraries", *RUNTIME_SECTIONS)

# what kernels, precision or sampling read; never a secret, a path or an address
_WATCHED = re.compile(
    r"VLLM_\w+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|ATEN_CPU_CAPABILITY"
    r"|(?:ONEDNN|DNNL)_(?:MAX_CPU_ISA|DEFAULT_FPMATH_MODE)|MKL_(?:CBWR|ENABLE_INSTRUCTIONS)|OMP_NUM_THREADS"
)
_UNWATCHED = re.compile(r"VLLM_\w*(?:KEY|TOKEN|USAGE|LOG|DEV_MODE|ROOT|PATH|DIR|FOLDER|HOST|PORT|URL|SOURCE)\w*")


@dataclass(frozen=True)
class Difference:
    """One field in which two sets of facts differ."""

    field: str
    expected: Any
    actual: Any


def fingerprint(facts: Facts) -> str:
    """Return the sha256 over all sections that are there; of a checkpoint its digest alone counts."""
    sections = {name: facts[name] for name in SECTIONS if name in facts}
    if "checkpoint" in sections:
        sections["checkpoint"] = sections["checkpoint"]["digest"]
    return digest_json(sections)


def find_difference(expected: Facts, actual: Facts) -> Difference | None:
    """Return the most telling field in which facts differ; None when none does."""
    return next(_find_differences(expected, actual), None)


def find_differences(expected: Facts, actual: Facts) -> list[Difference]:
    """Return every field in which facts differ, over the sections that both sides have: the most telling first."""
    return list(_find_differences(expected, actual))


def _find_differences(expected: Facts, actual: Facts) -> Iterator[Difference]:
    for section in SECTIONS:
        if section not in expected or section not in actual:
            continue
        if section == "checkpoint":
            if difference := _compare_checkpoints(expected[section], actual[section]):
                yield difference
            continue
        ours, theirs = dict(_flatten(expected[section])), dict(_flatten(actual[section]))
        # drafts first: what else differs in a section often follows from them
        for key in sorted(ours | theirs, key=lambda key: "speculative" not in key):
            if (was := ours.get(key, "nothing")) != (now := theirs.get(key, "nothing")):
                yield Difference(f"{section}.{key}", was, now)


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that can change an answer."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _WATCHED.fullmatch(name) and not _UNWATCHED.fullmatch(name)
    }


def name_command(command: Sequence[str]) -> list[str]:
    """Return a command without the folders in its words: where a program lies is not part of what it is."""
    return [word.rpartition("/")[2] or word for word in command]


def _compare_checkpoints(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Difference | None:
    if expected["digest"] == actual["digest"]:
        return None
    which = name_changed_file(expected.get("files", {}), actual.get("files", {}))
    return Difference(f"checkpoint digest ({which})", expected["digest"][:12], actual["digest"][:12])


def _flatten(values: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{parents}{key}.")
        else:
            yield f"{parents}{key}", list(value) if isinstance(value, tuple) else value
