"""vLLM on a GPU through the project's own engine: speed, memory and kernels by number format, and what drafts change.

Serves a checkpoint in bfloat16, in FP8 (which vLLM makes while it loads) and in INT4 (a folder that a quantising step
made). Prints a table: tokens/s by requests in flight, TTFT and inter-token latency (medians), GPU memory, the kernels
that vLLM dispatched, and for one request in flight the share of the memory bandwidth: bytes of weights that a token
reads over its latency, against a copy on the same GPU. Each request must give the asked number of tokens.

With `--speculation` the checkpoint is also served with a draft model and with prompt lookup, in bfloat16 and float16:
acceptance, and how many greedy answers differ from the same server's without drafts, beside how many differ when that
one is asked twice.

    python -m benchmarks.vllm_on_gpu CHECKPOINT --command vllm serve --version 0.26.0 [--int4 FOLDER]
        [--variants bf16 fp8 int4] [--draft FOLDER --speculation draft ngram] [--tensor-parallel-size 2]
        [--limit-s 540] --output FOLDER

A start that fails costs its own row only. Not covered: sampling, quality (random weights have none).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm_runs import (
    answer,
    compare_answers,
    count_weight_bytes,
    make_prompts,
    measure_copy_gb_per_s,
    measure_speed,
)
from pipeline.evalsets.cases import spread
from pipeline.products.params import load_params
from pipeline.products.text.benchmark.audits import read_gpu_memory_mib
from pipeline.products.text.benchmark.prompts import load_prompts
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving.vllm_facts import read_drafts
from pipeline.products.text.settings import ResourceSettings, TextProduct, VllmEngine
from pipeline.records.digests import digest_checkpoint
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig

VARIANTS = ("bf16", "fp8", "int4")
SPECULATION = ("draft", "ngram")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
NUM_DRAFTED = 4


@dataclass(frozen=True)
class Run:
    """One start of vLLM."""

    name: str
    folder: Path
    dtype: str = "bfloat16"
    quantization: str | None = None
    speculative: SpeculativeConfig | None = None
    plain: str | None = None  # the run whose answers are those without drafts


def plan_runs(arguments: argparse.Namespace) -> list[Run]:
    """Return the starts that were asked for: the plain one of a number format comes before those with drafts."""
    folder: Path = arguments.checkpoint
    variants = {
        "bf16": Run("bf16", folder),
        "fp8": Run("fp8", folder, quantization="fp8"),
        "int4": Run("int4", arguments.int4 or folder),
    }
    runs = [variants[name] for name in arguments.variants if name != "int4" or arguments.int4]
    for name in arguments.dtypes if arguments.speculation else ():
        if name not in {run.name for run in runs}:
            runs.append(Run(name, folder, DTYPES[name]))
        runs += [
            Run(f"{name} {method}", folder, DTYPES[name], None, _draft(method, arguments.draft), plain=name)
            for method in arguments.speculation
        ]
    return runs


def _draft(method: str, folder: Path | None) -> SpeculativeConfig:
    if method == "ngram":
        options = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return SpeculativeConfig(method="prompt_lookup", num_tokens=NUM_DRAFTED, options=options)
    if folder is None:
        raise SystemExit("--speculation draft: expected a draft model, got none; name its folder with --draft")
    path = str(folder.resolve())
    return SpeculativeConfig(
        method="draft_model", num_tokens=NUM_DRAFTED, draft_digest=digest_checkpoint(folder), draft_path=path
    )


def build_candidate(run: Run, arguments: argparse.Namespace) -> Candidate:
    """Return what the engine is asked to serve."""
    options: dict[str, Any] = {"gpu-memory-utilization": arguments.memory, "max-num-seqs": max(arguments.in_flight)}
    if run.quantization:
        options["quantization"] = run.quantization
    engine = VllmEngine(
        kind="vllm",
        command=arguments.command,
        version=arguments.version,
        options=options | json.loads(arguments.options),
        report_kernels=not arguments.no_kernels,
        tensor_parallel_size=arguments.tensor_parallel_size,
    )
    serving = ServingConfig(
        engine="vllm",
        dtype=run.dtype,
        concurrency=max(arguments.in_flight),
        context_length=arguments.context_length,
        speculative=run.speculative,
        **engine.build_serving(),
    )
    checkpoint = read_checkpoint(run.folder, root=Path.cwd())
    return Candidate(name=run.name.replace(" ", "-"), checkpoint=checkpoint, serving=serving)


async def measure(run: Run, arguments: argparse.Namespace, answers: dict[str, list[Reply]]) -> dict[str, Any]:
    """Start vLLM, measure, and stop it; keep its answers for the runs with drafts."""
    start = time.monotonic()
    resources = ResourceSettings(num_servers=1, request_timeout_s=300, start_timeout_s=arguments.start_timeout_s)
    candidate = build_candidate(run, arguments)
    logs = arguments.output / "logs" / candidate.name
    async with start_engine(candidate, resources, evals={}, root=Path.cwd(), logs=logs) as (engine, client):
        result: dict[str, Any] = {"name": run.name, "start_s": round(time.monotonic() - start, 1)}
        print(f"{run.name}: ready after {result['start_s']} s", file=sys.stderr, flush=True)
        result |= {"kernels": engine.facts["engine"].get("kernels", {}), "resolved": engine.facts["engine"]}
        result["speed"] = []
        for number in arguments.in_flight:
            cell = await measure_speed(engine, concurrency=number, num_tokens=arguments.num_tokens, seed=number)
            result["speed"].append(cell)
            print(f"{run.name}: {cell}", file=sys.stderr, flush=True)
        result["gpu_memory_mib"] = read_gpu_memory_mib(p.popen.pid for p in engine.processes)
        if arguments.speculation:
            prompts = choose_prompts(arguments)
            answers[run.name] = await answer(client, prompts)
            if run.plain is None:
                result["asked_twice"] = compare_answers(answers[run.name], await answer(client, prompts))
            elif run.plain in answers:
                result["against_plain"] = compare_answers(answers[run.plain], answers[run.name])
        if run.speculative:
            counts = read_drafts(await client.get_text("/metrics"), run.speculative)
            result["drafts"] = counts and counts.model_dump() | {"acceptance": round(counts.acceptance_rate, 4)}
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def choose_prompts(arguments: argparse.Namespace) -> list[Any]:
    """Return the prompts whose answers are compared: first turns of a product's evals, or random words."""
    if not arguments.product:
        return make_prompts(arguments.num_prompts, seed=0)
    product = load_params().products[arguments.product]
    assert isinstance(product, TextProduct)
    return [prompt.content for prompt in spread(load_prompts(product, Path()), arguments.num_prompts)]


