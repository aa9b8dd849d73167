"""Write a fake build/ tree: records of a reference and candidates with chosen flip rates.

The tree holds exactly what the stages `optimize` and `evaluate` leave behind, so that tests of
the gate need neither torch nor a model. Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.products.params import get_product, parse_params
from pipeline.products.text.settings import HarnessEval, PerplexityEval, TextProduct, ToolCallsEval, TrajectoriesEval
from pipeline.products.text.step_settings import Calibration, QuantizeStep
from pipeline.records.canary import CanaryAnswer, CanaryFile, CanaryRecord, count_unstable, digest_behaviour
from pipeline.records.digests import digest_file, digest_json, digest_text
from pipeline.records.evaluations import (
    BuiltCandidate,
    Candidate,
    CaseRecord,
    Checkpoint,
    EvalFile,
    Evaluation,
    Fallback,
    LayerCoverage,
    read_cases,
)
from pipeline.records.files import write_text
from pipeline.records.record_files import read_record, write_cases, write_record
from pipeline.records.serving import ServingConfig
from pipeline.settings.base import Product

PRODUCT = "agent"

STEP = QuantizeStep(
    kind="gptq", calibration=Calibration(sources=["long"], num_samples=128, max_tokens=256, length_exponent=1.0)
)
_EVALS = (
    TrajectoriesEval(kind="trajectories", evalset="evalsets/workflows", max_turns=16),
    ToolCallsEval(kind="tool_calls", evalset="evalsets/tool_calls"),
    HarnessEval(kind="harness", task="choices"),
    PerplexityEval(kind="perplexity", evalset="evalsets/prose"),
)
EVAL_SETTINGS = {
    name: settings.model_dump(mode="json")
    for name, settings in zip(("workflows", "calls", "choices", "prose"), _EVALS, strict=True)
}
EVAL_KINDS = {name: settings["kind"] for name, settings in EVAL_SETTINGS.items()}
# a grid that times nothing: settings need one
NO_BENCHMARK = {
    "candidates": [],
    "concurrency": [1, 4],
    "prompt_tokens": [[10, 20], [30, 60]],
    "num_tokens": 8,
    "rounds": 6,
}
_TOP_K = 8
CALL = '{"name": "move", "arguments": {"crate": 1, "to": "bay-1"}}'
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Behaviour:
    """How a candidate differs from the reference.

    Attributes:
        loss: chance that a case the reference solves is lost; per eval, or per "<eval>/<bucket>".
        gain: chance that a case the reference misses is solved.
        nll_shift: added to each document's nll per token, in nats.
    """

    loss: dict[str, float] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    nll_shift: float = 0.0


def make_params(
    candidates: Sequence[str], release: Sequence[str], *, benchmark: dict[str, Any] | None = None, **gate: Any
) -> TextProduct:
    """Return settings for the four evals of the tree; `benchmark` replaces parts of a grid that times nothing."""
    settings = {
        "alpha": 0.05,
        "on_inconclusive": "warn",
        "tripwires": {"prose/kl_nats_per_token": 0.02},
        "tolerances": {
            "workflows/task_completion_rate": {"overall": 0.02, "buckets": {"constraint_retention": 0.06}},
            "calls/tool_call_exact_match": {"overall": 0.02},
            "choices/accuracy": {"overall": 0.03},
            "prose/perplexity_per_token": {"overall": 0.02},
        },
    }
    product = TextProduct.model_validate(
        {
            "name": PRODUCT,
            "kind": "text",
            "reference": "reference",
            "release": list(release),
            "optimize": {"calibration_texts": "evalsets/calibration", "num_threads": 1},
            "candidates": {"reference": {"checkpoint": "models/agent", "steps": []}}
            | {name: {"checkpoint": "models/agent", "steps": [STEP.model_dump()]} for name in candidates},
            "serving": {
                "dtype": "float32",
                "continuous_batching": True,
                "concurrency": 32,
                "num_threads": 1,
                "context_length": 1024,
                "max_tokens": 128,
            },
            "resources": {"num_servers": 2, "request_timeout_s": 60.0, "start_timeout_s": 60.0},
            "canary": {"num_prompts": 100, "target_rate": 0.3},
            "evals": EVAL_SETTINGS,
            "gate": settings | gate,
            "benchmark": NO_BENCHMARK | (benchmark or {}),
        }
    )
    return get_product(parse_params(describe_project(product)), PRODUCT, kind=TextProduct)


def describe_project(*products: Product) -> dict[str, Any]:
    """Return what params.yaml says of products, less the defaults that are None."""
    described = {product.name: product.model_dump(mode="json", exclude_none=True) for product in products}
    candidates = {
        name: {"product": owner} | candidate
        for owner, product in described.items()
        for name, candidate in product.pop("candidates").items()
    }
    return {
        "products": {
            owner: {key: value for key, value in product.items() if key != "name"}
            for owner, product in described.items()
        },
        "candidates": candidates,
    }


def write_tree(build: Path, behaviours: dict[str, Behaviour], *, num_cases: int = 400, seed: int = 0) -> None:
    """Write `reference` and one candidate per behaviour under `build`."""
    for name, behaviour in {"reference": Behaviour(), **behaviours}.items():
        candidate = make_candidate(name)
        write_candidate(build, candidate)
        folder = build / "evaluations" / name
        files = {
            eval_name: _write_eval(folder, eval_name, candidate, behaviour, num_cases, seed) for eval_name in EVAL_KINDS
        }
        write_record(
            folder / "evaluation.json",
            Evaluation(
                candidate=name,
                fingerprint=candidate.fingerprint,
                checkpoint_digest=candidate.checkpoint.digest,
                serving=candidate.serving,
                evals=files,
                served_by=candidate.facts,
                canary=write_canary(folder, {}),
                seconds=1.0,
            ),
        )


def write_canary(folder: Path, answers: dict[str, dict[int, str]], *, num_prompts: int = 100) -> CanaryFile:
    """Write a canary of three equal runs, but for `answers`: by run, what it said to some prompts instead."""
    said = {run: answers.get(run, {}) for run in ("alone", "loaded", "again", *answers)}
    records = [
        CanaryRecord(
            case_id=f"calls/{i}",
            input_digest=str(i),
            margins={"loaded": (2.0, 0.05, 1.0)},
            answers={
                run: CanaryAnswer(text=other.get(i, CALL), token_ids=(7, len(other.get(i, "")), 1))
                for run, other in said.items()
            },
        )
        for i in range(num_prompts)
    ]
    write_cases(folder / "canary.jsonl", records)
    return CanaryFile(
        num_asked=num_prompts,
        num_prompts=num_prompts,
        num_unstable=count_unstable(records),
        records="canary.jsonl",
        sha256=digest_file(folder / "canary.jsonl"),
        behaviour=digest_behaviour(records),
    )


def write_candidate(build: Path, candidate: Candidate) -> None:
    """Write a candidate's record as the stage `optimize` does, without how it is served, and its one weight file."""
    folder = build / "candidates" / candidate.name
    write_record(folder / "candidate.json", BuiltCandidate(**candidate.model_dump(exclude={"serving"})))
    write_text(folder / "checkpoint" / WEIGHTS, candidate.name)


