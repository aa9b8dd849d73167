"""A judgement in its other forms: nothing that a model wrote acts as markup, and nothing that is missing looks well."""

from __future__ import annotations

import io
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ruamel.yaml import YAML

from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import Judgement, blocking_verdicts
from pipeline.gate.wording import name_comparison
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import CanaryFlip, Verdict
from pipeline.report.explain import cut_passages, explain_release, explain_verdict
from pipeline.report.explanation_records import CandidateExplanation, ExplainedFlip, Explanation, Passage
from pipeline.report.github import MAX_SUMMARY_BYTES, index_lines, render_annotations, render_summary
from pipeline.report.html import embed_pictures, render_html
from pipeline.report.junit import render_junit
from pipeline.report.sections import Figure
from tests.fakes.judging import compare_release
from tests.fakes.synthetic_records import Behaviour, make_params, rewrite_records, write_tree
from tests.paths import ROOT

HOSTILE = "</script></pre><img src=x onerror=alert(1)>]]>\x00\x1b[2J\u202e\n::error::forged\r\n``````\n</b>&lt;%0A"
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202e]")
LONG = 30_000  # characters, of each output


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ReleaseComparison:
    """A release in which one candidate fails on hostile outputs, one is refused and one is fine, and a spare that
    fails, too, and is not released."""
    build = tmp_path_factory.mktemp("project") / "build"
    write_tree(
        build,
        {
            "bad": Behaviour({"calls": 0.3}, {"calls": 0.1}),
            "broken": Behaviour(),
            "good": Behaviour(),
            "spare": Behaviour({"calls": 0.3}),
        },
        num_cases=400,
    )
    for name in ("bad", "spare"):
        rewrite_records(
            build,
            name,
            "calls",
            lambda records: [
                r.model_copy(update={"output": f"{r.output[:60]}{HOSTILE}{r.output[60:]}{'x' * LONG}"}) for r in records
            ],
        )
    (build / "evaluations" / "broken" / "evaluation.json").unlink()
    return compare_release(make_params(["bad", "broken", "good", "spare"], ["bad", "broken", "good"]), build)


@pytest.fixture(scope="module")
def explanation(compared: ReleaseComparison) -> Explanation:
    return explain_release(compared)


