"""What MLflow shows of a language model beside its scores: its speed, and what its path does beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.records.evaluations import Evaluation
from pipeline.records.verdicts import Speed, Verdict
from pipeline.report.presenting import JudgedRun


def format_step(step: Mapping[str, Any]) -> str:
    """Return a step in a few words."""
    words = [str(step["kind"])]
    words += [str(step[key]) for key in ("algorithm", "scheme") if step.get(key)]
    if "bits" in step:
        words += [f"int{step['bits']}", f"g{step.get('group_size')}", "sym" if step.get("symmetric") else "asym"]
    num_drafted = step.get("num_speculative_tokens", step.get("num_tokens"))  # the latter: of candidates of before
    if num_drafted is not None:
        words += [step["method"], f"k{num_drafted}"]
    return " ".join(words)


def measure_run(run: JudgedRun) -> dict[str, float]:
    """Return the metrics of a run, in the order in which they should appear."""
    speed = run.verdict.speed if run.verdict else None
    return (_name_speed(speed) if speed else {}) | _name_path(run.verdict, run.evaluation)


def _name_path(verdict: Verdict | None, evaluation: Evaluation | None) -> dict[str, float]:
    """Name what the path does beside the weights: answers of the canary that differ, drafts accepted."""
    numbers = {}
    if verdict is not None and verdict.canary is not None:
        numbers["path/canary_diverged_percent"] = 100 * verdict.canary.num_diverged / verdict.canary.num_prompts
    counts = evaluation.speculation if evaluation else None
    if counts is not None:
        numbers["path/acceptance_percent"] = 100 * counts.acceptance_rate
        numbers["path/acceptance_length"] = counts.acceptance_length
        numbers["path/target_forwards_per_token"] = counts.forwards_per_token
    return numbers


def _name_speed(speed: Speed) -> dict[str, float]:
    """Name a benchmark's medians: throughput in percent of the reference's, latencies and memory of the candidate."""
    numbers = {}
    for cell in speed.cells:
        where = f"{cell.concurrency} in flight {cell.prompt_tokens[0]}-{cell.prompt_tokens[1]} prompt tokens"
        numbers[f"speed/{where} throughput_percent_of_reference"] = 100 * cell.throughput_tokens_per_s.ratio.median
        numbers[f"speed/{where} ttft_ms"] = cell.ttft_ms.candidate.median
        numbers[f"speed/{where} inter_token_latency_ms"] = cell.inter_token_latency_ms.candidate.median
    if speed.candidate_peak_memory_mib is not None:
        numbers["speed/peak_memory_mib"] = speed.candidate_peak_memory_mib
    if speed.candidate_gpu_memory_mib is not None:
        numbers["speed/gpu_memory_mib"] = speed.candidate_gpu_memory_mib
    return numbers
