"""What will a run cost? Minutes, memory and disk of each candidate, from config.json, headers and cases alone.

Memory is that of `memory.py`. Minutes of an evaluation are those of the last one in `build/` by the same engine in the
same precision, its own or another candidate's, scaled by the bytes of the weights. Where there is none of a model of
like size, and for quantising, they are a guess from a roofline: the bytes that a decode step reads, and the operations
of prompts and calibration, at the speeds below.
A guess may be wrong by a factor of 3, and by more on unusual machines. It is marked as one.

Not covered: lm-eval tasks whose cases only lm-eval knows, the benchmark, several nodes, and starting servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.evalsets.cards import load_evalset
from pipeline.gate.plan import align_columns
from pipeline.products.text.footprint import TYPE_BYTES, count_load_bytes, find_block_linears
from pipeline.products.text.memory import count_served_bytes, estimate_needs, read_folder
from pipeline.products.text.optimize.layers import count_output_bytes
from pipeline.products.text.settings import CandidateSettings, TextProduct, TrajectoriesEval
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.records.evaluations import AnyServing, BuiltCandidate, Evaluation
from pipeline.records.record_files import read_record
from pipeline.records.serving import ServingConfig
from pipeline.running.environment import Machine
from pipeline.running.hub import locate_checkpoint

_TOKEN_CHARACTERS = 4  # of a case as JSON
_GIB = 1 << 30
_SPLITS = ("tensor-parallel-size", "pipeline-parallel-size")  # of vLLM: each splits the weights
_MOST_SCALED = 4  # times as many bytes, or as few, as a run whose minutes are scaled
_MOST_CHANGED = 2  # times as many bytes, or as few, as an estimate of what was made: it is of these weights


@dataclass(frozen=True)
class Speed:
    """What a machine does in a second, and what a step costs whatever its size."""

    bandwidth: float  # bytes
    operations: float
    step_s: float  # one forward pass
    column_s: float  # one column of a layer that GPTQ rounds


@dataclass(frozen=True)
class Cost:
    """What one candidate costs.

    Attributes:
        build_minutes: of its steps.
        minutes: of its evaluation.
        source: where the minutes of its evaluation come from.
        host_gib: at the peak.
        card_gib: on each GPU at the peak; 0 without one.
        disk_gib: of the weights that it adds.
    """

    candidate: str
    build_minutes: float
    minutes: float
    source: str
    host_gib: float
    card_gib: float
    disk_gib: float


def guess_speed(machine: Machine, *, on_gpu: bool) -> Speed:
    """Return half of what a data centre's GPU reaches at best, or what a server's core does with AVX2."""
    if on_gpu:
        return Speed(bandwidth=1.5e12, operations=2e14, step_s=0.02, column_s=8e-5)
    return Speed(bandwidth=2e10, operations=3e10 * machine.num_cores, step_s=0.01, column_s=2e-4)


def plan_costs(product: TextProduct, root: Path, machine: Machine, *, build: Path) -> list[Cost]:
    """Return what each candidate costs that is served from a folder."""
    needs = estimate_needs(product, root, machine)
    count_tokens = cache(partial(_count_tokens, product, root))  # of no use where a run says it
    costs = []
    for name, candidate in product.candidates.items():
        if candidate.engine.is_attached:
            continue
        peaks = {
            place: max(
                (n.weights_mib + n.other_mib for n in needs if (n.candidate, n.place) == (name, place)), default=0
            )
            for place in ("host", "GPU")
        }
        speed = guess_speed(machine, on_gpu=peaks["GPU"] > 0)
        parts = candidate.engine.num_parts if peaks["GPU"] else 1
        minutes, source = _plan_evaluation(name, product, root, build, speed, count_tokens, parts=parts)
        steps = [step for step in candidate.steps if isinstance(step, QuantizeStep)]
        costs.append(
            Cost(
                candidate=name,
                build_minutes=sum(
                    _guess_step(locate_checkpoint(candidate.checkpoint, root), step, speed) for step in steps
                )
                / 60,
                minutes=minutes,
                source=source,
                host_gib=peaks["host"] / 1024,
                card_gib=peaks["GPU"] / 1024,
                disk_gib=count_output_bytes(locate_checkpoint(candidate.checkpoint, root), steps[-1]) / _GIB
                if steps
                else 0.0,
            )
        )
    return costs


def _plan_evaluation(
    name: str,
    product: TextProduct,
    root: Path,
    build: Path,
    speed: Speed,
    count_tokens: Callable[[], tuple[int, int]],
    *,
    parts: int,
) -> tuple[float, str]:
    """Return the minutes of an evaluation and where they come from: its own last one, another's, or a guess."""
    candidate = product.candidates[name]
    size = _count_weight_bytes(candidate, product, root)
    for other in (name, product.reference, *product.candidates):
        try:
            made = read_record(build / "candidates" / other / "candidate.json", BuiltCandidate)
            evaluation = read_record(build / "evaluations" / other / "evaluation.json", Evaluation)
        except EvidenceError:
            continue
        ratio = size / _count_weight_bytes(product.candidates[other], product, root)
        is_of_it = evaluation.checkpoint_digest == made.checkpoint.digest and _is_near(
            _count_stored_bytes(product.candidates[other], root), made.checkpoint.num_bytes, _MOST_CHANGED
        )
        if is_of_it and _is_served_alike(evaluation.serving, candidate, product) and _is_near(ratio, 1, _MOST_SCALED):
            return evaluation.seconds * ratio / 60, f"last run of {other}"
    return _guess_evaluation(candidate, product, root, speed, count_tokens(), parts=parts) / 60, "a guess"


