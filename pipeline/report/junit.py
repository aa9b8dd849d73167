"""A judgement as JUnit XML, which CI systems show as a list of tests: a suite a candidate, a test a gated comparison.

A test named "verdict" carries what no single comparison does: refused evidence, the path, speed, drafts. A failure is
what stops the release, an error is evidence that is missing or unfit, and skipped is what stops nothing: what a tier
or `on_inconclusive: warn` lets through, and whatever befalls a candidate that is not released. The text follows from
the judgement alone: no time, no host.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from pipeline.gate.verdicts import Judgement, Policy, is_blocking, is_stopping, list_gated
from pipeline.gate.wording import cut_text, name_metric, show_unprintable
from pipeline.records.verdicts import Verdict
from pipeline.report.terminal import describe
from pipeline.report.unproven import describe_unproven

_MAX_TEXT = 4_000  # characters of a message; readers keep all of them in memory
_TAGS = {"fail": "failure", "inconclusive": "failure", "no gain": "failure", "refused": "error"}
_REFUSED = 'not compared, as evidence was refused: see the test "verdict"'


def render_junit(judgement: Judgement) -> str:
    """Write the file; a comparison that could not be made is an error."""
    root = ElementTree.Element("testsuites", name=f"quantgate {_name_source(judgement.policy)}")
    for verdict in judgement.verdicts:
        suite = ElementTree.SubElement(root, "testsuite", name=show_unprintable(verdict.candidate))
        _fill(suite, verdict, judgement)
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _name_source(policy: Policy) -> str:
    """Return the product, or the command that judged records of others."""
    return policy.product or "compare"


def _fill(suite: ElementTree.Element, verdict: Verdict, judgement: Judgement) -> None:
    policy = judgement.policy
    classname = show_unprintable(f"quantgate.{_name_source(policy)}.{verdict.candidate}")
    compared = {(c.metric, c.bucket): c for c in verdict.comparisons if c.tolerance is not None}
    tests: list[tuple[str, str, tuple[str, ...], bool]] = [
        ("verdict", verdict.outcome, _tell(verdict, policy), is_blocking(verdict, policy))
    ]
    tests += [
        (name_metric(*key), c.outcome, (c.sentence, describe(c)[1].strip()), is_stopping(c, policy))
        for key, c in compared.items()
    ]
    tests += [(name_metric(*key), "refused", (_REFUSED,), True) for key in list_gated(policy) if key not in compared]
    for name, outcome, lines, stops in tests:
        test = ElementTree.SubElement(suite, "testcase", classname=classname, name=show_unprintable(name))
        if outcome in _TAGS:
            _judge(test, outcome, lines, why_skipped=_explain_skipped(verdict, stops))


def _tell(verdict: Verdict, policy: Policy) -> tuple[str, ...]:
    """Return a verdict's reasons; where it does not block, first that little of it was proven."""
    unproven = None if is_blocking(verdict, policy) else describe_unproven(verdict)
    reasons = tuple(map(str, verdict.reasons))
    return (unproven, *reasons) if unproven else reasons


def _explain_skipped(verdict: Verdict, stops: bool) -> str:
    if not verdict.is_release:
        return "not released"
    return "" if stops else "does not block"


def _judge(test: ElementTree.Element, outcome: str, lines: Sequence[str], *, why_skipped: str) -> None:
    """Add what is wrong; what XML can't hold, such as NUL, is written out, and a line end in an attribute, too."""
    message = show_unprintable(cut_text(lines[0] if lines else outcome, _MAX_TEXT))
    if why_skipped:
        ElementTree.SubElement(test, "skipped", message=f"{why_skipped}: {outcome}: {message}")
        return
    problem = ElementTree.SubElement(test, _TAGS[outcome], message=message, type=outcome)
    problem.text = show_unprintable(cut_text("\n".join(lines), _MAX_TEXT), keep="\n")


def _count(element: ElementTree.Element) -> None:
    """Set the counts that readers show before they look into the tests."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))
