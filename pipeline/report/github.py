"""What GitHub Actions shows of a judgement: annotations at the lines of params.yaml, and the summary of a step.

An annotation is one line on stdout, and GitHub reads every line of it: so what comes from elsewhere is escaped as its
runner's own toolkit does it. GitHub shows ten errors and ten warnings a step; what is beyond that is counted in the
last. A step's summary may have 1 MiB, and the products of a project share it.

Reference: https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from pipeline.gate.verdicts import (
    Judgement,
    blocking_verdicts,
    is_blocking,
    is_open_watched,
    is_stopping,
    released_verdicts,
)
from pipeline.gate.wording import cut_text, escape_markdown, name_comparison, show_unprintable
from pipeline.records.reasons import ReasonKind
from pipeline.records.record_files import read_record
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.report import EXPLANATION
from pipeline.report.explanation_records import Explanation
from pipeline.report.failure_section import fold_flip
from pipeline.report.markdown import render_name, write_block
from pipeline.report.sections import Table
from pipeline.report.unproven import describe_unproven, list_unproven

MAX_SUMMARY_BYTES = 200_000  # of a product: 1 MiB is a step's, and all products may be gated in one
# what no comparison stands for, which is annotated on its own
_ANNOTATED = (ReasonKind.REFUSED, ReasonKind.FAILED, ReasonKind.UNPROVEN, ReasonKind.NO_GAIN)
_MAX_SHOWN = 10  # annotations of a level
_MAX_MESSAGE = 1_000  # characters
_MAX_REASONS, _MAX_FLIPS = 12, 3  # of a candidate
_MESSAGE = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_MESSAGE, ":": "%3A", ",": "%2C"}

_SETTINGS = Path("params.yaml")

Key = tuple[str, ...]  # a path in params.yaml


@dataclass(frozen=True)
class Annotation:
    """One remark at a key of params.yaml."""

    level: Literal["error", "warning"]
    key: Key
    title: str
    message: str


def write_github(judgement: Judgement, environ: Mapping[str, str]) -> str:
    """Append to the summary of the step that runs this, and return the annotations for its stdout.

    Args:
        judgement: what was decided.
        environ: the variables of the step.

    Raises:
        EvidenceError: the explanation beside the judgement is missing or damaged.
    """
    explanation = read_record(judgement.path.with_name(EXPLANATION), Explanation)
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(render_summary(judgement, explanation))
    settings = os.path.relpath(_SETTINGS, environ.get("GITHUB_WORKSPACE", "."))
    return "\n".join(render_annotations(judgement, _SETTINGS.read_text(encoding="utf-8"), file=settings))


def render_annotations(judgement: Judgement, settings: str, *, file: str = "params.yaml") -> list[str]:
    """Return workflow commands for what keeps a release from passing, one line each; none where all pass.

    Args:
        judgement: what was decided.
        settings: the text of params.yaml.
        file: its path from the root of the repository.
    """
    find_line = index_lines(settings)
    annotations = [a for verdict in released_verdicts(judgement) for a in _annotate(verdict, judgement)]
    shown: list[Annotation] = []
    for level in ("error", "warning"):
        of_level = [a for a in annotations if a.level == level]
        shown += of_level[: _MAX_SHOWN - 1] + _fold(of_level[_MAX_SHOWN - 1 :])
    return [
        f"::{a.level} file={escape_property(file)},line={find_line(a.key)},title={escape_property(a.title)}::"
        f"{escape_message(cut_text(a.message, _MAX_MESSAGE))}"
        for a in shown
    ]


def escape_message(text: str) -> str:
    """Escape the text of a workflow command; characters that don't print are written out first."""
    return "".join(_MESSAGE.get(ch, ch) for ch in show_unprintable(text, keep="\n"))


def escape_property(text: str) -> str:
    """Escape a property of a workflow command, in which colon and comma have a meaning."""
    return "".join(_PROPERTY.get(ch, ch) for ch in show_unprintable(text))


def _annotate(verdict: Verdict, judgement: Judgement) -> list[Annotation]:
    section = ("products", judgement.policy.product)
    level: Literal["error", "warning"] = "error" if is_blocking(verdict, judgement.policy) else "warning"
    candidate = ("candidates", verdict.candidate)
    annotations = [
        Annotation(level, candidate, f"{verdict.candidate}: {verdict.outcome}", str(reason))
        for reason in verdict.reasons
        if reason.kind in _ANNOTATED
    ]
    if level == "warning" and (unproven := describe_unproven(verdict)):
        annotations.append(Annotation(level, candidate, f"{verdict.candidate}: {verdict.outcome}", unproven))
    for outcome in ("fail", "inconclusive"):
        annotations += [
            Annotation(
                "error" if is_stopping(c, judgement.policy) else "warning",
                (*section, *_locate(c)),
                f"{verdict.candidate}: {c.outcome}",
                f"{name_comparison(c)}: {c.sentence}",
            )
            for c in verdict.comparisons
            if c.outcome == outcome and not is_open_watched(c)
        ]
    reasons = "; ".join(map(str, verdict.reasons)) or "the verdict gives no reason"
    if annotations or verdict.outcome == "pass":
        return annotations
    return [Annotation(level, candidate, f"{verdict.candidate}: {verdict.outcome}", reasons)]