def _is_near(value: float, other: float, factor: float) -> bool:
    return other / factor <= value <= other * factor


def _is_served_alike(was: AnyServing, candidate: CandidateSettings, product: TextProduct) -> bool:
    if not isinstance(was, ServingConfig):
        return False
    now = candidate.engine.build_serving().get("options", {})
    is_split_alike = all(was.options.get(option, 1) == now.get(option, 1) for option in _SPLITS)
    return (was.engine, was.dtype) == (candidate.engine.kind, product.serving.dtype) and is_split_alike


def _count_stored_bytes(candidate: CandidateSettings, root: Path) -> int:
    """Return about how many bytes stage optimize writes, or takes over where no step quantises."""
    folder = locate_checkpoint(candidate.checkpoint, root)
    steps = [step for step in candidate.steps if isinstance(step, QuantizeStep)]
    if steps:
        return count_output_bytes(folder, steps[-1])
    return sum(tensor.num_bytes for tensor in read_folder(folder)[0].values())


def _count_weight_bytes(candidate: CandidateSettings, product: TextProduct, root: Path) -> int:
    tensors, config = read_folder(locate_checkpoint(candidate.checkpoint, root))
    return count_load_bytes(tensors, config, dtype=product.serving.dtype)


def _count_tokens(product: TextProduct, root: Path) -> tuple[int, int]:
    """Guess the tokens of prompts from the length of cases, and those of answers of half the full length."""
    prompts, answers = 0, 0
    for settings in product.evals.values():
        folder = getattr(settings, "evalset", None)
        if folder is None:
            continue
        cases = load_evalset(root / folder).cases
        # a workflow ends before its limit; what was said in earlier turns is in the cache
        turns = settings.max_turns / 2 if isinstance(settings, TrajectoriesEval) else 1
        prompts += sum(len(case.model_dump_json()) for case in cases) // _TOKEN_CHARACTERS
        answers += int(turns * len(cases) * product.serving.max_tokens / 2) if settings.chats else 0
    return prompts, answers


def _guess_evaluation(
    candidate: CandidateSettings, product: TextProduct, root: Path, speed: Speed, tokens: tuple[int, int], *, parts: int
) -> float:
    """Guess the seconds of evals and canary from the tokens of prompts and of answers."""
    prompts, answers = tokens
    num_weights = _count_weight_bytes(candidate, product, root) / TYPE_BYTES[product.serving.dtype]
    # copies of a model behind one address are asked as one
    in_flight = product.serving.concurrency * (product.resources.num_servers if candidate.engine.is_embedded else 1)
    asked = product.canary.num_prompts * product.serving.max_tokens / 2 if product.chat_evals else 0
    steps = answers / in_flight + asked * (1 + 2 / in_flight)  # one after another, and twice together
    step_s = count_served_bytes(candidate, product, root)[0] / parts / speed.bandwidth + speed.step_s
    return 2 * num_weights * (prompts + answers) / (speed.operations * parts) + steps * step_s


def _guess_step(folder: Path, step: QuantizeStep, speed: Speed) -> float:
    """Guess the seconds of a quantiser: its passes over the calibration texts, and the columns that GPTQ rounds."""
    shapes = [info.shape for info in find_block_linears(read_folder(folder)[0]).values()]
    num_weights = sum(map(math.prod, shapes))
    tokens = step.calibration.num_samples * step.calibration.max_tokens if step.calibration else 0
    # each block runs to see its inputs and again for its outputs; AWQ runs it for every point of its grid
    passes = 2 + step.num_grid_points if step.algorithm == "awq" else 2
    operations = float(passes * 2 * num_weights * tokens)
    if step.algorithm != "gptq":
        return operations / speed.operations
    operations += sum(2 * tokens * width**2 + 2 * rows * width**2 + width**3 for rows, width in shapes)
    return operations / speed.operations + speed.column_s * sum(width for _, width in shapes)


def render_costs(costs: Sequence[Cost]) -> str:
    """Write the costs as a table for a terminal."""
    head = ["candidate", "min to build", "min to evaluate", "host GiB", "GPU GiB", "disk GiB", "minutes from"]
    table = [head] + [
        [
            cost.candidate,
            _format_minutes(cost.build_minutes),
            _format_minutes(cost.minutes),
            f"{cost.host_gib:,.1f}",
            f"{cost.card_gib:,.1f}" if cost.card_gib else "–",
            f"{cost.disk_gib:,.2f}",
            cost.source,
        ]
        for cost in costs
    ]
    return "\n".join(
        [
            *align_columns(table),
            "minutes to build, and guesses, may be wrong by a factor of 3; GPU GiB are of each card",
        ]
    )


def _format_minutes(minutes: float) -> str:
    return f"{minutes:,.1f}" if minutes < 100 else f"{minutes:,.0f}"
