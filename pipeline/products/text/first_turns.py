"""What was answered in an evaluation: the benchmark and the drift check ask it again, outside of an eval."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.settings import ChatEval
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import CaseRecord, EvalFile, Evaluation, read_cases

CUT_CHARACTER = "\ufffd"  # what decoding makes of a part of a character


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
    return {record.case_id: record.output.split("\n")[0] for record in _read_records(folder, evaluation, eval_name)}


def read_answered(folder: Path, evaluation: Evaluation, eval_name: str) -> list[CaseRecord]:
    """Return the records of an lm-eval task that were answered in words; none of a task that scores given answers.

    Raises:
        EvidenceError: as `read_first_turns` does.
    """
    return [record for record in _read_records(folder, evaluation, eval_name) if record.num_completion_tokens]


def format_answer(record: CaseRecord) -> str:
    """Return what was written, in the words of `format_reply`, less the part of a character at its end."""
    return (record.answer or record.output).rstrip(CUT_CHARACTER).replace("\n", "\\n")


def _read_records(folder: Path, evaluation: Evaluation, eval_name: str) -> list[CaseRecord]:
    file = evaluation.evals.get(eval_name)
    path = folder / (file.records if file else f"{eval_name}.jsonl")
    if file is None or not path.is_file() or digest_file(path) != file.sha256:
        raise EvidenceError(f"{path}: expected the records as they were written, found others; run `dvc repro`")
    return read_cases(path)
