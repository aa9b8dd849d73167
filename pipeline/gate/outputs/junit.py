"""A judgement as JUnit XML, which CI systems show as a list of tests: a suite a candidate, a test a gated comparison.

A test named "verdict" carries what no single comparison does: refused evidence, the path, speed, drafts. A failure is
a loss that blocks, an error is evidence that is missing or unfit, and skipped is what does not block: a released
candidate's open comparisons under `on_inconclusive: warn`, and whatever befalls a candidate that is not released.
The text follows from the judgement alone: no time, no host.
"""

from __future__ import annotations

from xml.etree import ElementTree

from pipeline.gate.verdicts import Judgement, is_blocking, list_gated
from pipeline.gate.wording import cut_text, name_comparison, name_metric, show_unprintable
from pipeline.gate.verdicts import describe
from pipeline.verdict_records import Comparison, Verdict

_MAX_TEXT = 4_000  # characters of a message; readers keep all of them in memory
_TAGS = {"fail": "failure", "inconclusive": "failure", "no gain": "failure", "refused": "error"}


def render_junit(judgement: Judgement) -> str:
    """Write the file; a candidate that could not be compared has one test a comparison that is missing."""
    root = ElementTree.Element("testsuites", name=f"quantgate {judgement.policy.track}")
    for verdict in judgement.verdicts:
        suite = ElementTree.SubElement(root, "testsuite", name=verdict.candidate)
        _add_tests(suite, verdict, judgement)
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_tests(suite: ElementTree.Element, verdict: Verdict, judgement: Judgement) -> None:
    blocks = is_blocking(verdict, judgement.policy)
    classname = f"quantgate.{judgement.policy.track}.{verdict.candidate}"
    _add(suite, classname, "verdict", verdict.outcome, verdict.reasons, is_released=verdict.is_release, blocks=blocks)
    found = {(c.metric, c.bucket): c for c in verdict.comparisons if c.tolerance is not None}
    for key in [*found, *(key for key in list_gated(judgement.policy) if key not in found)]:
        c = found.get(key)
        lines = _tell(c) if c else ("no comparison: the evidence was refused, see the test \"verdict\"",)
        _add(suite, classname, name_metric(*key), c.outcome if c else "refused", lines,
             is_released=verdict.is_release, blocks=blocks)  # fmt: skip


def _tell(c: Comparison) -> tuple[str, ...]:
    return (c.sentence, *describe(c)[1:2])


def _add(
    suite: ElementTree.Element, classname: str, name: str, outcome: str, lines: tuple[str, ...], *, is_released: bool,
    blocks: bool,
) -> None:
    test = ElementTree.SubElement(suite, "testcase", classname=classname, name=_clean(name))
    text = cut_text("\n".join(lines), _MAX_TEXT)
    if outcome not in _TAGS:
        return
    message = _clean(cut_text(lines[0] if lines else outcome, _MAX_TEXT))
    if not is_released:
        ElementTree.SubElement(test, "skipped", message=f"not released: {outcome}: {message}")
    elif not blocks:
        ElementTree.SubElement(test, "skipped", message=f"{outcome}, does not block: {message}")
    else:
        found = ElementTree.SubElement(test, _TAGS[outcome], message=message, type=outcome)
        found.text = show_unprintable(text, keep="\n")


def _clean(text: str) -> str:
    """Write out what XML can't hold, such as NUL, and line ends, which an attribute does not keep."""
    return show_unprintable(text)


def _count(element: ElementTree.Element) -> None:
    """Set the counts that readers show before they look into the tests."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))
