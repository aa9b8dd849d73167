"""What a person at the terminal reads of a verdict on other people's records."""

from __future__ import annotations

from pipeline.gate.certificate_section import describe_certificate
from pipeline.gate.terminal import describe, render_verdicts
from pipeline.gate.verdicts import UNGATED, Judgement
from pipeline.gate.wording import show_unprintable
from pipeline.outcomes.registry import READERS, Side
from pipeline.outcomes.rules import Rules


def render_outcomes(judgement: Judgement, reference: Side, rules: Rules) -> str:
    """Write what was judged by what, the table of verdicts, a sentence per gated comparison, and the certificate.

    To be called within `wording.use_metrics(rules.definitions)`.
    """
    verdict = judgement.verdicts[0]
    lines = [f"reference {reference.name}", *_describe_metrics(reference, rules), ""]
    told = render_verdicts(judgement)
    passed = [c for c in verdict.comparisons if c.outcome == "pass"]
    rest = ["", *(line for c in passed for line in describe(c))] if passed else []
    # what is suspicious stands beside its comparison already, and what nothing gates under the table
    rest += [reason for reason in verdict.reasons
             if reason.startswith("note: ") and ": suspicious" not in reason and not reason.startswith(UNGATED)]
    if said := describe_certificate(verdict, judgement.policy):
        rest += ["", said]
    return "\n".join([*map(show_unprintable, lines), told, *map(show_unprintable, rest)])


def _describe_metrics(reference: Side, rules: Rules) -> list[str]:
    lines = []
    for full, definition in rules.definitions.items():
        outcomes = reference.outcomes[full.partition("/")[0]]
        clusters = len({record.cluster for record in outcomes.records})
        sizes = f"{len(outcomes.records):,} cases"
        sizes += f" in {clusters:,} clusters" if clusters < len(outcomes.records) else ""
        lines.append(f"  {full}: {READERS[outcomes.format].title}, {sizes}; {definition.better} is better")
    return lines