class Page(HTMLParser):
    """The tags and attributes that a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def refuse(text: str) -> Reason:
    return Reason(kind=ReasonKind.REFUSED, text=text)


def verdict_of(judgement: Judgement, name: str) -> Verdict:
    return next(v for v in judgement.verdicts if v.candidate == name)


def replace_verdict(judgement: Judgement, name: str, **update: object) -> Judgement:
    return judgement.model_copy(
        update={
            "verdicts": tuple(v.model_copy(update=update) if v.candidate == name else v for v in judgement.verdicts)
        }
    )


def suite_of(judgement: Judgement, name: str) -> ElementTree.Element:
    return next(s for s in ElementTree.fromstring(render_junit(judgement)) if s.get("name") == name)


def tags_of(suite: ElementTree.Element) -> dict[str, str | None]:
    """By test, what is wrong with it."""
    return {test.get("name", ""): test[0].tag if len(test) else None for test in suite}


# --- the page


def test_outputs_of_a_model_are_text_on_the_page(compared: ReleaseComparison, explanation: Explanation) -> None:
    text = render_html(compared.judgement, explanation, {})
    page = Page(text)
    assert "&lt;img src=x onerror=alert(1)&gt;" in text, "the hostile output is not on the page at all"
    assert not page.tags & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert {value[:1] for name, value in page.attributes if name in ("href", "src")} <= {"#"}
    assert not UNPRINTABLE.search(text)


def test_a_page_asks_for_nothing_from_elsewhere(compared: ReleaseComparison, explanation: Explanation) -> None:
    text = render_html(compared.judgement, explanation, {name_figure("worst.png"): make_png(4)})
    assert "default-src 'none'" in text
    addresses = [value for name, value in Page(text).attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert [a for a in addresses if not a.startswith("#")] == [a for a in addresses if a.startswith("data:image/png")]
    assert "@import" not in text and "url(" not in text


def test_a_page_says_how_each_candidate_was_made(compared: ReleaseComparison, explanation: Explanation) -> None:
    """Who was sent the page alone could not tell what had been done to the weights."""
    name = compared.judgement.policy.release[0]
    text = render_html(compared.judgement, explanation, {}, {name: "Steps: quantize (<b>)."})
    assert text.count("<p>Steps: quantize (&lt;b&gt;).</p>") == 1
    assert "Steps:" not in render_html(compared.judgement, explanation, {})


def test_a_long_output_is_cut(compared: ReleaseComparison, explanation: Explanation) -> None:
    assert len(explanation.model_dump_json()) < 100_000
    assert len(render_html(compared.judgement, explanation, {})) < 500_000


def test_every_comparison_is_drawn_once(compared: ReleaseComparison, explanation: Explanation) -> None:
    text = render_html(compared.judgement, explanation, {})
    gated = [c for v in compared.judgement.verdicts for c in v.comparisons if c.tolerance is not None]
    assert text.count("<svg") == len(gated) > 0
    coordinates = [float(x) for x in re.findall(r'(?:x1|x2|cx)="([^"]+)"', text)]
    assert all(0 <= x <= 240 for x in coordinates), "an interval leaves its picture"


def test_what_blocks_is_read_first(compared: ReleaseComparison, explanation: Explanation) -> None:
    """A candidate that passes and does not ship stood above the one that stopped the release."""
    judgement = compared.judgement
    last = judgement.verdicts[-1].candidate
    verdicts = [
        v.model_copy(update={"is_release": v.candidate == last, "outcome": "fail" if v.candidate == last else "pass"})
        for v in judgement.verdicts
    ]
    policy = judgement.policy.model_copy(update={"release": (last,)})
    blocked = judgement.model_copy(update={"verdicts": tuple(verdicts), "policy": policy})
    text = render_html(blocked, explanation, {})
    sections = re.findall(r'<a href="#candidate-\d+">([^<]+)</a>', text)
    assert sections[0] == last and sections[1:] == [v.candidate for v in verdicts[:-1]]
    head = text[text.index("<header>") : text.index("</header>")]
    [cause] = [reason.text for reason in judgement.verdicts[-1].reasons if reason.kind == ReasonKind.HEADLINE]
    assert "Blocked" in head and f"<li>{last}: {cause}</li>" in head
    plain = [reason for reason in verdicts[-1].reasons if reason.kind != ReasonKind.HEADLINE]
    text = render_html(replace_verdict(blocked, last, reasons=tuple(plain)), explanation, {})
    worst = next(c for c in verdicts[-1].comparisons if c.outcome == "fail")
    assert f"<li>{last}: fail: {name_comparison(worst)}: " in text


def test_refused_candidates_and_none_explained_have_a_page(compared: ReleaseComparison) -> None:
    text = render_html(compared.judgement, Explanation(candidates=()), {})
    assert "Nothing could be compared" in text and "Cases whose judgement changed" not in text


def name_figure(name: str) -> Figure:
    return Figure(name, name, name, lambda compared, path: None)


def make_png(side: int) -> bytes:
    """Return a picture of noise, which hardly gets smaller."""
    picture = Image.frombytes("RGB", (side, side), random.Random(0).randbytes(3 * side * side))
    with io.BytesIO() as file:
        picture.save(file, "PNG", compress_level=1)
        return file.getvalue()


def test_pictures_too_large_for_the_page_are_compressed_and_then_named() -> None:
    large = make_png(600)
    assert len(large) > 1_000_000
    pictures = {"worst.png": large, "speed.png": make_png(4), **{f"{i}.png": large for i in range(9)}}
    found = embed_pictures({name_figure(name): png for name, png in pictures.items()})
    kinds = {picture.name: picture.data[:15] for picture in found}
    assert kinds["worst.png"] == "data:image/jpeg" and kinds["speed.png"] == "data:image/png;"
    assert sum(len(picture.data) for picture in found) < 3_000_000
    assert any(not picture.data for picture in found), "ten pictures of noise can't all fit"


# --- JUnit


def test_junit_counts_what_it_holds_and_keeps_to_what_readers_know(compared: ReleaseComparison) -> None:
    root = ElementTree.fromstring(render_junit(compared.judgement))
    assert [suite.get("name") for suite in root] == [v.candidate for v in compared.judgement.verdicts]
    for element in (root, *root):
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(element.get(count, "-1")) == len(list(element.iter(tag)))
    for test in root.iter("testcase"):
        assert set(test.attrib) == {"classname", "name"} and len(test) <= 1
        assert {child.tag for child in test} <= {"failure", "error", "skipped"}


def test_junit_says_what_stops_the_release(compared: ReleaseComparison) -> None:
    judgement = compared.judgement
    bad, broken = (tags_of(suite_of(judgement, name)) for name in ("bad", "broken"))
    assert bad["calls/tool_call_exact_match"] == "failure" and bad["verdict"] == "failure"
    assert broken["verdict"] == "error" and set(broken.values()) == {"error"}, "what is missing must not look well"
    assert set(broken) == set(bad), "every comparison that was asked for is there"
    assert set(tags_of(suite_of(judgement, "spare")).values()) == {None, "skipped"}, "it stops nothing"


@pytest.mark.parametrize(("policy", "tag"), [("warn", "skipped"), ("block", "failure")])
def test_junit_follows_the_policy_on_what_is_open(compared: ReleaseComparison, policy: str, tag: str) -> None:
    judgement = compared.judgement.model_copy(
        update={"policy": compared.judgement.policy.model_copy(update={"on_inconclusive": policy})}
    )
    comparisons = verdict_of(judgement, "good").comparisons
    gated = next(c for c in comparisons if c.tolerance is not None)
    open_ = gated.model_copy(update={"outcome": "inconclusive", "harm": 0.0})
    judgement = replace_verdict(
        judgement,
        "good",
        outcome="inconclusive",
        reasons=(Reason.model_validate("inconclusive: it"),),
        comparisons=(open_, *(c for c in comparisons if c is not gated)),
    )
    found = tags_of(suite_of(judgement, "good"))
    assert found["verdict"] == tag and found[gated.metric] == tag


def test_junit_is_xml_whatever_a_reason_says(compared: ReleaseComparison) -> None:
    judgement = replace_verdict(compared.judgement, "broken", reasons=(refuse(f"{HOSTILE}\ud800" + "y" * 1_000_000),))
    text = render_junit(judgement)
    suite = suite_of(judgement, "broken")
    assert "]]>" in (suite[0][0].text or "") and not UNPRINTABLE.search(text.replace("\n", "")) and len(text) < 100_000


def test_a_blocked_release_is_never_green_in_junit(compared: ReleaseComparison) -> None:
    """Also for reasons that no comparison stands for."""
    passed = replace_verdict(compared.judgement, "good", outcome="no gain", reasons=())
    for verdict in blocking_verdicts(passed):
        suite = suite_of(passed, verdict.candidate)
        assert int(suite.get("failures", "0")) + int(suite.get("errors", "0")) > 0


# --- GitHub


def read_annotations(lines: list[str]) -> list[tuple[str, int, str]]:
    """Return level, line and message of each, as GitHub's runner reads them."""
    found = [
        re.fullmatch(r"::(error|warning) file=[^,:]+,line=(\d+),title=[^,:\r\n]*::([^\r\n]*)", line) for line in lines
    ]
    assert all(found), lines
    return [(m[1], int(m[2]), m[3]) for m in found if m]