def add_bandwidth(result: dict[str, Any], run: Run, copy_gb_per_s: float | None, *, num_gpus: int) -> None:
    """Add the bytes of weights that a token reads of each GPU, and their share of its bandwidth for one request."""
    num_bytes = count_weight_bytes(run.folder, linear_bytes=1 if run.quantization == "fp8" else None)
    result["weight_gb"] = num_bytes / num_gpus / 1e9
    single = next((cell for cell in result["speed"] if cell["in_flight"] == 1), None)
    if single and copy_gb_per_s and run.speculative is None:
        result["bandwidth_share"] = round(result["weight_gb"] / (single["itl_ms"] / 1e3) / copy_gb_per_s, 3)


def render(results: Sequence[dict[str, Any]], copy_gb_per_s: float | None) -> str:
    """Return the tables as Markdown."""
    lines = [f"Copy on the GPU: {copy_gb_per_s and round(copy_gb_per_s)} GB/s, read and written.", ""]
    lines += ["| run | in flight | tokens/s | TTFT ms | ITL ms | as asked | weights GB | bandwidth share | GPU MiB |"]
    lines += ["|---|" + "---:|" * 8]
    for result in results:
        for cell in result.get("speed", ()):
            share = result.get("bandwidth_share", "–") if cell["in_flight"] == 1 else ""
            lines.append(
                f"| {result['name']} | {cell['in_flight']} | {cell['tokens_per_s']:,.0f} | {cell['ttft_ms']:.1f} | "
                f"{cell['itl_ms']:.2f} | {cell['num_as_asked']} of {cell['num_requests']} | "
                f"{result.get('weight_gb', 0):.2f} | {share} | {result.get('gpu_memory_mib')} |"
            )
    lines.append("")
    for result in results:
        notes = {
            key: result[key]
            for key in ("failure", "kernels", "drafts", "asked_twice", "against_plain")
            if result.get(key)
        }
        lines += [f"- {result['name']} ({result.get('seconds', '–')} s): {key}: {note}" for key, note in notes.items()]
    return "\n".join(lines) + "\n"


async def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one start after another until the time is over; write the results after each."""
    begin, text = time.monotonic(), ""
    results: list[dict[str, Any]] = []
    answers: dict[str, list[Reply]] = {}
    copy_gb_per_s = measure_copy_gb_per_s()
    print(f"copy: {copy_gb_per_s} GB/s, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    for run in plan_runs(arguments):
        left_s = arguments.limit_s - (time.monotonic() - begin)
        try:
            async with asyncio.timeout(max(left_s, 0)):
                result = await measure(run, arguments, answers)
            add_bandwidth(result, run, copy_gb_per_s, num_gpus=arguments.tensor_parallel_size)
        except Exception as error:  # the others are still worth having
            cause = f"over --limit-s {arguments.limit_s:g}" if isinstance(error, TimeoutError) else str(error)
            result = {"name": run.name, "failure": f"{type(error).__name__}: {cause}"[:500]}
            print(f"{run.name}: {result['failure']}", file=sys.stderr, flush=True)
        results.append(result)
        text = render(results, copy_gb_per_s)
        (arguments.output / "vllm.md").write_text(text, encoding="utf-8")
        data = {"copy_gb_per_s": copy_gb_per_s, "runs": results}
        (arguments.output / "vllm.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(text)
    return results


def main() -> int:
    """Measure; end with 1 when a run failed or did other work than was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--command", nargs="+", default=["vllm", "serve"], help="that runs `vllm serve`")
    parser.add_argument("--version", default="0.26.0")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument(
        "--int4",
        type=Path,
        help="checkpoint folder of the same model in INT4, as build/PRODUCT/candidates/NAME/checkpoint",
    )
    parser.add_argument("--draft", type=Path, help="folder of the draft model")
    parser.add_argument("--speculation", nargs="*", choices=SPECULATION, default=())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES), help="of --speculation")
    parser.add_argument("--in-flight", nargs="+", type=int, default=(1, 16, 64))
    parser.add_argument("--num-tokens", type=int, default=128, help="completion tokens of a timed request")
    parser.add_argument("--num-prompts", type=int, default=64, help="that are answered with drafts and without")
    parser.add_argument("--product", help="whose evals' first turns these are; else random words")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--options", default="{}", help="further options of `vllm serve`, as JSON")
    parser.add_argument("--no-kernels", action="store_true", help="the command does not keep PYTHONPATH")
    parser.add_argument("--start-timeout-s", type=float, default=240)
    parser.add_argument("--limit-s", type=float, default=540)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(run_all(arguments))
    cells = [cell for result in results for cell in result.get("speed", ())]
    as_asked = all(cell["num_as_asked"] == cell["num_requests"] for cell in cells)
    return 0 if as_asked and not any("failure" in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
