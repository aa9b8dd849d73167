"""What a report says of how a candidate was built and evaluated: steps, formats of layers, shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.gate.wording import escape_markdown, format_num
from pipeline.records.evaluations import BuiltCandidate, Fallback, ShardCounts
from pipeline.report.markdown import render_name

_MAX_NAMED = 3  # layers that one reason is given for


def describe_built_candidate(
    candidate: BuiltCandidate,
    *,
    write: Callable[[str], str] = escape_markdown,
    write_name: Callable[[str], str] = render_name,
) -> str:
    """Say what was done to a candidate and which layers ended in which format.

    Args:
        candidate: as it was built.
        write: makes a text from elsewhere one of the format asked for; by default Markdown.
        write_name: likewise for the name of a layer.
    """
    steps = "; ".join(write(_describe_step(step)) for step in candidate.steps) or "none"
    sentences = [f"Steps: {steps}."]
    if candidate.coverage:
        total = sum(layer.num_bytes for layer in candidate.coverage)
        asked = [layer for layer in candidate.coverage if layer.asked]
        formats = sorted({layer.format for layer in asked})
        numbers = Counter(layer.format for layer in asked)
        counts = [f"{format_num(numbers[f], 'layer', 'layers')} {write(f)}" for f in formats]
        counts.append(f"{len(candidate.coverage) - len(asked)} excluded")
        sentences.append(
            f"Coverage: {', '.join(counts)}; the former hold "
            f"{_mib(sum(layer.num_bytes for layer in asked))} MiB of {_mib(total)} MiB."
        )
    sentences += [
        f"Fallback: {names}: {write(reason)}." for reason, names in _list_fallbacks(candidate.fallbacks, write_name)
    ]
    return " ".join(sentences)


def _list_fallbacks(fallbacks: Sequence[Fallback], write_name: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield each reason with the layers that it is given for: one often holds for a layer of every block."""
    for reason in dict.fromkeys(fallback.reason for fallback in fallbacks):
        layers = [write_name(fallback.layer) for fallback in fallbacks if fallback.reason == reason]
        more = len(layers) - _MAX_NAMED
        yield reason, ", ".join(layers[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


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
