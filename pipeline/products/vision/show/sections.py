"""What the report says of a candidate of a network product: its policy, layer by layer, its fallbacks and its tiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pipeline.errors import EvidenceError, NumericsError
from pipeline.gate.pairing import Evidence
from pipeline.gate.wording import escape_markdown, format_num
from pipeline.numerics.tile_grid import place_tiles
from pipeline.products.vision.findings.notes import Int8Notes, LayerNotes
from pipeline.products.vision.findings.speed import describe_emulation, describe_limit, list_limits, read_soundly
from pipeline.products.vision.show.costs import count_overflows, format_error, format_headroom, has_policy
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Fallback, LayerCoverage
from pipeline.records.serving import Tiling
from pipeline.report.markdown import render_name
from pipeline.report.pictures.images import measure_given
from pipeline.report.sections import Block, Folded, Table


def build_network_blocks(evidence: Evidence) -> list[Block]:
    """Return paragraphs on what was done to a network and what came of it."""
    candidate, notes = evidence.candidate, read_soundly(evidence)
    layers = notes.layers if notes else {}
    blocks: list[Block] = [f"Steps: {'; '.join(map(_describe_step, candidate.steps)) or 'none'}."]
    if candidate.coverage:
        counts = Counter(layer.format for layer in candidate.coverage)
        what = "Policy, emulated" if has_policy(candidate) else "Stored"
        formats = ", ".join(
            f"{format_num(num, 'layer', 'layers')} {escape_markdown(name)}" for name, num in counts.most_common()
        )
        blocks.append(f"{what}: {formats}.")
    if notes and notes.int8:
        blocks.append(_describe_kernels(notes.int8))
    blocks += describe_fallbacks([*candidate.fallbacks, *_list_missed(evidence)])
    if num := count_overflows(layers.values()):
        first = next(name for name, layer in layers.items() if layer.nonfinite_count)
        blocks.append(f"{num} of {len(layers)} layers wrote NaN or infinity, the first is {render_name(first)}.")
    if notes and notes.layout and notes.layout.other_formats:
        blocks.append(f"In another memory format: {_list_names(notes.layout.other_formats)}.")
    if (tiling := candidate.serving.tiling) is not None:
        for name, records in evidence.records.items():
            blocks += [_describe_tiles(name, records, tiling), *_describe_worst_stitch(name, records)]
    if candidate.coverage:
        table = Table(tabulate_policy(candidate, layers))
        what = "algorithm, number format" if has_policy(candidate) else "number format"
        blocks.append(Folded(f"Layers: {what}, error and headroom", [table]))
    return blocks


def _describe_kernels(int8: Int8Notes) -> str:
    """Say which kernels ran the layers in INT8, and how often."""
    if int8.is_emulated:
        return f"INT8: {describe_emulation(int8)}."
    names = f" ({', '.join(map(escape_markdown, int8.implementations))})" if int8.implementations else ""
    return (
        f"INT8 as torch's profiler saw it in one run: {int8.num_kernel_calls} calls of INT8 kernels{names} for "
        f"{int8.num_layers} layers, and {int8.num_float_calls} float convolutions."
    )


def _list_missed(evidence: Evidence) -> list[Fallback]:
    """Return where compilation did not reach all shapes; only the evaluation knows that, not what was built."""
    try:
        return [Fallback(layer="(all)", reason=describe_limit(met)) for met in list_limits(evidence)]
    except EvidenceError:  # the verdict says so
        return []


def _describe_step(step: dict[str, Any]) -> str:
    """Name a step and its settings: "tiling (tile 64, overlap 0.125, window hann)"."""
    words = []
    for key, value in step.items():
        if key not in ("kind", "rules", "serving") and value is not None and value is not False and value != []:
            value = " ".join(value) if isinstance(value, list) else value
            words.append(key if value is True else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    words += [f"{len(step['rules'])} rules"] if step.get("rules") else []
    return escape_markdown(f"{step['kind']} ({', '.join(words)})" if words else str(step["kind"]))


def describe_fallbacks(fallbacks: Sequence[Fallback]) -> list[str]:
    """Say where something else was done than asked: one sentence a kind, as a network has many layers.

    A reason may be "stride 2: direct instead of winograd_f43": what is done comes after the last colon.
    """
    groups: dict[str, list[Fallback]] = {}
    for fallback in fallbacks:
        groups.setdefault(fallback.reason.rpartition(": ")[2], []).append(fallback)
    sentences = []
    for what, group in groups.items():
        if len(group) == 1:
            sentences.append(f"Fallback: {render_name(group[0].layer)}: {escape_markdown(group[0].reason)}.")
        else:
            why = Counter(fallback.reason.rpartition(": ")[0] for fallback in group)
            counts = ", ".join(f"{num} {reason}" for reason, num in why.most_common() if reason)
            sentences.append(
                f"Fallbacks: {len(group)} layers: {escape_markdown(what)}"
                + (f" ({escape_markdown(counts)})" if counts else "")
                + "."
            )
    return sentences


def _list_names(names: Sequence[str], *, limit: int = 8) -> str:
    shown = ", ".join(render_name(name or "(network)") for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def tabulate_policy(candidate: BuiltCandidate, layers: dict[str, LayerNotes]) -> list[list[str]]:
    """Return the rows of a table of the convolutions that a policy covers, in the network's order."""
    rows = [
        ["layer", "algorithm", "dtype", "relative error", "headroom, doublings", "reason"],
        ["---", "---", "---", "---:", "---:", "---"],
    ]
    rules = [rule for step in candidate.steps for rule in step.get("rules", [])]
    fallbacks = {fallback.layer: fallback.reason for fallback in candidate.fallbacks}
    return rows + [_describe_layer(layer, layers.get(layer.layer), rules, fallbacks) for layer in candidate.coverage]


