"""What the image track's notes say beside the scores: where a decoder overflowed, and whose fault it was."""

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
    return next((name for name in broken if not any(other != name and other.startswith(f"{name}." if name else "")
                                                    for other in broken)), None)  # fmt: skip


def explain_unsound(evidence: Evidence, eval_name: str) -> str | None:
    """Say how many images are not sound and why; None when all are."""
    records = evidence.records[eval_name]
    counts = {flag: sum(r.scores.get(flag, 0) > 0 for r in records)
              for flag in ("nonfinite", "black", "latents_out_of_range")}  # fmt: skip
    if not any(counts.values()):
        return None
    said = f"{counts['nonfinite']} of {len(records)} raw decodes hold NaN or infinity, {counts['black']} are black"
    if (module := find_overflow(read_decoder(evidence, eval_name))) is not None:
        dtype = getattr(evidence.candidate.serving, "vae_dtype", "")
        said += f"; the decoder first overflows in {module!r}, in {dtype}"
    wild = counts["latents_out_of_range"]
    return said + (f"; {wild} had latents out of range, which is not the decoder's doing" if wild else "")


def describe_rendering(evidence: Evidence) -> list[str]:
    """Say what rendering cost, and what a range fix proved, one sentence or two each."""
    lines = []
    for eval_name in evidence.records:
        notes = read_notes(evidence, eval_name)
        ratio = notes["decode_to_float32"]
        beside = (f", {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of the reference's float32 "
                  "decode of the same latents" if ratio else "")  # fmt: skip
        lines.append(f"{eval_name}: {notes['denoise_ms_per_image']:.0f} ms an image to denoise "
                     f"({notes['step_ms_per_image']:.2f} a step), {notes['decode_ms_per_image']:.2f} ms to decode"
                     f"{beside}; a batch's decode holds at most {notes['decode_peak_mib']:.1f} MiB, weights included, "
                     f"and a process {notes['peak_memory_mib']:.0f} MiB.")
    for step in evidence.candidate.steps:
        if "proof" in step:
            lines.append(_describe_proof(step["proof"]))
        lines += [f"Channels-last is kept for the {part}: it takes {m['ratio']['median']:.3f} "
                  f"({m['ratio']['low']:.3f} to {m['ratio']['high']:.3f}) of the time with channels first."
                  for part, m in step.get("layout", {}).items() if m["decision"] == "keep"]  # fmt: skip
    return lines


def _describe_proof(proof: Mapping[str, Any]) -> str:
    worst = proof["worst_module"]
    after = min(proof["headroom_bits_after"], key=lambda name: proof["headroom_bits_after"][name])
    return (f"Range fix, on {proof['num_prompts']} latents that it was not made from: the float32 output moves by at "
            f"most {proof['max_difference']:.2g} of [-1, 1]; headroom in float16 of the worst module "
            f"{proof['headroom_bits_before'][worst]:.1f} doublings before ({worst}), "
            f"{proof['headroom_bits_after'][after]:.1f} after ({after}); at most "
            f"{max(proof['subnormal_fraction_after'].values(), default=0):.2%} of a layer's weights become subnormal.")
