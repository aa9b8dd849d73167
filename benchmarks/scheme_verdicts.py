"""What does the gate say of every scheme? Each preset is made, served, asked all evals and judged, as a candidate is.

Takes a product of kind `text` from params.yaml, and gives its reference a candidate a scheme, rounded to nearest, and
one with an FP8 cache. Finished ones are kept in the build folder: after a kill the same command goes on. CPU seconds
are those of this process and its servers. Whether a scheme was emulated is what its server said.

    python -m benchmarks.scheme_verdicts [--product agent] [--schemes NAME ...] [--build build/schemes]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.gate.compare import ReleaseComparison, compare_release
from pipeline.gate.wording import format_value, use_metrics
from pipeline.products.params import choose_product, load_params
from pipeline.products.text.evals.evaluate import evaluate_candidate
from pipeline.products.text.findings import TextAuditor
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import CandidateSettings, TextProduct
from pipeline.products.text.step_settings import Calibration, KvCache, QuantizeStep
from pipeline.records.files import write_text
from pipeline.records.verdicts import Metric, Verdict

CALIBRATION = Calibration(
    sources=["prose", "tool_calls", "workflows"], num_samples=64, max_tokens=512, length_exponent=1
)
CACHED = "FP8_DYNAMIC_FP8_KV"

T = TypeVar("T")


def main() -> None:
    """Print two tables: a row a scheme, and task completion by bucket."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--product")
    parser.add_argument("--schemes", nargs="+", choices=(*PRESETS, CACHED), default=(*PRESETS, CACHED))
    parser.add_argument("--build", type=Path, default=Path("build/schemes"))
    options = parser.parse_args()
    product = make_product(choose_product(load_params(), options.product, kind=TextProduct), options.schemes)
    seconds = {name: run(name, product, options.build) for name in product.candidates}
    with use_metrics(product.metrics):
        compared = compare_release(product, TextAuditor(), options.build)
        print_tables(compared, product, seconds)


def make_product(shipped: TextProduct, names: list[str]) -> TextProduct:
    """Return a product whose candidates are its reference and a scheme each, of which none is released."""
    reference = shipped.candidates[shipped.reference]
    candidates = {shipped.reference: reference}
    candidates |= {name: CandidateSettings(checkpoint=reference.checkpoint, steps=[_make_step(name)]) for name in names}
    benchmark = shipped.benchmark.model_copy(update={"candidates": []})
    gate = shipped.gate.model_copy(update={"loosened": {}})
    changes = {"candidates": candidates, "release": [], "benchmark": benchmark, "gate": gate}
    return shipped.model_copy(update=changes)


def run(name: str, product: TextProduct, build: Path) -> tuple[float, float]:
    """Make and evaluate a candidate that is not there yet; return the CPU seconds of both."""
    kept = build / f"{name}.json"
    if not kept.is_file():
        made = _time(lambda: build_candidate(name, product, root=Path(), build=build))
        candidate = read_candidate(build, name, product)
        asked = _time(lambda: asyncio.run(evaluate_candidate(candidate, product, root=Path(), build=build)))
        write_text(kept, json.dumps([made, asked]))
    made, asked = json.loads(kept.read_text(encoding="utf-8"))
    return made, asked


def print_tables(compared: ReleaseComparison, product: TextProduct, seconds: dict[str, tuple[float, float]]) -> None:
    """Print what was measured of each scheme, and task completion by bucket with its 95 % intervals."""
    judgement = compared.judgement
    shown = [name for name in product.gate.tolerances] + list(product.gate.tripwires)
    print("| scheme | MB | " + " | ".join(shown) + " | emulated | CPU s to make | to evaluate | verdict |")
    print("|---|---:|" + "---:|" * len(shown) + "---|---:|---:|---|")
    rows: list[tuple[str, tuple[Metric, ...], Verdict | None]] = [
        (product.reference, judgement.reference_metrics, None),
        *((verdict.candidate, verdict.metrics, verdict) for verdict in judgement.verdicts),
    ]
    for name, metrics, verdict in rows:
        evidence = compared.findings[name].evidence if verdict else None
        size = f"{evidence.candidate.checkpoint.num_bytes / 1e6:.2f}" if evidence else ""
        cells = [_format(metrics, metric, None) for metric in shown]
        emulated = ", ".join(verdict.facts.get("engine", {}).get("imitated", {})) if verdict else ""
        outcome = verdict.outcome if verdict else ""
        times = " | ".join(f"{each:.0f}" for each in seconds[name])
        print(f"| {name} | {size} | {' | '.join(cells)} | {emulated} | {times} | {outcome} |")
    headline = shown[0]
    buckets = [m.bucket for m in judgement.reference_metrics if m.name == headline and m.bucket]
    print(f"\n{headline} by bucket:\n\n| scheme | {' | '.join(buckets)} |\n|---|" + "---:|" * len(buckets))
    for name, metrics, _ in rows:
        print(f"| {name} | {' | '.join(_format(metrics, headline, bucket) for bucket in buckets)} |")


def _format(metrics: tuple[Metric, ...], name: str, bucket: str | None) -> str:
    found = next((m for m in metrics if (m.name, m.bucket) == (name, bucket)), None)
    if found is None:
        return ""
    ends = [format_value(name, end) for end in (found.low, found.high) if end is not None]
    return format_value(name, found.value) + (f" ({' to '.join(ends)})" if ends else "")


def _make_step(name: str) -> QuantizeStep:
    cache = KvCache(dtype="fp8") if name == CACHED else None
    scheme = "FP8_DYNAMIC" if cache else name
    calibration = CALIBRATION if cache or PRESETS[scheme].needs_calibration else None
    return QuantizeStep(kind="quantize", scheme=scheme, kv_cache=cache, calibration=calibration)


def _time(work: Callable[[], T]) -> float:
    before = _read_cpu_seconds()
    work()
    return _read_cpu_seconds() - before


def _read_cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
