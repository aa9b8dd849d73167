"""What likelihood evals cost through the endpoint, against lm-eval's own `hf` model.

    python -m benchmarks.likelihood_cost <candidate>

Runs the perplexity and harness evals of a candidate's product twice, each side in processes
of its own: as the evaluate stage does, and with lm-eval's HFLM at batch size 16 on the same folder,
texts and context length. Prints CPU seconds (user + system, servers and imports included) and how far
the numbers are apart. Each side also runs once with no evals: that is its start-up, which the endpoint
pays once for all evals, of which most are not likelihoods. One torch thread per process on both sides.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH_SIZE = 16


def main(argv: list[str]) -> int:
    """Run both sides and print the comparison."""
    if not argv:
        sys.exit("usage: python -m benchmarks.likelihood_cost <candidate>")
    if argv[1:2] == ["--side"]:
        {"endpoint": run_endpoint, "hf": run_hf}[argv[2]](*_load(argv[0], with_evals=argv[3:] != ["--idle"]))
        return 0
    idle = {side: run_side(argv[0], side, "--idle")["cpu_s"] for side in ("endpoint", "hf")}
    results = {side: run_side(argv[0], side) for side in ("endpoint", "hf")}
    ours, theirs = results["endpoint"], results["hf"]
    for name, nlls in theirs["nll_nats"].items():
        sizes = ours["num_tokens"][name]
        worst = max(abs(a - b) / n for a, b, n in zip(ours["nll_nats"][name], nlls, sizes, strict=True))
        print(
            f"{name}: {len(nlls)} documents, {sum(sizes):.0f} tokens, "
            f"largest difference {worst:.1e} nat per token of a document"
        )
    for name, accuracy in theirs["accuracy"].items():
        num_changed = sum(a != b for a, b in zip(ours["accuracy"][name], accuracy, strict=True))
        print(f"{name}: {len(accuracy)} cases, {num_changed} judged differently")
    for side, result in results.items():
        print(f"{side}: {result['cpu_s']:.1f} CPU s, of which start-up {idle[side]:.1f}; {result['wall_s']:.1f} s wall")
    work = [result["cpu_s"] - idle[side] for side, result in results.items()]
    print(
        f"ratio of CPU seconds: {work[0] / work[1]:.2f} for the evals, "
        f"{ours['cpu_s'] / theirs['cpu_s']:.2f} with start-up"
    )
    return 0


def run_side(candidate: str, side: str, *options: str) -> dict[str, Any]:
    """Run one side in its own process; return what it printed last, with its cost."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.likelihood_cost", candidate, "--side", side, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout.splitlines()[-1]), "cpu_s": cpu, "wall_s": time.monotonic() - start}


def run_endpoint(candidate: Any, product: Any) -> None:
    """Evaluate as the stage does, into a temporary folder."""
    from pipeline.products.text.evals.evaluate import evaluate_candidate
    from pipeline.records.evaluations import read_cases

    with tempfile.TemporaryDirectory() as temporary:
        build = Path(temporary)
        asyncio.run(evaluate_candidate(candidate, product, root=Path(), build=build))
        folder = build / "evaluations" / candidate.name
        records = {eval_name: read_cases(folder / f"{eval_name}.jsonl") for eval_name in product.evals}
    kinds = {eval_name: settings.kind for eval_name, settings in product.evals.items()}
    result = {
        score: {e: [r.scores[score] for r in rs] for e, rs in records.items() if kinds[e] == kind}
        for score, kind in (("nll_nats", "perplexity"), ("num_tokens", "perplexity"), ("accuracy", "harness"))
    }
    print(json.dumps(result))


def run_hf(candidate: Any, product: Any) -> None:
    """Evaluate with lm-eval's own model class."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from pipeline.evalsets.cards import load_evalset

    torch.set_num_threads(1)
    serving = candidate.serving
    model = HFLM(
        pretrained=candidate.checkpoint.path,
        dtype=serving.dtype,
        batch_size=BATCH_SIZE,
        device="cpu",
        max_length=serving.context_length,
    )
    result: dict[str, dict[str, list[float]]] = {"nll_nats": {}, "accuracy": {}}
    for eval_name, settings in product.evals.items():
        if settings.kind == "perplexity":
            texts = [case.text for case in load_evalset(Path(settings.evalset)).cases]
            requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
            result["nll_nats"][eval_name] = [-x for x in model.loglikelihood_rolling(requests)]
        elif settings.kind == "harness":
            manager = TaskManager(include_path=settings.include_path, include_defaults=settings.include_path is None)
            output = simple_evaluate(
                model=model,
                tasks=[settings.task],
                num_fewshot=settings.num_fewshot,
                task_manager=manager,
                log_samples=True,
                bootstrap_iters=0,
            )
            result["accuracy"][eval_name] = [s["acc"] for s in output["samples"][settings.task]]
    print(json.dumps(result))


def _load(name: str, *, with_evals: bool) -> tuple[Any, Any]:
    """Return the candidate, and the settings with likelihood evals only, or with none."""
    from pipeline.products.params import find_owner, load_params
    from pipeline.products.text.serving_config import read_candidate
    from pipeline.products.text.settings import TextProduct

    product = find_owner(load_params(), name, kind=TextProduct)
    evals = {n: s for n, s in product.evals.items() if with_evals and s.kind in ("perplexity", "harness")}
    candidate = read_candidate(product.build, name, product)
    return candidate, product.model_copy(update={"evals": evals})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