def _locate(c: Comparison) -> Key:
    return ("gate", "tolerances", c.metric, *(("buckets", c.bucket) if c.bucket else ("overall",)))


def _fold(rest: Sequence[Annotation]) -> list[Annotation]:
    """Put what GitHub would not show into one annotation."""
    if len(rest) <= 1:
        return list(rest)
    first, titles = rest[0], dict.fromkeys(a.message.partition(": ")[0] for a in rest)
    return [Annotation(first.level, first.key, f"{len(rest)} more", "; ".join(titles))]


def index_lines(settings: str) -> Callable[[Key], int]:
    """Return a function that tells the line of a key in a YAML text, counted from 1, or that of its nearest parent."""
    root = YAML(typ="rt").load(settings)

    def find(path: Key) -> int:
        node: Any = root
        line = 1
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                break
            if own := (node.lc.data or {}).get(key):  # type: ignore[attr-defined]  # none of a key that `<<` merges
                line = own[0] + 1
            node = node[key]
        return line

    return find


def render_summary(judgement: Judgement, explanation: Explanation) -> str:
    """Write the Markdown of a step's summary: verdicts, reasons, the first flips; short, and cut to what fits."""
    policy = judgement.policy
    blocking = ", ".join(f"{render_name(v.candidate)} ({v.outcome})" for v in blocking_verdicts(judgement))
    title = f"Gate: {policy.product}" if policy.product else "Gate"
    parts = [
        f"## {title}\n\n" + (f"**Blocked** by {blocking}.\n" if blocking else "**Nothing blocks the release.**\n"),
        *(f"**{escape_markdown(said[0].upper() + said[1:])}.**\n" for said in list_unproven(judgement)),
        _tabulate(judgement),
    ]
    parts += [
        f"{render_name(v.candidate)}: {escape_markdown(cut_text(reason.text, _MAX_MESSAGE))}\n"
        for v in released_verdicts(judgement)
        for reason in v.reasons
        if v.outcome == "pass" and reason.kind == ReasonKind.LIMIT
    ]
    parts += [_explain(v, explanation) for v in released_verdicts(judgement) if v.outcome != "pass"]
    return _fit(parts, report=judgement.path.with_name("report.md").as_posix())


def _tabulate(judgement: Judgement) -> str:
    rows = [["candidate", "release", "verdict", "gated", "fail", "inconclusive"], ["---"] * 3 + ["---:"] * 3]
    for verdict in judgement.verdicts:
        outcomes = [c.outcome for c in verdict.comparisons if c.tolerance is not None]
        rows.append(
            [
                render_name(verdict.candidate),
                "yes" if verdict.is_release else "",
                verdict.outcome,
                str(len(outcomes)),
                str(outcomes.count("fail")),
                str(outcomes.count("inconclusive")),
            ]
        )
    return write_block(Table(rows)) + "\n"


def _explain(verdict: Verdict, explanation: Explanation) -> str:
    lines = [f"### {render_name(verdict.candidate)}: {verdict.outcome}", ""]
    lines += [f"- {escape_markdown(cut_text(str(reason), _MAX_MESSAGE))}" for reason in verdict.reasons[:_MAX_REASONS]]
    if len(verdict.reasons) > _MAX_REASONS:
        lines.append(f"- and {len(verdict.reasons) - _MAX_REASONS} more")
    explained = explanation.of(verdict.candidate)
    flips = (explained.flips if explained else ())[:_MAX_FLIPS]
    folded = [line for flip in flips for line in (write_block(fold_flip(flip)), "")]
    return "\n".join([*lines, "", *folded]) + "\n"


def _fit(parts: Sequence[str], *, report: str) -> str:
    """Join parts as long as they fit, whole: half a code block would swallow what other products write behind it."""
    text = ""
    for part in parts:
        if len(f"{text}{part}".encode()) > MAX_SUMMARY_BYTES:
            return f"{text}\nToo long to show all: see `{report}`.\n"
        text += f"{part}\n"
    return text
