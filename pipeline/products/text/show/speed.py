"""The part of the report about speed: the grid, how it was measured, on which machine, and what the audits found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.wording import escape_markdown
from pipeline.products.text.benchmark.prefix_cache import LEAST_RATIO, bound_known_ttft
from pipeline.products.text.findings.speed import format_ratio
from pipeline.records.benchmarks import Benchmark, Machine, Side
from pipeline.records.evaluations import OUTGROWN, CaseRecord
from pipeline.records.speculation import sum_speculation
from pipeline.records.verdicts import PairedMedians, Speed
from pipeline.report.sections import Section, Table

_HEADER = [
    "in flight",
    "prompt tokens",
    "throughput, tokens/s",
    "candidate / reference",
    "TTFT, ms",
    "candidate / reference",
    "inter-token latency, ms",
    "candidate / reference",
    "outcome",
]
_MOST_APART = 0.1  # acceptance in the timed work and in the evals, before they are called different work


def build_speed_section(findings: CandidateFindings, here: Machine | None) -> Section | None:
    """Return the grid and how its numbers came about; None where nothing was timed.

    Args:
        findings: on a candidate.
        here: the machine that the report is written on; None when that is not known.
    """
    if findings.benchmark is None or findings.speed is None:
        return None
    answers = [r for records in (findings.evidence.records.values() if findings.evidence else ()) for r in records]
    return Section(
        "Speed, beside the reference",
        [
            Table(_tabulate(findings.speed)),
            *describe_measurement(findings.benchmark, findings.speed, here, answers),
        ],
    )


def _tabulate(speed: Speed) -> list[list[str]]:
    """Return the rows of the grid's table: of each number the reference's median, the candidate's and the ratio."""
    rows = [_HEADER, ["---:"] * (len(_HEADER) - 1) + ["---"]]
    for cell in speed.cells:
        numbers = [
            *_show(cell.throughput_tokens_per_s, 0),
            *_show(cell.ttft_ms, 1),
            *_show(cell.inter_token_latency_ms, 2),
        ]
        low, high = cell.prompt_tokens
        rows.append([str(cell.concurrency), f"{low} to {high}", *numbers, cell.outcome])
    return rows


def _show(paired: PairedMedians, digits: int) -> list[str]:
    medians = f"{paired.reference.median:,.{digits}f} → {paired.candidate.median:,.{digits}f}"
    return [medians, format_ratio(paired.ratio)]


def describe_measurement(
    benchmark: Benchmark, speed: Speed, here: Machine | None, evaluated: Sequence[CaseRecord] = ()
) -> list[str]:
    """Say how the numbers of the table came about, one paragraph each.

    Args:
        benchmark: what was measured.
        speed: what was made of it.
        here: the machine that the report is written on; None when that is not known.
        evaluated: the candidate's records: what its drafts did on the answers that it serves.
    """
    assert benchmark.reference is not None and benchmark.candidate is not None
    work, sides = benchmark.work, (benchmark.reference, benchmark.candidate)
    return [
        f"Medians of {work.rounds} rounds (reference → candidate), and {speed.confidence:.1%} intervals of the ratios "
        f"by order statistics. In each round both sides answer the same prompts with {work.num_tokens} tokens each, in "
        f"turn, the order changing from round to round. {benchmark.definitions}",
        _describe_machine(benchmark.machine, here),
        _describe_memory(benchmark.machine, sides),
        _describe_audits(benchmark, sides),
        *_describe_drafts(benchmark, evaluated),
    ]


def _describe_machine(machine: Machine, here: Machine | None) -> str:
    gpus = f", {', '.join(machine.gpus)}" if machine.gpus else ""
    where = (
        "the machine that wrote this report"
        if machine == here
        else "**another machine** than the one that wrote this report"
        if here
        else "which may not be the machine that wrote this report"
    )
    return f"Measured on {escape_markdown(machine.cpu)}, {machine.num_cores} cores{escape_markdown(gpus)}: {where}."


def _describe_memory(machine: Machine, sides: Sequence[Side]) -> str:
    peaks = _format_sizes([side.peak_memory_mib for side in sides])
    held = _format_sizes([side.gpu_memory_mib for side in sides])
    gpu = f" GPU memory that it held after the rounds: {held}." if machine.gpus else ""
    return f"Peak resident memory of a server since it started, loading included: {peaks}.{gpu}"


def _format_sizes(sizes: Sequence[float | None]) -> str:
    return " → ".join("unknown" if size is None else f"{size:,.0f} MiB" for size in sizes)


def _describe_audits(benchmark: Benchmark, sides: Sequence[Side]) -> str:
    total, changed = sum(s.num_requests for s in sides), sum(s.num_changed for s in sides)
    ours, theirs = (f"{side.repeat_ttft_ratio:.2f}" for side in sides)
    return (
        f"Audits: {total:,} timed requests with {benchmark.work.num_tokens} completion tokens and a prompt within "
        f"its band each; {changed:,} answers differ from the evaluated ones. The evals have asked these prompts: "
        f"against prompts that nobody had asked their TTFT is {_describe_cache_probes(benchmark)}, where surely less "
        f"than {LEAST_RATIO:g} would be answers from memory. No prompt is repeated in the rounds: sent once more, "
        f"prompts have {ours} (reference) and {theirs} (candidate) of their first TTFT; that a cache gains where "
        "prompts repeat, and it is in no number above."
    )


def _describe_cache_probes(benchmark: Benchmark) -> str:
    """Show the ratios that `prefix_cache` judges, of both sides in each band."""
    assert benchmark.reference is not None and benchmark.candidate is not None
    ratios = [
        (
            band,
            [format_ratio(bound_known_ttft(side.probes, band)) for side in (benchmark.reference, benchmark.candidate)],
        )
        for band in benchmark.work.prompt_tokens
    ]
    return "; ".join(
        f"{ours} (reference) and {theirs} (candidate) at {low} to {high} prompt tokens"
        for (low, high), (ours, theirs) in ratios
    )


def _describe_drafts(benchmark: Benchmark, evaluated: Sequence[CaseRecord]) -> list[str]:
    """Set the drafts of the timed work beside those of the evaluated answers."""
    assert benchmark.candidate is not None
    timed, answers = benchmark.candidate.speculation, [r for r in evaluated if r.speculation is not None]
    served = sum_speculation(r.speculation for r in answers)
    if timed is None or served is None:
        return []
    sentence = (
        f"Drafted tokens accepted: {timed.acceptance_rate:.1%} in the timed work, {served.acceptance_rate:.1%} in "
        "the evals."
    )
    if abs(timed.acceptance_rate - served.acceptance_rate) <= _MOST_APART:
        return [sentence]
    length = statistics.median(r.num_completion_tokens / count_answers(r) for r in answers)
    return [
        f"{sentence} **The timed work is not the served one**: it decodes {benchmark.work.num_tokens} tokens a "
        f"request, the evaluated answers have {length:.0f} (median), and drafts save another share of the time "
        f"there; set benchmark.num_tokens nearer to {length:.0f}."
    ]


def count_answers(record: CaseRecord) -> int:
    """Return how many answers a case took: they are the lines of its output."""
    lines = record.output.split("\n")
    return max(1, len(lines) - lines.count(OUTGROWN))
