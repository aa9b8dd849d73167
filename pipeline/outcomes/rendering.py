"""What a person at the terminal reads of a verdict on other people's records."""

from __future__ import annotations

from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import format_num
from pipeline.outcomes.registry import READERS, Side
from pipeline.outcomes.rules import Rules
from pipeline.records.plain_text import format_line
from pipeline.records.reasons import ReasonKind
from pipeline.report.certificate_section import describe_dependence, describe_misses
from pipeline.report.terminal import describe, render_verdicts


def render_outcomes(judgement: Judgement, reference: Side, rules: Rules) -> str:
    """Write what was judged by what, the table of verdicts, a sentence per gated comparison, and what it would miss.

    How often the rule fails equal sides, which is about the rule, is in the page's certificate. To be called within
    `wording.use_metrics(rules.definitions)`.
    """
    verdict = judgement.verdicts[0]
    lines = [f"reference {reference.name}", *_describe_metrics(reference, rules), ""]
    told = render_verdicts(judgement)
    passed = [c for c in verdict.comparisons if c.outcome == "pass"]
    rest = ["", *(line for c in passed for line in describe(c))] if passed else []
    # what is suspicious stands beside its comparison already, what nothing gates and what is accepted under the table
    rest += [str(reason) for reason in verdict.reasons if reason.kind in (ReasonKind.NOTE, ReasonKind.CAUSE)]
    said = [describe_misses(verdict, judgement.policy)]
    said += [describe_dependence(verdict.certificate)] if verdict.certificate else []
    rest += [line for text in said if text for line in ("", text)]
    return "\n".join([*map(format_line, lines), told, *map(format_line, rest)])


def _describe_metrics(reference: Side, rules: Rules) -> list[str]:
    lines = []
    for full, definition in rules.definitions.items():
        outcomes = reference.outcomes[full.partition("/")[0]]
        clusters = len({record.cluster for record in outcomes.records})
        sizes = format_num(len(outcomes.records), "case", "cases")
        sizes += f" in {format_num(clusters, 'cluster', 'clusters')}" if clusters < len(outcomes.records) else ""
        lines.append(f"  {full}: {READERS[outcomes.format].title}, {sizes}; {definition.better} is better")
    return lines