def test_annotations_stand_at_the_tolerance(compared: ReleaseComparison) -> None:
    judgement = compared.judgement
    gate = (
        "    gate:\n      alpha: 0.05\n      tolerances:\n        calls/tool_call_exact_match:\n          # why\n"
        "          overall: 0.02\n"
    )
    text = f"products:\n  other:\n{gate}  agent:\n{gate}candidates:\n  broken:\n    steps: []\n"
    found = read_annotations(render_annotations(judgement, text))
    by_message = {message.partition(": ")[0]: (level, line) for level, line, message in found}
    assert by_message["calls/tool_call_exact_match"] == ("error", 15)
    assert by_message["refused"] == ("error", 17)


def test_every_tolerance_of_the_shipped_settings_has_its_line() -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    lines, shipped, find_line = text.splitlines(), YAML(typ="safe").load(text), index_lines(text)
    for product, section in shipped["products"].items():
        for metric, tolerance in section["gate"]["tolerances"].items():
            key = ("products", product, "gate", "tolerances", metric)
            assert lines[find_line(key) - 1].strip().startswith(f"{metric}:")
            for bucket in tolerance.get("buckets", {}):
                assert f"{bucket}: " in lines[find_line((*key, "buckets", bucket)) - 1]
                assert find_line(key) <= find_line((*key, "buckets", bucket)) < find_line(key) + 9
    tolerances = ("products", "agent", "gate", "tolerances")
    assert find_line((*tolerances, "no/such")) == find_line(tolerances) > 1, "its nearest parent"
    found = [find_line(("candidates", name)) for name in shipped["candidates"]]
    assert [lines[line - 1].split(":")[0].strip() for line in found] == list(shipped["candidates"])
    assert find_line(("no", "such")) == 1


