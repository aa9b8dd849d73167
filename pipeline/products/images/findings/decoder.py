"""What the image product's report says beside the scores: where a decoder overflowed and whose fault it was, how each
candidate guides, and which pictures there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.gate.pairing import Evidence
from pipeline.gate.wording import escape_markdown

Modules = Mapping[str, Mapping[str, Any]]


def read_notes(evidence: Evidence, eval_name: str) -> dict[str, Any]:
    """Return the notes beside the records of one eval; their seal was checked when records were loaded."""
    return dict(json.loads((evidence.folder / f"{eval_name}.json").read_text(encoding="utf-8")))


def read_decoder(evidence: Evidence, eval_name: str) -> dict[str, dict[str, Any]]:
    """Return the ranges of the decoder's modules in one eval."""
    return dict(read_notes(evidence, eval_name)["decoder"])


def read_std_ratios(evidence: Evidence, eval_name: str) -> list[float]:
    """Return the ratio of guided to conditional deviation of each denoising step; none where it was not noted."""
    return list(read_notes(evidence, eval_name).get("std_ratio_by_step") or [])


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
    said = f"{counts['nonfinite']} of {len(records)} raw decodes hold NaN or infinity, {counts['black']} are black"
    if (module := find_overflow(read_decoder(evidence, eval_name))) is not None:
        dtype = getattr(evidence.candidate.serving, "vae_dtype", "")
        said += f"; the decoder first overflows in {module!r}, in {dtype}"
    wild = counts["latents_out_of_range"]
    return said + (f"; {wild} had latents out of range, which is not the decoder's doing" if wild else "")


def describe_files(evidence: Evidence, reference: Evidence) -> str:
    """Name the files in which a candidate's pipeline differs from the reference's: another sampler is one of them."""
    ours, theirs = (side.candidate.checkpoint.files for side in (evidence, reference))
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return (
        "\nFiles that differ from the reference's: "
        + (", ".join(f"`{escape_markdown(name)}`" for name in differing) or "none")
        + "."
    )


def describe_rendering(evidence: Evidence) -> list[str]:
    """Say what rendering cost, and what a range fix proved, one sentence or two each."""
    lines = []
    for eval_name in evidence.records:
        notes = read_notes(evidence, eval_name)
        ratio = notes["decode_to_float32"]
        beside = (
            f", {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of the reference's float32 "
            "decode of the same latents"
            if ratio
            else ""
        )
        lines.append(
            f"{eval_name}: {notes['denoise_ms_per_image']:.0f} ms an image to denoise "
            f"({notes['step_ms_per_image']:.2f} a step), {notes['decode_ms_per_image']:.2f} ms to decode"
            f"{beside}; a batch's decode holds at most {notes['decode_peak_mib']:.1f} MiB, weights included, "
            f"and a process {notes['peak_memory_mib']:.0f} MiB."
        )
        if cut := sum(record.scores.get("cut_tokens", 0) > 0 for record in evidence.records[eval_name]):
            lines.append(
                f"{eval_name}: {cut} prompts are longer than the tokenizer's limit; what is beyond it was not drawn."
            )
    for step in evidence.candidate.steps:
        if "proof" in step:
            lines += [_describe_proof(step["proof"]), _list_headroom(step["proof"])]
        lines += [
            f"Channels-last is kept for the {part}: it takes {m['ratio']['median']:.3f} "
            f"({m['ratio']['low']:.3f} to {m['ratio']['high']:.3f}) of the time with channels first."
            for part, m in step.get("layout", {}).items()
            if m["decision"] == "keep"
        ]
    return lines


def _list_headroom(proof: Mapping[str, Any]) -> str:
    """Return every module's headroom before and after a range fix, folded away."""
    before, after = proof["headroom_bits_before"], proof["headroom_bits_after"]
    rows = "\n".join(
        f"| {escape_markdown(name or '(output)')} | {before[name]:.1f} | {bits:.1f} |"
        for name, bits in after.items()
        if name in before
    )
    return (
        "<details><summary>Headroom in float16 of every module, doublings</summary>\n\n"
        f"| module | before | after |\n| --- | ---: | ---: |\n{rows}\n\n</details>"
    )


def _describe_proof(proof: Mapping[str, Any]) -> str:
    worst = proof["worst_module"]
    after = min(proof["headroom_bits_after"], key=lambda name: proof["headroom_bits_after"][name])
    return (
        f"Range fix, on {proof['num_prompts']} latents that it was not made from: the float32 output moves by at "
        f"most {proof['max_difference']:.2g} of [-1, 1]; headroom in float16 of the worst module "
        f"{proof['headroom_bits_before'][worst]:.1f} doublings before ({worst}), "
        f"{proof['headroom_bits_after'][after]:.1f} after ({after}); at most "
        f"{max(proof['subnormal_fraction_after'].values(), default=0):.2%} of a layer's weights become subnormal."
    )


def describe_guidance(evidence: Evidence) -> str:
    """Say how a candidate guides: "scale 12, rescale 0.7"."""
    serving = evidence.candidate.serving.model_dump()
    said = f"scale {serving['guidance_scale']:g}, rescale {serving['guidance_rescale']:g}"
    for step in evidence.candidate.steps:
        if step.get("dynamic_threshold_percentile") is not None:
            said += f", thresholded at {step['dynamic_threshold_percentile']:g} % up to {step['sample_max_value']:g}"
    for bucket, own in serving["guidance_by_category"].items():
        said += f"; {bucket}: scale {own['scale']:g}, rescale {own['rescale']:g}"
    return said


def list_guided(evidence: Mapping[str, Evidence | None], reference: str) -> dict[str, Evidence]:
    """Return the reference and every candidate that guides otherwise, in order; nothing where none does."""
    known = {name: e for name, e in evidence.items() if e is not None}
    if reference not in known:
        return {}
    plain = describe_guidance(known[reference])
    others = {name: e for name, e in known.items() if describe_guidance(e) != plain}
    return {reference: known[reference], **others} if others else {}


def embed_pictures(evidence: Mapping[str, Evidence | None], reference: str) -> list[str]:
    """Return the Markdown of the pictures beside the report, with what needs an explanation."""
    parts = [
        "![Reference, candidate and difference of the worst images](worst.png)\n",
        "![Headroom of the decoder's modules](headroom.png)\n",
    ]
    if guided := list_guided(evidence, reference):
        said = "; ".join(f"`{name}` ({escape_markdown(describe_guidance(e))})" for name, e in guided.items())
        explained = f"What guidance does: {said}. Down and to the right is better."
        if any(read_std_ratios(e, eval_name) for e in guided.values() for eval_name in e.records):
            explained += " On the right panel: the wider guidance makes a prediction, the more images saturate."
        parts += [
            "![Saturated pixels against CLIP similarity of what guides otherwise](guidance.png)\n",
            f"{explained}\n",
        ]
    return parts
