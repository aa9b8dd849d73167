"""The report: every comparison that decides is in the candidate's row, and no name or output can forge a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from pipeline.gate.compare import ReleaseComparison
from pipeline.products.text.show import TextPresenter
from pipeline.products.text.show.plots import find_front, plot_completion, plot_sizes
from pipeline.records.evaluations import CaseRecord
from pipeline.records.files import write_text
from pipeline.report.plots import choose_shown, plot_harm
from pipeline.report.publish import write_report
from pipeline.report.sections import Figure
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, render_report
from tests.fakes.synthetic_records import Behaviour, make_params, rewrite_records, write_tree

FORGED = "x</b></summary></details>\n# `PASS` | ![ok](http://x/p.png) \x1b[2J\x00\u202e"
UNPRINTABLE = ("\x1b", "\x00", "\u202e")


def judge(
    build: Path,
    edit: Callable[[list[CaseRecord]], list[CaseRecord]],
    *,
    eval_name: str = "calls",
    tolerances: dict[str, dict[str, object]] | None = None,
) -> ReleaseComparison:
    """Judge a candidate that loses a third of `calls` after editing the records of both sides alike."""
    write_tree(build, {"a": Behaviour(loss={"calls": 0.3})}, num_cases=300)
    for name in ("reference", "a"):
        rewrite_records(build, name, eval_name, edit)
    gate = {"tolerances": tolerances} if tolerances else {}
    return compare_release(make_params(["a"], ["a"], **gate), build)


def with_buckets(*names: str) -> Callable[[list[CaseRecord]], list[CaseRecord]]:
    return lambda records: [r.model_copy(update={"buckets": names}) for r in records]


def row_of(report: str, start: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.startswith(f"| {start} "))
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def test_a_picture_that_would_be_empty_is_not_written_and_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a benchmark the picture of its speeds was an empty frame beside the report and in MLflow."""
    monkeypatch.chdir(tmp_path)
    params = make_params(["a"], ["a"])
    write_tree(params.build, {"a": Behaviour()}, num_cases=50)
    write_text(params.reports / "speed.png", "of a benchmark that is gone")
    write_report(compare_release(params, params.build), params, TextPresenter(), None)
    written = {path.name for path in params.reports.glob("*.png")}
    assert {"harm.png", "completion.png"} <= written and "speed.png" not in written
    assert "<p>Steps: quantize (scheme W4A16, " in (params.build / "report.html").read_text()
    # all evidence is unfit, so that nothing was compared
    write_report(compare_release(make_params(["ghost"], ["ghost"]), params.build), params, TextPresenter(), None)
    assert not (params.reports / "harm.png").exists()
    assert "harm.png" not in (params.reports / "report.md").read_text()


def test_every_gated_bucket_is_in_the_row_of_its_candidate(tmp_path: Path) -> None:
    """A release blocked by a bucket alone must not look well in the table that is read first."""
    buckets = {"tool/10": 0.05, "tool/9": 0.05, "plain": 0.05}
    compared = judge(
        tmp_path,
        with_buckets(*buckets),
        tolerances={
            "calls/tool_call_exact_match": {"overall": 0.02, "buckets": buckets},
            "workflows/task_completion_rate": {"overall": 0.02},
        },
    )
    report = render_report(compared)
    titles = row_of(report, "candidate")[3:-1]
    assert titles == [
        "MB",
        "calls<br>tool_call_exact_match",
        "calls<br>plain",
        "calls<br>tool/9",
        "calls<br>tool/10",
        "workflows<br>task_completion_rate",
    ], "the headline and its buckets come first"
    assert all(cell.endswith("❌") for cell in row_of(report, "`a`")[4:8])


def test_a_bucket_of_two_metrics_says_which_is_which(tmp_path: Path) -> None:
    gated = {"overall": 0.02, "buckets": {"plain": 0.05}}
    report = render_report(
        judge(
            tmp_path,
            with_buckets("plain"),
            tolerances={"calls/tool_call_exact_match": gated, "calls/tool_call_accepted_rate": gated},
        )
    )
    assert {"calls<br>tool_call_exact_match [plain]", "calls<br>tool_call_accepted_rate [plain]"} <= set(
        row_of(report, "candidate")
    )


def test_a_table_of_many_columns_is_turned_on_its_side(tmp_path: Path) -> None:
    buckets = {f"tool/{i}": 0.05 for i in range(14)}
    report = render_report(
        judge(
            tmp_path,
            with_buckets(*buckets),
            tolerances={"calls/tool_call_exact_match": {"overall": 0.02, "buckets": buckets}},
        )
    )
    assert row_of(report, "candidate") == ["candidate", "`reference`", "`a`"]
    assert row_of(report, "verdict") == ["verdict", "reference", "❌ fail"]
    assert all(row_of(report, f"calls<br>{bucket}")[2].endswith("❌") for bucket in buckets)


def test_names_from_evalsets_can_not_forge_a_line_of_the_report(tmp_path: Path) -> None:
    def forge(records: list[CaseRecord]) -> list[CaseRecord]:
        return [r.model_copy(update={"case_id": f"{r.case_id}{FORGED}", "buckets": (FORGED,)}) for r in records]

    compared = judge(
        tmp_path,
        forge,
        tolerances={"calls/tool_call_exact_match": {"overall": 0.02, "buckets": {FORGED: 0.02}}},
    )
    report, terminal = render_report(compared), render_gate(compared.judgement)
    for raw in (*UNPRINTABLE, "x</b>", "\n# `PASS`", "](http"):
        assert raw not in report
    assert not any(raw in terminal for raw in UNPRINTABLE) and "\\x1b[2J" in terminal
    tables = [line for line in report.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in tables} == {4, 6, 11}, "losses, candidates and comparisons"
    assert report.count("<details>") == report.count("</details>")