def test_a_tolerance_that_is_merged_from_elsewhere_has_its_line_there() -> None:
    """A failing gate ended in a traceback on GitHub, where params.yaml shares tolerances by `<<`."""
    text = "products:\n  a:\n    gate:\n      tolerances: &all\n        x/y: {overall: 0.02}\n"
    text += "  b:\n    gate:\n      tolerances:\n        <<: *all\n  c:\n    gate:\n      tolerances:\n"
    text += "        z/y: {overall: 0.02}\n        <<: *all\n"
    find_line = index_lines(text)
    for product, line in (("a", 5), ("b", 5), ("c", 5)):
        assert find_line(("products", product, "gate", "tolerances", "x/y", "overall")) == line
    assert find_line(("products", "c", "gate", "tolerances", "z/y", "overall")) == 13


def test_a_message_can_not_forge_an_annotation(compared: ReleaseComparison) -> None:
    judgement = replace_verdict(compared.judgement, "broken", reasons=(refuse(HOSTILE),))
    messages = [m for _, _, m in read_annotations(render_annotations(judgement, "gate: {}\n")) if "forged" in m]
    assert len(messages) == 1 and "%0A\\x3a:error::forged" in messages[0] and "%250A" in messages[0]
    assert not UNPRINTABLE.search(messages[0]), "they steer the terminal of whoever reads the log"
    lines = render_annotations(judgement, "gate: {}\n", file="a,b:c%\n.yaml")
    assert all("file=a%2Cb%3Ac%25\\n.yaml,line=" in line for line in lines)


def test_github_shows_ten_errors_a_step_so_the_last_counts_the_rest(compared: ReleaseComparison) -> None:
    reasons = tuple(refuse(f"cause {i}") for i in range(30))
    lines = render_annotations(replace_verdict(compared.judgement, "broken", reasons=reasons), "gate: {}\n")
    found = read_annotations(lines)
    assert len([1 for level, _, _ in found if level == "error"]) == 10
    assert "more" in lines[-1]


def test_a_verdict_that_blocks_without_a_known_reason_is_annotated(compared: ReleaseComparison) -> None:
    judgement = replace_verdict(
        compared.judgement, "good", outcome="no gain", reasons=(Reason.model_validate("of another kind"),)
    )
    assert any(
        "of another kind" in message
        for _, _, message in read_annotations(render_annotations(judgement, "candidates: {good: {}}\n"))
    )


