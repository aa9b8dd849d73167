"""What a reviewer should see about one candidate, in the shape that MLflow shows best.

Pure: records in, names and numbers out; `tracking.py` writes them. The choices follow from how the
pages behave. Charts group metrics by the text before the last "/", and bar labels have two
decimals, so rates are logged in percent and nats and bits in thousandths, and the name says so.
Tables sort names by alphabet and show eight parameters without scrolling.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import Judgement, is_decisive, list_gated_evals
from pipeline.gate.wording import escape_markdown, format_num, is_rate
from pipeline.records.digests import digest_json, digest_text
from pipeline.records.evaluations import BuiltCandidate, Evaluation
from pipeline.records.reasons import ReasonKind
from pipeline.records.record_files import R, read_record
from pipeline.records.verdicts import Metric, Verdict
from pipeline.report.mlflow_runs.picture_contents import PictureContents, choose_pictures
from pipeline.report.mlflow_runs.predictions import Scored, read_scored, select_predictions
from pipeline.report.mlflow_runs.review_view import GATE, SIZE, WORST
from pipeline.report.pictures.shown import Shown
from pipeline.report.presenting import JudgedRun, Presenter
from pipeline.running.tracing import list_traces
from pipeline.settings.base import Eval

# Bars and dots: a reviewer tells the verdict by the colour.
_COLORS = {
    "reference": "#57606a",
    "pass": "#1a7f37",
    "inconclusive": "#d4a72c",
    "fail": "#cf222e",
    "refused": "#8250df",
    "no gain": "#6e7781",
}


@dataclass(frozen=True)
class RunContents:
    """Everything about one run, ready to be logged.

    `key` is a digest of the verdict, the candidate, the evaluation and which cases and images are shown: a run
    with the same key says the same. `metrics` are in the order in which they should appear, `column` sorts the runs
    for the view of all images and says nothing about the run. `traces` are files that the run links.
    """

    candidate: str
    key: str
    metrics: dict[str, float]
    params: dict[str, str]
    predictions: dict[str, list[str]]
    note: str
    color: str
    images: tuple[Shown, ...] = ()
    column: str = ""
    traces: tuple[Path, ...] = ()


def build_runs(
    judgement: Judgement, evals: Mapping[str, Eval], build: Path, presenter: Presenter[Any]
) -> list[RunContents]:
    """Return one run per judged candidate, the reference first.

    Records that can't be read leave their part of a run empty, and its note says so: the verdict
    was refused for it, and a refusal is worth seeing too.
    """
    verdicts = {v.candidate: v for v in judgement.verdicts}
    names = [judgement.policy.reference, *(name for name in verdicts if name != judgement.policy.reference)]
    scored: dict[str, Scored] = {}
    problems = dict.fromkeys(names, "")
    for name in names:
        try:
            scored[name] = read_scored(build, name, evals)
        except EvidenceError as error:
            scored[name], problems[name] = {}, f"\n- no predictions: {escape_markdown(str(error))}"
    gated = list_gated_evals(judgement.policy.tolerances)  # headline's first
    ordered = {name: _order_evals(own, gated) for name, own in scored.items()}
    tables = select_predictions(ordered, judgement.policy.reference, presenter)
    rules = presenter.choose_rules(judgement.policy)
    pictures = choose_pictures(judgement, evals, scored, build, rules=rules) if rules else {}
    return [
        _build_run(
            judgement,
            build,
            name,
            presenter,
            scored=scored[name],
            predictions=tables[name],
            pictures=pictures.get(name, PictureContents()),
            problem=problems[name],
        )
        for name in names
    ]


def _order_evals(scored: Scored, gated: list[str]) -> Scored:
    rest = [name for name in scored if name not in gated]
    return {name: scored[name] for name in [*gated, *rest] if name in scored}


def _build_run(
    judgement: Judgement,
    build: Path,
    name: str,
    presenter: Presenter[Any],
    *,
    scored: Scored,
    predictions: dict[str, list[str]],
    pictures: PictureContents,
    problem: str,
) -> RunContents:
    is_reference = name == judgement.policy.reference
    verdict = next((v for v in judgement.verdicts if v.candidate == name), None)
    folder = build / "evaluations" / name
    candidate = _read_optional(build / "candidates" / name / "candidate.json", BuiltCandidate)
    evaluation = _read_optional(folder / "evaluation.json", Evaluation)
    says = [record.model_dump() if record else None for record in (verdict, candidate, evaluation)]
    metrics = judgement.reference_metrics if is_reference else (verdict.metrics if verdict else ())
    headline = next(iter(judgement.policy.tolerances), "")
    traces = tuple(list_traces(folder))
    params = {GATE: format_role(verdict, is_reference)} | list_params(candidate, evaluation, presenter)
    return RunContents(
        candidate=name,
        key=digest_json(
            [*says, params, is_reference, predictions["id"], *(shown.identity for shown in pictures.shown)]
        ),
        metrics=name_metrics((*metrics, *_tripwires(verdict)), headline=headline)
        | name_gate(verdict)
        | presenter.measure_run(JudgedRun(verdict, evaluation, folder, scored)),
        params=params,
        predictions=predictions,
        note=_write_note(verdict, is_reference)
        + pictures.note
        + "".join(f"\n- trace, for [Perfetto](https://ui.perfetto.dev): `{trace}`" for trace in traces)
        + problem,
        color=_COLORS["reference" if is_reference or verdict is None else verdict.outcome],
        images=pictures.shown,
        column=pictures.column,
        traces=traces,
    )


def _read_optional(path: Path, kind: type[R]) -> R | None:
    try:
        return read_record(path, kind)
    except EvidenceError:
        return None


def _tripwires(verdict: Verdict | None) -> list[Metric]:
    """Turn comparisons that have no metric of their own, as divergence has none, into metrics."""
    if verdict is None:
        return []
    known = {(m.name, m.bucket) for m in verdict.metrics}
    return [
        Metric(name=c.metric, bucket=c.bucket, value=c.candidate, unit=c.unit, better="lower", n=c.n)
        for c in verdict.comparisons
        if (c.metric, c.bucket) not in known and c.tolerance is None
    ]


def name_metrics(metrics: tuple[Metric, ...], *, headline: str) -> dict[str, float]:
    """Name and scale metrics for display: the headline first, then overall ones, then buckets.

    A bucket is spelled in MLflow's characters; one that is then spelled like another ("a/b" beside "a_b") gets a
    digest behind it, so that neither number takes the other's place.
    """
    order = sorted(metrics, key=lambda m: (m.bucket is not None, m.name != headline, m.name.split("/")[0]))
    spelled = {bucket: _clean(bucket) for bucket in dict.fromkeys(m.bucket for m in order) if bucket is not None}
    counts = Counter(spelled.values())
    spelled = {
        bucket: clean if counts[clean] == 1 or clean == bucket else f"{clean} {digest_text(bucket)[:8]}"
        for bucket, clean in spelled.items()
    }
    return dict(_name_metric(metric, spelled) for metric in order)


def _name_metric(metric: Metric, spelled: dict[str, str]) -> tuple[str, float]:
    section, _, name = metric.name.rpartition("/")
    value = metric.value
    if is_rate(metric.name):
        name, value = f"{re.sub('_(rate|fraction)$', '', name)}_percent", value * 100
    elif metric.unit in ("nat/token", "bit/byte"):
        name, value = re.sub("nats|bits", r"milli\g<0>", name), value * 1000
    if metric.bucket is None:
        return f"{section}/{name}", value
    return f"{section} by bucket/{spelled[metric.bucket]} {name}", value


def _clean(bucket: str) -> str:
    return re.sub(r"[^\w.\- ]", "_", bucket)  # what MLflow takes in a metric name, less its separators


def name_gate(verdict: Verdict | None) -> dict[str, float]:
    """Say what the gate said as numbers, as the compare page shows no tags.

    `worst_loss_over_tolerance` is the largest observed loss of any metric or bucket that decides: 1 is a
    loss as large as its tolerance. `num_fail` counts checks of path, drafts and speed, too.
    """
    if verdict is None:
        return {}
    gated = [
        (c, c.tolerance) for c in verdict.comparisons if c.tolerance and c.outcome != "reported" and is_decisive(c)
    ]
    outcomes = [c.outcome for c, _ in gated]
    numbers = {"gate/passed": float(verdict.outcome == "pass")}
    numbers |= {f"gate/num_{name}": float(outcomes.count(name)) for name in ("fail", "inconclusive") if gated}
    if failed := sum(reason.kind == ReasonKind.FAILED for reason in verdict.reasons):
        numbers["gate/num_fail"] = numbers.get("gate/num_fail", 0.0) + failed
    if gated:
        numbers[WORST] = round(max(c.harm / tolerance for c, tolerance in gated), 4)  # a table shows all digits
    return numbers


def format_role(verdict: Verdict | None, is_reference: bool) -> str:
    """Say in a word or two what the gate made of a candidate."""
    word = "reference" if is_reference or verdict is None else verdict.outcome
    return f"{word} (release)" if verdict and verdict.is_release else word


def list_params(
    candidate: BuiltCandidate | None, evaluation: Evaluation | None, presenter: Presenter[Any]
) -> dict[str, str]:
    """Summarise a candidate in a few short values, as far as it was built and evaluated.

    MLflow's compare page draws the first three by name, gate, layers and size, and ten characters of each value.
    """
    described = {}
    if evaluation is not None:
        described["serving"] = evaluation.serving.summary
    if candidate is None:
        return described
    checkpoint = candidate.checkpoint
    fallbacks = f", {format_num(len(candidate.fallbacks), 'fallback', 'fallbacks')}" if candidate.fallbacks else ""
    return described | {
        "layers": _format_coverage(candidate) + fallbacks,
        SIZE: f"{checkpoint.num_bytes / (1 << 20):.2f}",
        "steps": "; ".join(map(presenter.format_step, candidate.steps)) or "none",
        "texts": "; ".join(filter(None, map(_format_calibration, candidate.steps))) or "none",
        "weights": f"{checkpoint.path} ({checkpoint.kind}, {checkpoint.format})",
    }


def _format_calibration(step: dict[str, Any]) -> str:
    calibration = step.get("calibration")
    if not calibration:
        return ""
    sources = "+".join(calibration["sources"])
    return (
        f"{calibration['num_samples']} x {calibration['max_tokens']} tokens of {sources}, "
        f"length^{calibration['length_exponent']:g}"
    )


def _format_coverage(candidate: BuiltCandidate) -> str:
    if not candidate.coverage:
        return "as stored"
    counts: dict[str, int] = {}
    for layer in candidate.coverage:
        counts[layer.format] = counts.get(layer.format, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _write_note(verdict: Verdict | None, is_reference: bool) -> str:
    lines = [format_role(verdict, is_reference)]  # plain: the table of runs shows Markdown as it is written
    if is_reference:
        lines.append("- every other run is compared with this one, case by case")
    return "\n".join(lines + [f"- {escape_markdown(str(reason))}" for reason in (verdict.reasons if verdict else ())])
