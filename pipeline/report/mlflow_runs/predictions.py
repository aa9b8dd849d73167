"""The table of predictions that stands side by side in MLflow, one row per case.

The page matches rows by their first column and shows one other column per run, so the id names
the eval and the output begins with right or WRONG. It can match only cases that every run logs:
they are chosen over all candidates at once. Those that a candidate lost come first, the headline's
eval before others, then gains, then what nobody flipped. Covers evals whose cases are right or
wrong; documents scored by likelihood have no output to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.records.evaluations import CaseRecord, Evaluation, read_cases
from pipeline.records.record_files import read_record
from pipeline.report.presenting import Presenter
from pipeline.settings.base import Eval

MAX_CASES_PER_EVAL = 200
MAX_TEXT = 2000  # characters of a prompt or output that the table shows

# eval -> case id -> the record and whether it was right (None: not judged)
Scored = dict[str, dict[str, tuple[CaseRecord, bool | None]]]


def read_scored(build: Path, name: str, evals: Mapping[str, Eval]) -> Scored:
    """Read a candidate's right-or-wrong evals: eval -> case id -> record and whether it was right."""
    folder = build / "evaluations" / name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    scored: Scored = {}
    for eval_name, file in evaluation.evals.items():
        if eval_name not in evals:
            continue  # of a project that has dropped it since
        score = next((m.score for m in evals[eval_name].metrics if m.estimator == "proportion"), None)
        if score is not None:
            records = read_cases(folder / file.records)
            scored[eval_name] = {r.case_id: (r, r.scores[score] == 1 if score in r.scores else None) for r in records}
    return scored


def select_predictions(
    scored: dict[str, Scored], reference: str, presenter: Presenter[Any]
) -> dict[str, dict[str, list[str]]]:
    """Choose the same cases for every candidate and lay them out as a table per candidate.

    Args:
        scored: candidate -> eval -> case id -> record and whether it was right (None: not judged).
        reference: the candidate against which a flip counts.
        presenter: of the kind of product: how outputs are shown.

    Returns:
        candidate -> column -> values; columns id, output, ok, prompt, eval.
    """
    tables: dict[str, dict[str, list[str]]] = {
        name: {column: [] for column in ("id", "output", "ok", "prompt", "eval")} for name in scored
    }
    for eval_name, case_id in _choose_cases(scored, reference):
        shown = scored[reference][eval_name][case_id][0]
        for name, table in tables.items():
            record, ok = scored[name].get(eval_name, {}).get(case_id, (None, None))
            _append_row(table, eval_name, record or shown, ok, presenter, is_missing=record is None)
    return tables


def _choose_cases(scored: dict[str, Scored], reference: str) -> list[tuple[str, str]]:
    """Return the (eval, case) that are shown, as many of each eval: losses first, then gains, each in evals' order."""

    def count_flips(eval_name: str, case_id: str) -> tuple[int, int]:
        others = [scored[name].get(eval_name, {}).get(case_id, (None, None))[1] for name in scored]
        is_right = scored[reference][eval_name][case_id][1]
        num_flips = sum(ok != is_right for ok in others)
        return num_flips * bool(is_right), num_flips  # of these, losses

    chosen = []
    for eval_name, cases in scored[reference].items():
        counted = [(*count_flips(eval_name, case_id), eval_name, case_id) for case_id in cases]
        chosen += sorted(counted, key=lambda row: (-row[0], -row[1]))[:MAX_CASES_PER_EVAL]
    chosen.sort(key=lambda row: (row[0] == 0, row[1] == 0))  # stable
    return [(eval_name, case_id) for *_, eval_name, case_id in chosen]


def _append_row(
    table: dict[str, list[str]],
    eval_name: str,
    record: CaseRecord,
    ok: bool | None,
    presenter: Presenter[Any],
    *,
    is_missing: bool,
) -> None:
    failure = "missing" if is_missing else record.failure or "not judged"
    mark = failure if ok is None else presenter.words.judged[ok]
    table["id"].append(f"{eval_name}/{record.case_id}")
    table["output"].append(mark if is_missing else f"{mark}: {_cut(presenter.format_output(record))}")
    table["ok"].append(mark)
    table["prompt"].append(_cut(record.prompt))
    table["eval"].append(eval_name)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text):,} characters)"