def test_a_summary_is_short_and_whole(compared: ReleaseComparison, explanation: Explanation) -> None:
    text = render_summary(compared.judgement, explanation)
    assert "**Blocked** by `bad` (fail), `broken` (refused)" in text
    assert text.count("<details>") == text.count("</details>") == 3
    assert not UNPRINTABLE.search(text.replace("\n", ""))
    many = {"reasons": tuple(refuse(f"{i}" + "z" * 10_000) for i in range(500))}
    large = replace_verdict(compared.judgement, "broken", **many)
    assert len(render_summary(large, explanation).encode()) < MAX_SUMMARY_BYTES


def make_flip(text: str, **more: Any) -> ExplainedFlip:
    """Return a lost case whose prompt and outputs are one text."""
    passage = Passage(before=text, marked="", after="", num_before=0, num_after=0)
    named: dict[str, Any] = {"kind": "loss", "eval_name": "e", "case_id": "1", "buckets": ()}
    return ExplainedFlip(prompt=passage, reference=passage, candidate=passage, **named, **more)


def test_what_does_not_fit_into_a_summary_is_left_out_whole(compared: ReleaseComparison) -> None:
    flip = make_flip("é" * 90_000, line=0, character=0)
    large = Explanation(candidates=(CandidateExplanation(candidate="bad", folder="f", flips=(flip,), lost=()),))
    text = render_summary(compared.judgement, large)
    assert len(text.encode()) < MAX_SUMMARY_BYTES + 100
    assert "reports/agent/report.md" in text and text.count("<details>") == text.count("</details>") == 0


@pytest.mark.parametrize(("text", "said"), [("", "the records hold no outputs"), ("a", "the outputs are equal")])
def test_records_without_outputs_are_not_called_equal(compared: ReleaseComparison, text: str, said: str) -> None:
    """Tables need have none, and a reader was told of a canary that nobody ran."""
    flip = make_flip(text, why_no_margin="not asked")
    shown = CandidateExplanation(candidate="bad", folder="f", flips=(flip,), lost=())
    page = render_html(compared.judgement, Explanation(candidates=(shown,)), {})
    assert said in page and ("margin not known: not asked" in page) == bool(text)


# --- what is explained


def test_losses_come_before_gains_and_open_verdicts_are_explained_too(compared: ReleaseComparison) -> None:
    bad, findings = verdict_of(compared.judgement, "bad"), compared.findings["bad"]
    kinds = [flip.kind for flip in explain_verdict(bad, findings).flips]
    assert kinds == sorted(kinds, key=["loss", "gain", "path"].index) and kinds[0] == "loss"
    undecided = bad.model_copy(
        update={
            "outcome": "inconclusive",
            "comparisons": tuple(
                c.model_copy(update={"outcome": "inconclusive" if c.outcome == "fail" else c.outcome})
                for c in bad.comparisons
            ),
        }
    )
    assert explain_verdict(undecided, findings).flips
    advisory = bad.model_copy(
        update={"comparisons": tuple(c.model_copy(update={"tier": "advisory"}) for c in bad.comparisons)}
    )
    assert not explain_verdict(advisory, findings).flips, "what decides nothing explains nothing"


def test_a_margin_is_shown_where_the_canary_saw_the_same_answers(compared: ReleaseComparison) -> None:
    """Another answer than the eval's parts at another token, whose margin says nothing about this one."""
    bad, findings = verdict_of(compared.judgement, "bad"), compared.findings["bad"]
    flips = explain_verdict(bad, findings).flips
    pairs = findings.pairs["calls"]
    records = {
        ours.case_id: (ours.output, theirs.output.split("\n")[0])
        for ours, theirs in zip(pairs.reference, pairs.candidate, strict=True)
    }
    asked, other = flips[-1].case_id, flips[-2].case_id
    assert bad.canary is not None and all(flip.margin is None and flip.why_no_margin for flip in flips)
    seen = tuple(
        CanaryFlip(
            case_id=f"calls/{case}",
            token=3,
            margin=0.5,
            reference=records[case][0].split("\n")[0],
            candidate=records[case][1] + extra,
        )
        for case, extra in ((asked, ""), (other, "!"))
    )
    judged = bad.model_copy(update={"canary": bad.canary.model_copy(update={"flips": seen})})
    assert judged.canary is not None
    found = {flip.case_id: flip for flip in explain_verdict(judged, findings).flips}
    assert (found[asked].token, found[asked].margin) == (3, 0.5)
    assert found[other].margin is None
    own = judged.model_copy(
        update={"canary": judged.canary.model_copy(update={"baseline": "its own path without drafts"})}
    )
    assert all(flip.margin is None for flip in explain_verdict(own, findings).flips), "not the reference's"


