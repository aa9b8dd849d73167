"""What the report says of how a candidate draws: files that differ, what rendering cost, what steps proved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.gate.pairing import Evidence
from pipeline.gate.wording import escape_markdown, format_num
from pipeline.products.images.findings.decoder import read_notes
from pipeline.report.markdown import render_name
from pipeline.report.sections import Block, Folded, Table


def describe_files(evidence: Evidence, reference: Evidence) -> str:
    """Name the files in which a candidate's pipeline differs from the reference's: another sampler is one of them."""
    ours, theirs = (side.candidate.checkpoint.files for side in (evidence, reference))
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return (
        "Files that differ from the reference's: "
        + (", ".join(render_name(name) for name in differing) or "none")
        + "."
    )


def build_rendering_blocks(evidence: Evidence) -> list[Block]:
    """Say what rendering cost, what ran in 8 bits, and what a range fix proved, one sentence or two each."""
    lines: list[Block] = []
    for eval_name in evidence.records:
        notes = read_notes(evidence, eval_name)
        ratio = notes["decode_to_float32"]
        beside = (
            f", {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of the reference's float32 "
            "decode of the same latents"
            if ratio
            else ""
        )
        gpu_mib = notes.get("peak_gpu_memory_mib")
        on_gpu = f" and {gpu_mib:.0f} MiB of its GPU" if gpu_mib else ""
        lines.append(
            f"{eval_name}: {_describe_denoising(notes, len(evidence.records[eval_name]))}; "
            f"{notes['decode_ms_per_image']:.2f} ms an image to decode"
            f"{beside}; a batch's decode holds at most {notes['decode_peak_mib']:.1f} MiB, weights included, "
            f"and a process {notes['peak_memory_mib']:.0f} MiB{on_gpu}."
        )
        if notes["latents_differ"]:
            lines.append(
                f"{eval_name}: latents that were drawn here differ from the reference's, though all that makes them is "
                "the same: the machine does not draw the same twice. The process that saw it took none from then on."
            )
        if ran := notes.get("quantized"):
            lines.append(_describe_products(eval_name, ran))
        if cut := sum(record.scores.get("cut_tokens", 0) > 0 for record in evidence.records[eval_name]):
            lines.append(
                f"{eval_name}: {format_num(cut, 'prompt is', 'prompts are')} longer than the tokenizer's limit; what "
                "is beyond it was not drawn."
            )
    for step in evidence.candidate.steps:
        if "quantized" in step:
            lines.append(_describe_quantized(step))
        if "proof" in step:
            lines += [_describe_proof(step["proof"]), _list_headroom(step["proof"])]
        lines += [
            f"Channels-last is kept for the {part}: it takes {m['ratio']['median']:.3f} "
            f"({m['ratio']['low']:.3f} to {m['ratio']['high']:.3f}) of the time with channels first."
            for part, m in step.get("layout", {}).items()
            if m["decision"] == "keep"
        ]
    return lines


def _describe_denoising(notes: Mapping[str, Any], num_pictures: int) -> str:
    if num_taken := notes["num_taken"]:
        return (
            f"{num_taken:,} of {num_pictures:,} pictures were decoded from the reference's latents, as all that makes "
            "them is the same, and two batches that each process drew by itself were equal bit by bit"
        )
    return f"{notes['denoise_ms_per_image']:.0f} ms an image to denoise ({notes['step_ms_per_image']:.2f} a step)"


def _describe_quantized(step: Mapping[str, Any]) -> str:
    made = step["quantized"]
    before, after = made["num_bytes_before"], made["num_bytes_after"]
    return (
        f"{escape_markdown(step['scheme'])}: the {step['part']} takes {after / 1e6:.2f} MB on disk instead of "
        f"{before / 1e6:.2f} ({1 - after / before:.0%} less). Read back, no weight is further from its source than its "
        f"format explains; the furthest, in {escape_markdown(made['worst_layer'])}, takes {made['worst_error']:.0%} of "
        "that."
    )


def _describe_products(eval_name: str, ran: Mapping[str, Any]) -> str:
    """Say what multiplied the quantised layers in one step, as torch's profiler saw it."""
    calls = f"{eval_name}: in one step {ran['num_layers']} quantised layers were called {ran['num_calls']} times"
    if ran["rounds_inputs"]:
        return f"{calls}; torch's profiler saw {ran['num_integer_products']} products of INT8 numbers."
    return f"{calls}; their weights became floats for each product, which no INT8 or FP8 kernel ran."


def _list_headroom(proof: Mapping[str, Any]) -> Folded:
    """Return every module's headroom before and after a range fix, folded away."""
    before, after = proof["headroom_bits_before"], proof["headroom_bits_after"]
    rows = [
        [escape_markdown(name or "(output)"), f"{before[name]:.1f}", f"{bits:.1f}"]
        for name, bits in after.items()
        if name in before
    ]
    head = [["module", "before", "after"], ["---", "---:", "---:"]]
    return Folded("Headroom in float16 of every module, doublings", [Table([*head, *rows])])


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
