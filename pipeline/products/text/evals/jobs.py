"""What the evals of a candidate ask: their cases or their task's questions, and the keys that records are known by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.chat_templates import has_chat_template
from pipeline.products.text.evals.canary_prompts import Prompt, pick_prompts
from pipeline.products.text.evals.generation import Question
from pipeline.products.text.evals.harness import import_library
from pipeline.products.text.evals.material import load_task
from pipeline.products.text.settings import EvalSettings, HarnessEval, TextProduct
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import Candidate
from pipeline.running.stage_code import digest_code


@dataclass(frozen=True)
class EvalJob:
    """One eval to run: its cases, and the digests that say whether records of it can be used again.

    A task has no evalset; its questions are those that are answered in words, and `is_plain` says whether these are
    sent as they stand.
    """

    name: str
    settings: EvalSettings
    evalset: Evalset | None
    evalset_digest: str
    key: str
    questions: tuple[Question, ...] = ()
    is_plain: bool = False


def load_evalsets(product: TextProduct, root: Path) -> dict[str, Evalset | None]:
    """Return the evalset of each eval; None for a task that brings its own."""
    return {
        name: None if isinstance(settings, HarnessEval) else load_evalset(root / settings.evalset)
        for name, settings in product.evals.items()
    }


def describe_evals(
    product: TextProduct, candidate: Candidate, evalsets: Mapping[str, Evalset | None], root: Path
) -> list[EvalJob]:
    """Return the evals with what says whether records can be used again; imports lm-eval where one needs it."""
    asked, code = [candidate.serving.max_tokens], digest_code("evaluate", "text")
    judges = [version(library) for library in ("lm-eval", "datasets")]  # its filters and metrics are in no task's files
    evals = []
    for name, settings in product.evals.items():
        if isinstance(settings, HarnessEval):
            task, is_plain = load_task(name, settings), not has_chat_template(product, root)
            import_library(name, settings)
            key = digest_json(
                [settings.model_dump(), *asked, task.digest, code, *judges, *(["plain"] if is_plain else [])]
            )
            evals.append(EvalJob(name, settings, None, task.digest, key, task.questions, is_plain))
            continue
        evalset = evalsets[name]
        digest = evalset.digest if evalset else ""
        evals.append(
            EvalJob(name, settings, evalset, digest, digest_json([settings.model_dump(), *asked, digest, code]))
        )
    return evals


def pick_canary(product: TextProduct, evals: Sequence[EvalJob]) -> list[Prompt]:
    """Return the prompts of the canary."""
    return pick_prompts(
        {job.name: (job.settings, job.evalset) for job in evals},
        product.canary.num_prompts,
        questions={job.name: job.questions for job in evals if job.questions},
        is_plain=any(job.is_plain for job in evals),
    )