def test_answers_that_only_the_path_changed_are_shown_with_their_prompt(compared: ReleaseComparison) -> None:
    """A candidate with the reference's weights may fail by its canary alone, without one flip in the evals."""
    good = verdict_of(compared.judgement, "good")
    assert good.canary is not None and not explain_verdict(good, compared.findings["good"]).flips
    flip = CanaryFlip(case_id="calls/calls-0002", token=1, margin=0.01, reference="to bay", candidate="to dock")
    canary = good.canary.model_copy(update={"is_same_weights": True, "baseline": "the path", "flips": (flip,)})
    judged = good.model_copy(update={"canary": canary, "outcome": "fail"})
    (shown,) = explain_verdict(judged, compared.findings["good"]).flips
    assert (shown.kind, shown.against, shown.margin, shown.token) == ("path", "the path", 0.01, 1)
    assert shown.reference is not None and shown.reference.marked == "bay"
    assert shown.prompt.text.startswith("Move crate 2 through")


@settings(max_examples=50, deadline=None)
@given(same=st.text(max_size=300), ours=st.text(max_size=300), theirs=st.text(max_size=300), end=st.text(max_size=50))
def test_passages_are_parts_of_the_texts_and_part_where_they_do(same: str, ours: str, theirs: str, end: str) -> None:
    texts = same + ours + end, same + theirs + end
    passages = cut_passages(*texts)
    for text, passage in zip(texts, passages, strict=True):
        shown = passage.before + passage.marked + passage.after
        assert text[passage.num_before : len(text) - passage.num_after] == shown
        assert "\n" not in passage.marked, "only the line in which it is"
    first, second = passages
    if texts[0] != texts[1]:
        assert first.before == second.before
        if "\n" not in "".join(texts):
            assert (first.marked + first.after)[:1] != (second.marked + second.after)[:1]


def test_what_the_other_side_has_is_marked_where_it_ends() -> None:
    first, second = cut_passages('{"name":"a","id":1}\nrest', '{"name":"a"}\nrest')
    assert (first.before, first.marked, first.after) == ('{"name":"a"', ',"id":1', "}\nrest")
    assert (second.before, second.marked, second.after) == ('{"name":"a"', "", "}\nrest")
    long, short = cut_passages("a" * 1_000_000 + "b", "a" * 1_000_000)
    assert long.marked == "b" and short.marked == "" and long.num_before == short.num_before > 0


def test_explanations_read_back_as_written(explanation: Explanation) -> None:
    assert Explanation.model_validate_json(explanation.model_dump_json()) == explanation


def test_a_fence_in_an_output_does_not_end_its_block(compared: ReleaseComparison, explanation: Explanation) -> None:
    text = render_summary(compared.judgement, explanation)
    fences = re.findall(r"^(`{3,})text\n.*?^\1$", text, re.MULTILINE | re.DOTALL)
    assert fences and max(map(len, fences)) > 6


def test_nothing_of_a_project_is_read_by_the_renderers(
    compared: ReleaseComparison, explanation: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are functions of records: the same text anywhere."""
    here = (render_html(compared.judgement, explanation, {}), render_junit(compared.judgement))
    monkeypatch.chdir(tmp_path)
    assert (render_html(compared.judgement, explanation, {}), render_junit(compared.judgement)) == here
