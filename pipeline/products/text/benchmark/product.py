"""Time the candidates of a product that its settings name; one that was timed just so before is taken over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.products.text.benchmark.matched_work import run_benchmark
from pipeline.products.text.settings import TextProduct
from pipeline.records.benchmarks import Benchmark
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.record_files import read_record, write_record
from pipeline.running.stage_code import digest_code


def benchmark_product(product: TextProduct, *, root: Path, build: Path) -> list[str]:
    """Write `benchmarks/<candidate>.json` for each candidate under `build`, and remove those of others.

    Args:
        product: whose candidates.
        root: project root.
        build: folder of the product's results.

    Returns:
        A line on each candidate.

    Raises:
        SettingsError: too few prompts, or one server for both sides.
        EvidenceError: a candidate or an evaluation is missing, or not what was written.
        EngineError: a server did not come up, died or did not answer.
    """
    folder, names = build / "benchmarks", product.benchmark.candidates
    for path in folder.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    return [_benchmark(name, product, folder / f"{name}.json", root=root, build=build) for name in names]


def _benchmark(name: str, product: TextProduct, path: Path, *, root: Path, build: Path) -> str:
    key = _digest_work(name, product, build)
    benchmark = _read(path)
    how = "taken over"
    if benchmark is None or benchmark.key != key or benchmark.refusal:  # its cause may be gone
        benchmark = asyncio.run(run_benchmark(name, product, root=root, build=build)).model_copy(update={"key": key})
        write_record(path, benchmark)
        how = f"timed in {benchmark.work.rounds} rounds"
    if benchmark.refusal:
        return f"{name}: refused: {benchmark.refusal}"
    return f"{name}: {len(benchmark.cells)} cells {how}"


def _read(path: Path) -> Benchmark | None:
    try:
        return read_record(path, Benchmark)
    except EvidenceError:
        return None


def _digest_work(name: str, product: TextProduct, build: Path) -> str:
    """Return the digest of what is timed: work, cache and code, and both sides as they were built and evaluated."""
    sides = [
        build / folder / side / file
        for side in (product.reference, name)
        for folder, file in (("candidates", "candidate.json"), ("evaluations", "evaluation.json"))
    ]
    return digest_json(
        [
            product.benchmark.build_work().model_dump(mode="json"),
            product.resources.kv_cache_gib,
            digest_code("benchmark", "text"),
            *(digest_file(path) if path.is_file() else "" for path in sides),
        ]
    )