def make_candidate(name: str) -> Candidate:
    """Return a candidate whose digest follows from its name; all but the reference are quantised."""
    quantised = name != "reference"
    layers = [f"model.layers.{i}.mlp.down_proj" for i in range(28)] if quantised else []
    coverage = [
        LayerCoverage(layer=layer, format="int4-g128-symmetric", num_bytes=71_000, asked=True) for layer in layers
    ]
    coverage += [LayerCoverage(layer="lm_head", format="float32", num_bytes=3_000_000, asked=False)]
    return Candidate(
        name=name,
        serving=ServingConfig(),
        coverage=tuple(coverage),
        libraries={"torch": "2.13.0"},
        steps=(STEP.model_dump(mode="json"),) if quantised else (),
        fallbacks=(Fallback(layer="lm_head", reason="excluded by the step"),) if quantised else (),
        checkpoint=Checkpoint(
            path=f"build/{PRODUCT}/candidates/{name}/checkpoint",
            kind="llama",
            num_parameters=2_000_000,
            format="compressed-tensors" if quantised else "dense",
            dtype="float32",
            num_bytes=2_000_000 if quantised else 8_300_000,
            digest=digest_json({WEIGHTS: digest_text(name)}),
        ),
    )


def rewrite_records(
    build: Path, name: str, eval_name: str, edit: Callable[[list[CaseRecord]], list[CaseRecord]]
) -> None:
    """Change one eval's records and re-seal the index, as a broken evaluator would have written them."""
    folder = build / "evaluations" / name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    file = evaluation.evals[eval_name]
    records = edit(read_cases(folder / file.records))
    write_cases(folder / file.records, records)
    file = file.model_copy(update={"num_cases": len(records), "sha256": digest_file(folder / file.records)})
    evals = {**evaluation.evals, eval_name: file}
    write_record(folder / "evaluation.json", evaluation.model_copy(update={"evals": evals}))


