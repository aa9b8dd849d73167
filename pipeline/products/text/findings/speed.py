"""From timed rounds to a verdict over the grid: where the candidate is faster, where it is slower.

Each number is the median over the rounds, with the interval of `medians` (six rounds: smallest to largest,
96.9 %). Ratios are taken within a round,
where both sides answered the same prompts in the same minute. A cell is faster, or slower, when the whole
interval of its throughput's ratio is above, or below, 1; each cell speaks for itself, with no correction for
their number.

Pure Python: the stage that decides the exit code reads speeds here. Not covered: the times of single requests.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.products.text.benchmark.prefix_cache import find_prefix_cache_hits
from pipeline.records.benchmarks import Benchmark, Cell, Work
from pipeline.records.medians import MedianInterval, bound_median, cover_median
from pipeline.records.record_files import read_record
from pipeline.records.verdicts import PairedMedians, Speed, SpeedCell


def load_benchmark(build: Path, name: str, work: Work, fingerprints: tuple[str, str]) -> Benchmark:
    """Read a benchmark and check that it is about this work and these two endpoints.

    Args:
        build: the folder that holds `benchmarks/`.
        name: of the candidate.
        work: what params.yaml asks for.
        fingerprints: of the reference and the candidate, as they were evaluated.

    Raises:
        EvidenceError: there is none, it was refused, it is about something else, or a server knew the prompts.
    """
    path = build / "benchmarks" / f"{name}.json"
    benchmark = read_record(path, Benchmark)
    if benchmark.refusal is not None:
        raise EvidenceError(f"benchmark of {name}: {benchmark.refusal}")
    if benchmark.name != name or benchmark.work != work:
        raise EvidenceError(
            f"{path}: expected {name!r} timed on the work that params.yaml asks for, got "
            f"{benchmark.name!r} on {benchmark.work.model_dump(mode='json')}; run `dvc repro`"
        )
    if problem := _find_gap(benchmark):
        raise EvidenceError(f"{path}: {problem}; run `dvc repro`")
    for role, expected in zip(("reference", "candidate"), fingerprints, strict=True):
        side = getattr(benchmark, role)
        if side is None or side.fingerprint != expected:
            timed = side.fingerprint[:12] if side else "none"
            raise EvidenceError(
                f"{path}: expected the {role} that was evaluated ({expected[:12]}), found {timed}; run `dvc repro`"
            )
        if hits := find_prefix_cache_hits(side.probes, work.prompt_tokens, role=role, name=name):
            raise EvidenceError(f"benchmark of {name}: {hits}")
    return benchmark


def _find_gap(benchmark: Benchmark) -> str | None:
    """Say which cell or round of the grid is missing, or is more than was asked."""
    work = benchmark.work
    asked = sorted((band, concurrency) for band in work.prompt_tokens for concurrency in work.concurrency)
    if (timed := sorted((cell.prompt_tokens, cell.concurrency) for cell in benchmark.cells)) != asked:
        return f"expected the cells {asked}, got {timed}"
    for cell in benchmark.cells:
        if {len(cell.reference), len(cell.candidate)} != {work.rounds}:
            return f"expected {work.rounds} rounds of both sides, got {len(cell.reference)} and {len(cell.candidate)}"
    return None


def judge_speed(benchmark: Benchmark) -> Speed:
    """Turn the rounds of a benchmark that was not refused into medians, intervals and outcomes."""
    assert benchmark.reference is not None and benchmark.candidate is not None
    return Speed(
        cells=tuple(map(_judge_cell, benchmark.cells)),
        confidence=cover_median(benchmark.work.rounds)[1],
        reference_peak_memory_mib=benchmark.reference.peak_memory_mib,
        candidate_peak_memory_mib=benchmark.candidate.peak_memory_mib,
        reference_gpu_memory_mib=benchmark.reference.gpu_memory_mib,
        candidate_gpu_memory_mib=benchmark.candidate.gpu_memory_mib,
    )


def _judge_cell(cell: Cell) -> SpeedCell:
    throughput = _pair(cell, "throughput_tokens_per_s")
    ratio = throughput.ratio
    return SpeedCell(
        concurrency=cell.concurrency,
        prompt_tokens=cell.prompt_tokens,
        throughput_tokens_per_s=throughput,
        ttft_ms=_pair(cell, "ttft_ms"),
        inter_token_latency_ms=_pair(cell, "inter_token_latency_ms"),
        outcome="faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "no difference shown",
    )


def _pair(cell: Cell, name: str) -> PairedMedians:
    ours, theirs = ([getattr(batch, name) for batch in side] for side in (cell.reference, cell.candidate))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return PairedMedians(reference=bound_median(ours), candidate=bound_median(theirs), ratio=bound_median(ratios))


def describe_slow_cell(cell: SpeedCell, speed: Speed, max_slowdown: float) -> str:
    """Say by how much a cell is too slow."""
    return (
        f"{name_cell(cell)}: throughput is {format_ratio(cell.throughput_tokens_per_s.ratio)} of the reference's "
        f"({speed.confidence:.1%} interval), expected {1 - max_slowdown:g} or more (benchmark.max_slowdown)"
    )


def describe_speed(speed: Speed) -> str:
    """Say in one sentence where the candidate wins and where it loses."""
    parts = []
    for outcome in ("faster", "slower"):
        cells = [name_cell(cell) for cell in speed.cells if cell.outcome == outcome]
        parts.append(
            f"{outcome} in {len(cells)} of {len(speed.cells)} cells" + (f" ({'; '.join(cells)})" if cells else "")
        )
    return ", ".join(parts)


def name_cell(cell: SpeedCell) -> str:
    """Name a cell of the grid."""
    return f"{cell.concurrency} in flight, {cell.prompt_tokens[0]} to {cell.prompt_tokens[1]} prompt tokens"


def format_ratio(ratio: MedianInterval) -> str:
    """Write a ratio with its interval: "0.94 (0.91 to 0.98)"; a third digit where two would read as no difference."""
    digits = 2 if all(round(x, 2) != 1 or x == 1 for x in (ratio.low, ratio.high)) else 3
    return f"{ratio.median:.{digits}f} ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
