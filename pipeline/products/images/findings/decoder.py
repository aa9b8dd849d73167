"""The notes on drawn images beside their scores: where a decoder overflowed, and how much room it has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.gate.pairing import Evidence

Modules = Mapping[str, Mapping[str, Any]]


def read_notes(evidence: Evidence, eval_name: str) -> dict[str, Any]:
    """Return the notes beside the records of one eval; their seal was checked when records were loaded."""
    return dict(json.loads((evidence.folder / f"{eval_name}.json").read_text(encoding="utf-8")))


def explain_emulation(evidence: Evidence, eval_name: str) -> str | None:
    """Say that 8 bits were emulated; None where a kernel multiplied them, or weights alone are in 8 bits."""
    ran = read_notes(evidence, eval_name).get("quantized")
    if not ran or not ran["rounds_inputs"] or ran["num_integer_products"] >= ran["num_calls"]:
        return None
    return (
        f"emulated: of {ran['num_calls']} calls of layers in INT8 {ran['num_integer_products']} ran in an INT8 kernel: "
        "the time of a step says nothing"
    )


def read_decoder(evidence: Evidence, eval_name: str) -> dict[str, dict[str, Any]]:
    """Return the ranges of the decoder's modules in one eval."""
    return dict(read_notes(evidence, eval_name)["decoder"])


def headroom(module: Mapping[str, Any], key: str = "headroom_bits") -> float:
    """Return how often a module's largest activation can double: -inf after an overflow."""
    if module["nonfinite_count"]:
        return -math.inf
    return float(module[key]) if module[key] is not None else math.inf


def find_overflow(modules: Modules) -> str | None:
    """Return the first module, in the decoder's order, that wrote NaN or infinity and holds none that did."""
    broken = [name for name, module in modules.items() if module["nonfinite_count"]]
    # the decoder's own name is empty, and it holds all others
    return next(
        (
            name
            for name in broken
            if not any(other != name and other.startswith(f"{name}." if name else "") for other in broken)
        ),
        None,
    )


def explain_unsound(evidence: Evidence, eval_name: str) -> str | None:
    """Say how many images are not sound and why; None when all are."""
    records = evidence.records[eval_name]
    counts = {
        flag: sum(r.scores.get(flag, 0) > 0 for r in records) for flag in ("nonfinite", "black", "latents_out_of_range")
    }
    if not any(counts.values()):
        return None
    text = f"{counts['nonfinite']} of {len(records)} raw decodes hold NaN or infinity, {counts['black']} are black"
    if (module := find_overflow(read_decoder(evidence, eval_name))) is not None:
        dtype = getattr(evidence.candidate.serving, "vae_dtype", "")
        text += f"; the decoder first overflows in {module!r}, in {dtype}"
    wild = counts["latents_out_of_range"]
    return text + (f"; {wild} had latents out of range, which is not the decoder's doing" if wild else "")
