"""What a report says of how a candidate was built and evaluated: steps, formats of layers, shards."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.gate.wording import escape_markdown, format_num
from pipeline.records.evaluations import BuiltCandidate, ShardCounts
from pipeline.report.markdown import render_name


def describe_built_candidate(candidate: BuiltCandidate) -> str:
    """Say what was done to a candidate and which layers ended in which format."""
    steps = "; ".join(escape_markdown(_describe_step(step)) for step in candidate.steps) or "none"
    sentences = [f"Steps: {steps}."]
    if candidate.coverage:
        total = sum(layer.num_bytes for layer in candidate.coverage)
        asked = [layer for layer in candidate.coverage if layer.asked]
        formats = sorted({layer.format for layer in asked})
        numbers = Counter(layer.format for layer in asked)
        counts = [f"{format_num(numbers[f], 'layer', 'layers')} {escape_markdown(f)}" for f in formats]
        counts.append(f"{len(candidate.coverage) - len(asked)} excluded")
        sentences.append(
            f"Coverage: {', '.join(counts)}; the former hold "
            f"{_mib(sum(layer.num_bytes for layer in asked))} MiB of {_mib(total)} MiB."
        )
    sentences += [f"Fallback: {render_name(f.layer)}: {escape_markdown(f.reason)}." for f in candidate.fallbacks]
    return " ".join(sentences)


def describe_shards(shards: ShardCounts) -> str:
    """Say how an evaluation came together, and how often a part of it had to be begun again."""
    ended = f", {shards.num_unfinished} of which did not end" if shards.num_unfinished else ""
    return (
        f"Evaluated in {format_num(shards.num_shards, 'shard', 'shards')} on "
        f"{format_num(shards.num_hosts, 'host', 'hosts')}, in "
        f"{format_num(shards.num_attempts, 'attempt', 'attempts')}{ended}."
    )


def _describe_step(step: dict[str, Any]) -> str:
    plain = [f"{key} {value}" for key, value in step.items() if key != "kind" and isinstance(value, (int, float, str))]
    plain += [
        f"{', '.join(rule['layers'])} in {rule.get('scheme') or 'weights spelt out'}" for rule in step.get("rules", ())
    ]
    if cache := step.get("kv_cache"):
        plain.append(f"keys and values in {cache['dtype']}, a scale a {cache['strategy']}")
    calibration = step.get("calibration") or {}
    plain += (
        [
            f"calibration {calibration['num_samples']} samples of {', '.join(calibration['sources'])}"
            f" weighted by length^{calibration['length_exponent']:g}"
        ]
        if calibration
        else []
    )
    return f"{step['kind']} ({', '.join(plain)})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
