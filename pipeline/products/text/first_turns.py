"""First turns of cases that were evaluated: the benchmark and the drift check ask them again, outside of an eval."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.settings import ChatEval
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import EvalFile, Evaluation, read_cases


def load_evaluated(settings: ChatEval, file: EvalFile, root: Path) -> Evalset:
    """Load the evalset of an eval that chats, as it was when it was evaluated.

    Raises:
        EvidenceError: it was edited since.
    """
    evalset = load_evalset(root / settings.evalset)
    if evalset.digest != file.evalset_digest:
        raise EvidenceError(
            f"{root / settings.evalset}: expected the cases that were evaluated, found others; run `dvc repro`"
        )
    return evalset


def read_first_turns(folder: Path, evaluation: Evaluation, eval_name: str) -> dict[str, str]:
    """Return what a candidate answered to the first turn of each case of an eval that chats, by case id.

    Raises:
        EvidenceError: the eval was not run, or its records are not as they were written.
    """
    file = evaluation.evals.get(eval_name)
    path = folder / (file.records if file else f"{eval_name}.jsonl")
    if file is None or not path.is_file() or digest_file(path) != file.sha256:
        raise EvidenceError(f"{path}: expected the records as they were written, found others; run `dvc repro`")
    return {record.case_id: record.output.split("\n")[0] for record in read_cases(path)}