def _describe_layer(
    layer: LayerCoverage, found: LayerNotes | None, rules: Sequence[dict[str, Any]], fallbacks: dict[str, str]
) -> list[str]:
    # a policy's format is "winograd_f43 float16", that of stored weights "int8"
    algorithm, _, dtype = layer.format.rpartition(" ")
    named = next((str(rule.get("reason") or "a rule names it") for rule in rules if _names(rule, layer.layer)), "")
    reason = "; ".join(filter(None, [named, fallbacks.get(layer.layer, "")]))
    numbers = [format_error(found), format_headroom(found)] if found else ["–", "–"]
    return [
        render_name(layer.layer),
        *map(escape_markdown, (algorithm or "direct", dtype)),
        *numbers,
        escape_markdown(reason),
    ]


def _names(rule: dict[str, Any], layer: str) -> bool:
    return any(fnmatchcase(layer, pattern) for pattern in rule.get("layers", []))


def _describe_tiles(eval_name: str, records: Sequence[CaseRecord], tiling: Tiling) -> str:
    """Say how many pictures are larger than a tile, and into how many tiles the largest is cut."""
    counts = list(_count_tiles(records, tiling))
    unknown = len(records) - len(counts)
    sentence = (
        f"{eval_name}: {sum(count > 1 for count in counts)} of {len(records)} pictures are larger than a tile and "
        f"are cut, into up to {max(counts, default=1)} tiles"
    )
    return sentence + (f"; {unknown} can't be read" if unknown else "") + "."


def _describe_worst_stitch(eval_name: str, records: Sequence[CaseRecord]) -> list[str]:
    """Say how large the largest step at a single stitch is, which the mean over all of them hides."""
    levels = [
        (record.scores["worst_seam_levels"], record.case_id)
        for record in records
        if "worst_seam_levels" in record.scores
    ]
    if not levels:
        return []
    worst, case_id = max(levels, key=lambda pair: pair[0])
    return [f"{eval_name}: the worst single stitch of all steps by {worst:.1f} levels, of {render_name(case_id)}."]


def _count_tiles(records: Sequence[CaseRecord], tiling: Tiling) -> Iterator[int]:
    overlap = tiling.overlap_pixels
    for record in records:
        try:
            yield math.prod(len(place_tiles(side, tiling.tile, overlap)) for side in measure_given(record))
        except (EvidenceError, NumericsError):
            continue
