"""lm-eval's own command line gives our numbers: `python -m benchmarks.check_perplexity [candidate ...]`.

Runs `python -m lm_eval --model hf` on the folder of every candidate (or of those named) for the
likelihood evals of params.yaml, which are also lm-eval tasks: `<evalset>/<eval>.yaml`. Its bits per byte,
as nat per token, must agree with the endpoint's records within 1e-5, and every multiple-choice
question must be judged alike. Where inputs are rounded while it runs, it is 1e-3, and 99 % of the
questions. Proves that windows, prefix token, split of context and answer, and the log-likelihoods
themselves are those of lm-eval, and that the folder holds what was evaluated.

Not for a checkpoint whose tokenizer adds BOS or EOS by itself: there lm-eval counts the probability of a second BOS,
and takes the first token of an answer for one of its question.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.products.params import find_owner, load_params
from pipeline.products.text.model_config import read_config
from pipeline.products.text.schemes import unpacks_to_bfloat16
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import HarnessEval, PerplexityEval, TextProduct
from pipeline.records.evaluations import Candidate, CaseRecord, Evaluation, read_cases
from pipeline.records.fingerprints import find_difference
from pipeline.records.record_files import read_record
from pipeline.running.hub import locate_checkpoint

TASKS = Path("evalsets")  # lm-eval looks for task files in all folders below; it skips the cards
BATCH_SIZE = 16
# nats a token in float32, and share of questions; a looser bound would take one INT4 candidate for another
LIMITS = (1e-5, 0.0)
# where inputs are rounded while it runs, sums in another order move some across a step
ROUNDED_LIMITS = (1e-3, 0.01)


def main() -> int:
    """Compare every candidate, print a line per eval; 1 when a number differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("candidates", nargs="*", help="default: all of kind text in params.yaml")
    params = load_params()
    names = parser.parse_args().candidates or [
        name for product in params.products.values() if isinstance(product, TextProduct) for name in product.candidates
    ]
    num_wrong = sum(not compare(name, find_owner(params, name, kind=TextProduct)) for name in names)
    print(f"{len(names)} candidates, {num_wrong} differ from lm-eval")
    return 1 if num_wrong else 0


def compare(name: str, product: TextProduct) -> bool:
    """Run lm-eval on one candidate's folder and tell whether its numbers are ours."""
    candidate = read_candidate(product.build, name, product)
    folder = product.build / "evaluations" / name
    served_by = read_record(folder / "evaluation.json", Evaluation).served_by
    if difference := find_difference(candidate.facts, served_by):
        sys.exit(f"{folder}: {difference.field}: expected that of the candidate as it is now; run `dvc repro`")
    settings = read_config(locate_checkpoint(candidate.checkpoint.path, Path())).get("quantization_config") or {}
    if candidate.serving.dtype != "bfloat16" and unpacks_to_bfloat16(settings):
        print(f"{name}: not compared: transformers unpacks it into bfloat16 alone, it was served in another type")
        return True
    limits = ROUNDED_LIMITS if candidate.checkpoint.rounded else LIMITS
    evals = {e: s for e, s in product.evals.items() if isinstance(s, PerplexityEval | HarnessEval)}
    tasks = {e: s.task if isinstance(s, HarnessEval) else e for e, s in evals.items()}
    results, samples = run_lm_eval(candidate, list(tasks.values()))
    agrees = True
    for eval_name, task in tasks.items():
        records = read_cases(folder / f"{eval_name}.jsonl")
        if isinstance(evals[eval_name], PerplexityEval):
            agrees &= compare_likelihood(f"{name} {eval_name}", records, results[task]["bits_per_byte,none"], limits[0])
        else:
            agrees &= compare_answers(f"{name} {eval_name}", records, samples[task], limits[1])
    return agrees


def compare_likelihood(title: str, records: list[CaseRecord], bits_per_byte: float, limit: float) -> bool:
    """Compare the mean negative log-likelihood of a token."""
    num_tokens = math.fsum(r.scores["num_tokens"] for r in records)
    ours = math.fsum(r.scores["nll_nats"] for r in records) / num_tokens
    theirs = bits_per_byte * math.log(2) * math.fsum(r.scores["num_bytes"] for r in records) / num_tokens
    print(
        f"{title}: {ours:.7f} nat per token, lm-eval {theirs:.7f}, difference {abs(ours - theirs):.1e} "
        f"({len(records)} documents, {num_tokens:.0f} tokens)",
        flush=True,
    )
    return abs(ours - theirs) < limit


def compare_answers(title: str, records: list[CaseRecord], samples: list[dict[str, Any]], limit: float) -> bool:
    """Compare the judgement of every question."""
    ours = [r.scores["accuracy"] for r in records]
    theirs = [float(s["acc"]) for s in sorted(samples, key=lambda s: s["doc_id"])]
    num_different = sum(a != b for a, b in zip(ours, theirs, strict=True))
    print(
        f"{title}: accuracy {sum(ours) / len(ours):.4f}, lm-eval {sum(theirs) / len(theirs):.4f}, "
        f"{num_different} of {len(ours)} questions judged differently",
        flush=True,
    )
    return num_different <= limit * len(ours)


def run_lm_eval(candidate: Candidate, tasks: list[str]) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run lm-eval's command line; return its results and its samples by task."""
    serving = candidate.serving
    model = f"pretrained={candidate.checkpoint.path},dtype={serving.dtype},max_length={serving.context_length}"
    with tempfile.TemporaryDirectory() as temporary:
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "hf",
            "--model_args",
            model,
            "--tasks",
            ",".join(tasks),
            "--include_path",
            str(TASKS),
            "--batch_size",
            str(BATCH_SIZE),
            "--device",
            "cpu",
            "--log_samples",
            "--output_path",
            temporary,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(serving.num_threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{candidate.name}: lm-eval failed:\n{done.stderr[-2000:]}")
        output = next(Path(temporary).rglob("results_*.json"))
        files = {task: next(output.parent.glob(f"samples_{task}_*.jsonl")) for task in tasks}
        # not splitlines: a text may hold line separators of its own
        texts = {task: path.read_text(encoding="utf-8").rstrip("\n").split("\n") for task, path in files.items()}
        samples = {task: [json.loads(line) for line in lines] for task, lines in texts.items()}
        return json.loads(output.read_text())["results"], samples


if __name__ == "__main__":
    sys.exit(main())