def _write_eval(
    folder: Path, eval_name: str, candidate: Candidate, behaviour: Behaviour, num_cases: int, seed: int
) -> EvalFile:
    kind = EVAL_KINDS[eval_name]
    if kind == "perplexity":
        records = _documents(folder / f"{eval_name}.npz", candidate, behaviour, max(num_cases // 10, 40), seed)
    else:
        records = [_case(eval_name, kind, i, candidate, behaviour, seed) for i in range(num_cases)]
    path = folder / f"{eval_name}.jsonl"
    write_cases(path, records)
    return EvalFile(
        kind=kind,
        settings=EVAL_SETTINGS[eval_name],
        key=digest_text(kind),
        evalset_digest=digest_text(eval_name),
        num_cases=len(records),
        records=path.name,
        sha256=digest_file(path),
    )


def _case(eval_name: str, kind: str, i: int, candidate: Candidate, behaviour: Behaviour, seed: int) -> CaseRecord:
    shared = random.Random(f"{seed}/{eval_name}/{i}")  # the case: the same for every candidate
    own = random.Random(f"{seed}/{eval_name}/{i}/{candidate.name}")
    num_steps = shared.choice((2, 4, 6, 8, 12))
    buckets = [f"steps_{num_steps:02d}"] if kind == "trajectories" else []
    if kind == "trajectories" and num_steps >= 6 and shared.random() < 0.5:
        buckets.append("constraint_retention")
    solved = right = shared.random() < 0.85
    keys = [eval_name] + [f"{eval_name}/{bucket}" for bucket in buckets]
    rates = behaviour.loss if right else behaviour.gain
    if own.random() < max(rates.get(key, 0.0) for key in keys):
        right = not right
    lines = [f'{{"name": "move", "arguments": {{"crate": {i}, "to": "bay-{step}"}}}}' for step in range(num_steps)]
    if right != solved:
        lines[num_steps // 2] = lines[num_steps // 2].replace("bay-", "dock-")
    scores = {
        "trajectories": {"completed": float(right)},
        "harness": {"accuracy": float(right)},
        "tool_calls": {"exact": float(right), "accepted": float(right)},
    }[kind]
    return CaseRecord(
        case_id=f"{eval_name}-{i:04d}",
        input_digest=digest_text(f"{eval_name}/{i}"),
        cluster=f"{eval_name}-{i // 2}",
        buckets=tuple(buckets),
        prompt=f"Move crate {i} through {num_steps} bays; never use a dock.",
        output="\n".join(lines),
        scores=scores,
        latency_s=0.5,
        num_completion_tokens=20 * num_steps,
        fingerprint=candidate.fingerprint,
    )


def _documents(path: Path, candidate: Candidate, behaviour: Behaviour, num_docs: int, seed: int) -> list[CaseRecord]:
    shared = np.random.default_rng(seed)
    own = np.random.default_rng([seed, *candidate.name.encode()])
    sizes = shared.integers(80, 120, num_docs)
    nll = shared.normal(0.134, 0.02, num_docs) * sizes  # so little that 40 documents prove a tolerance of 2 %
    logits = shared.normal(0, 2, (int(sizes.sum()), _TOP_K))
    if candidate.name != "reference":
        nll = nll + (behaviour.nll_shift + own.normal(0, 0.004, num_docs)) * sizes
        logits = logits + own.normal(0, 0.02 + 5 * behaviour.nll_shift, logits.shape)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) - 0.02
    order = np.argsort(-logprobs, axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        token_logprobs=np.full(int(sizes.sum()), -1.3, np.float32),
        top_ids=order.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
    )
    return [
        CaseRecord(
            case_id=f"prose-{i:04d}",
            input_digest=digest_text(f"prose/{i}"),
            cluster=f"document-{i}",
            prompt=f"text {i}",
            output="",
            fingerprint=candidate.fingerprint,
            scores={
                "nll_nats": float(nll[i]),
                "nll_bits": float(nll[i] / np.log(2)),
                "num_tokens": float(sizes[i]),
                "num_bytes": float(4 * sizes[i]),
            },
        )
        for i in range(num_docs)
    ]


def make_cases(outcomes: Iterable[float], *, cluster_size: int = 1, buckets: Sequence[str] = ()) -> list[CaseRecord]:
    """Return one workflow record per outcome (1 = completed); the i-th always asks the same."""
    return [
        CaseRecord(
            case_id=f"case-{i}",
            input_digest=digest_text(str(i)),
            cluster=str(i // cluster_size),
            buckets=tuple(buckets),
            prompt="",
            output=str(outcome),
            scores={"completed": float(outcome)},
            fingerprint="f",
        )
        for i, outcome in enumerate(outcomes)
    ]


def make_flips(b: int, c: int, n: int, *, right: int) -> tuple[list[CaseRecord], list[CaseRecord]]:
    """Return n paired cases: the reference solves `right` of them, b are lost and c are gained."""
    reference = [1] * right + [0] * (n - right)
    candidate = [0] * b + [1] * (right - b) + [1] * c + [0] * (n - right - c)
    return make_cases(reference), make_cases(candidate)