def test_documents_that_lost_most_and_failures_are_escaped(tmp_path: Path) -> None:
    def fail(records: list[CaseRecord]) -> list[CaseRecord]:
        return [records[0].model_copy(update={"failure": f"evaluator: {FORGED}", "scores": {}}), *records[1:]]

    write_tree(tmp_path, {"a": Behaviour(nll_shift=0.2)}, num_cases=300)
    rewrite_records(tmp_path, "a", "choices", fail)
    for name in ("reference", "a"):
        rewrite_records(
            tmp_path,
            name,
            "prose",
            lambda records: [r.model_copy(update={"case_id": f"{r.case_id}{FORGED}"}) for r in records],
        )
    report = render_report(compare_release(make_params(["a"], ["a"]), tmp_path))
    assert "Cases that lost most" in report and "evaluator: x&lt;/b>" in report
    for raw in (*UNPRINTABLE, "x</b>", "\n# `PASS`", "](http"):
        assert raw not in report


def test_a_bucket_that_looks_like_a_formula_is_drawn_as_it_is_written(tmp_path: Path) -> None:
    name = r"$\frac$"
    write_tree(tmp_path, {"a": Behaviour()}, num_cases=100)
    for side in ("reference", "a"):
        rewrite_records(tmp_path, side, "workflows", with_buckets(name))
    tolerances = {"workflows/task_completion_rate": {"overall": 0.02, "buckets": {name: 0.02}}}
    compared = compare_release(make_params(["a"], ["a"], tolerances=tolerances), tmp_path)
    plot_harm(compared.judgement, tmp_path / "plot.png")
    plot_completion(compared, tmp_path / "plot.png")
    plot_sizes(compared, tmp_path / "plot.png")


def test_the_front_holds_what_nothing_smaller_equals() -> None:
    points = [(2.0, 0.9), (1.0, 0.8), (3.0, 0.9), (1.0, 0.7), (2.5, 0.5), (4.0, 0.95)]
    assert find_front(points) == [(1.0, 0.8), (2.0, 0.9), (4.0, 0.95)]
    # of what is better where it is lower, the negative is given
    assert find_front([(1.0, -2.4), (2.0, -2.5), (3.0, -2.3)]) == [(1.0, -2.4), (3.0, -2.3)]


@pytest.mark.parametrize(("sizes", "is_drawn"), [((1_000_000,) * 3, False), ((1_000_000, 2_000_000, 2_000_000), True)])
def test_sizes_are_drawn_where_candidates_differ_in_them(
    sizes: tuple[int, ...], is_drawn: bool, tmp_path: Path
) -> None:
    write_tree(tmp_path / "build", {"a": Behaviour(), "b": Behaviour()}, num_cases=40)
    compared = compare_release(make_params(["a", "b"], ["a"]), tmp_path / "build")
    for findings, num_bytes in zip(compared.findings.values(), sizes, strict=True):
        assert findings.evidence is not None
        checkpoint = findings.evidence.candidate.checkpoint.model_copy(update={"num_bytes": num_bytes})
        candidate = findings.evidence.candidate.model_copy(update={"checkpoint": checkpoint})
        findings.evidence = replace(findings.evidence, candidate=candidate)
    drawn = {block.name for block in TextPresenter().build_overview(compared) if isinstance(block, Figure)}
    assert ("sizes.png" in drawn) == is_drawn
    plot_sizes(compared, tmp_path / "sizes.png")
    with Image.open(tmp_path / "sizes.png") as image:
        assert image.width > 600


@pytest.mark.parametrize("character", UNPRINTABLE)
def test_outputs_are_shown_without_what_steers_a_terminal(tmp_path: Path, character: str) -> None:
    report = render_report(
        judge(
            tmp_path, lambda records: [r.model_copy(update={"prompt": f"first\n\tsecond{character}"}) for r in records]
        )
    )
    assert character not in report
    assert f"\nfirst\n\tsecond{character.encode('unicode_escape').decode()}\n```" in report


def test_a_picture_of_many_candidates_shows_the_released_ones_and_says_that_it_shows_few(tmp_path: Path) -> None:
    """A hundred panels take a minute to draw, and nobody can read them."""
    names = [f"c-{i:02d}" for i in range(14)]
    write_tree(tmp_path / "build", {name: Behaviour() for name in names}, num_cases=40)
    compared = compare_release(make_params(names, names[-1:]), tmp_path / "build")
    heights = {}
    for num in (12, 14):
        some = compared.judgement.model_copy(update={"verdicts": compared.judgement.verdicts[-num:]})
        plot_harm(some, tmp_path / f"{num}.png")
        with Image.open(tmp_path / f"{num}.png") as picture:
            heights[num] = picture.size
    assert heights[12] == heights[14]
    assert [v.candidate for v in choose_shown(compared.judgement)] == ["c-13", *names[:11]]
    assert all(f"`{name}`" in render_report(compared) for name in names)
