"""Names and texts from strangers' records: no writer lets them steer a CI log, a terminal or a comment."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path

import pytest

import pipeline.__main__ as command
from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import escape_markdown, show_unprintable
from pipeline.records.evaluations import BuiltCandidate, Fallback
from pipeline.records.reasons import Reason
from pipeline.records.record_files import read_record
from pipeline.report.built_candidate import describe_built_candidate
from pipeline.report.explanation_records import Explanation
from pipeline.report.github import render_annotations, render_summary
from pipeline.report.html import render_html
from pipeline.report.junit import render_junit
from pipeline.report.markdown import render_block, render_name
from pipeline.report.terminal import render_gate
from stages.cli import run_stage

COMMANDS = [
    "::stop-commands::x",
    "##[error]boom",
    " ::add-mask::x",
    "a\r::error::x",
    "a\n::set-output name=a::b",
    "a\u2028::warning::x",
    "a\x85::debug::x",
    "##vso[task.complete result=Failed;]",
    "x ##[group]y",
    "##teamcity[buildStop]",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202egpj.exe",
    "\u3000::error::x",
    "\ufeff::error::x",
]
# what GitHub's runner acts on: the first at the start of a line, behind white space, the others anywhere
_ACTED_ON = re.compile(r"^\s*::|##\w*\S*?\[", re.MULTILINE)
_SPLIT = re.compile(r"[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


def assert_harmless(text: str) -> None:
    assert not _ACTED_ON.search(text), _ACTED_ON.search(text)
    assert not _SPLIT.search(text)
    assert all(ch.isprintable() or ch in "\n\t" or ch.isspace() for ch in text)


def write_tables(folder: Path, nasty: str) -> list[Path]:
    """Write both sides with a nasty text wherever a table may hold one; the candidate loses much."""
    paths = []
    for side in ("reference", "candidate"):
        name = nasty.replace("/", "") if "\0" not in nasty else "x"
        path = folder / side / f"{name}.csv"
        path.parent.mkdir(parents=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["case_id", "prompt", "output", "buckets", nasty])
            text, bucket = f"{nasty}\n{nasty}", nasty.replace(";", "")
            writer.writerows(
                [f"{nasty}{i}", f"{text} {i}", f"{text} {side}", bucket, int(side == "reference" or i % 2)]
                for i in range(80)
            )
        paths.append(path)
    return paths


@pytest.mark.parametrize("nasty", COMMANDS, ids=ascii)
def test_no_form_of_a_verdict_holds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nasty: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (ours, theirs) = write_tables(tmp_path, nasty)
    forms = [Path(f"out.{kind}") for kind in ("html", "xml", "md")]
    code = command.main(
        [
            "compare",
            str(ours.relative_to(tmp_path)),
            str(theirs.relative_to(tmp_path)),
            "--better",
            f"{nasty.strip()}=higher",
            "--html",
            "out.html",
            "--junit",
            "out.xml",
            "--summary",
            "out.md",
            "--json",
            "out.json",
        ]
    )
    said = capsys.readouterr()
    assert code == 20, said
    for text in (said.out, said.err, *(path.read_text() for path in forms)):
        assert_harmless(text)
    judgement = read_record(Path("out.json"), Judgement)
    policy = judgement.policy.model_copy(update={"release": (nasty,)})
    renamed = judgement.model_copy(
        update={
            "policy": policy,
            "blocked_by": (nasty,),
            "verdicts": tuple(
                verdict.model_copy(
                    update={
                        "candidate": nasty,
                        "comparisons": (),
                        "reasons": tuple(map(Reason.model_validate, (f"refused: {nasty}", f"fail: {nasty}", nasty))),
                    }
                )
                for verdict in judgement.verdicts
            ),
        }
    )
    explanation = Explanation(candidates=())
    for text in (
        render_gate(renamed),
        render_junit(renamed),
        render_summary(renamed, explanation),
        render_html(renamed, explanation, {}),
    ):
        assert_harmless(text)
    annotations = render_annotations(renamed, "gate: {}\n")
    assert annotations and all(re.match(r"::(error|warning) file=params.yaml,line=1,title=", a) for a in annotations)
    for annotation in annotations:
        assert_harmless(annotation.removeprefix("::"))


@pytest.mark.parametrize("nasty", COMMANDS, ids=ascii)
def test_no_error_line_holds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nasty: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("case_id,score\na,1\n")
    both = ["compare", "a.csv", "b.csv"]
    for argv in (
        ["compare", nasty],
        ["compare", "a.csv", nasty],
        ["gate", nasty],
        [nasty],
        [*both, nasty],
        [*both, "--better", nasty],
        [*both, "--policy", nasty],
    ):
        assert command.main(argv) in (1, 30)
        said = capsys.readouterr()
        assert_harmless(said.out)
        assert_harmless(said.err)
        assert said.err.count("\n") <= 1

    def fail(argv: list[str]) -> int:
        raise EvidenceError(f"{nasty}: {nasty}")

    monkeypatch.setattr(sys, "argv", ["stage"])
    with pytest.raises(SystemExit):
        run_stage("compare", fail)
    err = capsys.readouterr().err
    assert_harmless(err)
    assert err.count("\n") == 1


def test_an_error_line_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", "x" * 100_000]) in (1, 30)
    said = capsys.readouterr()
    assert len(said.err) + len(said.out) < 10_000


def test_a_file_name_that_is_no_text_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xff.csv")
    for side in ("a", "b"):
        Path(side).mkdir()
        scores = "".join(f"c{i},{int(i != 7 or side == 'a')}\n" for i in range(90))
        Path(side, name).write_text("case_id,score\n" + scores)
    code = command.main(
        [
            "compare",
            f"a/{name}",
            f"b/{name}",
            "--json",
            "out.json",
            "--html",
            "out.html",
            "--junit",
            "out.xml",
            "--summary",
            "out.md",
            "--tolerance",
            "0.2",
        ]
    )
    assert code == 0, capsys.readouterr()
    assert "\udcff" not in capsys.readouterr().out
    assert Path("out.json").read_text() and Path("out.html").read_text()


@pytest.mark.parametrize(
    ("text", "never"),
    [
        ("@octocat", r"@octocat"),
        ("thanks (@octocat)", r"@octocat"),
        ("@org/team", r"@org"),
        ("fixes #12", r"#12"),
        ("GH-12", r"GH-12"),
        ("https://evil.example/x", r"https://"),
        ("www.evil.example", r"www\."),
        ("</details><h1>pass</h1>", r"<[/h]"),
        ("<!-- x", r"<!"),
        ("![a](https://evil.example/a.png)", r"\]\("),
        ("a | b", r"\|"),
        ("~~fail~~", r"~~"),
        ("**pass**", r"\*\*"),
        ("`x`", "`"),
        ("::error::x", r"^::"),
    ],
)
def test_a_text_in_markdown_links_mentions_and_formats_nothing(text: str, never: str) -> None:
    said = escape_markdown(text)
    assert not re.search(never, said), said
    assert not re.search(never, re.sub(r"^`[^`]*`$", "", render_name(text)))


def test_what_is_harmless_stays_as_it_is() -> None:
    for text in ("std::vector", "a ## b", "C# [x]", "évaluation", "# [1]", "a:b", "11:30", "###"):
        assert show_unprintable(text) == text
    for text in ("run `dvc repro -s evaluate@reference`", "a@b", "issue # 12", "http and www", "C#1"):
        assert escape_markdown(text) == text.replace("`", "'")
    assert render_block("```\nx")[0] == "````text"


def test_a_name_in_code_style_stays_as_it_is() -> None:
    """Entities are not read within code: a layer `_orig_mod.a&b` stood there as `_orig_mod.a&amp;b`."""
    fallback = Fallback(layer="_orig_mod.a&b", reason="an odd_ width")
    built = BuiltCandidate.model_construct(steps=(), coverage=(), fallbacks=(fallback,))
    assert "`_orig_mod.a&b`: an odd&#95; width" in describe_built_candidate(built)
    assert "_orig_mod.a&b: an odd_ width" in describe_built_candidate(built, write=str, write_name=str)


def test_a_reason_that_holds_for_many_layers_is_given_once() -> None:
    """A layer of each block fell back for the same reason, which stood there once a block."""
    odd = [Fallback(layer=f"{i}.o", reason="an odd width") for i in range(32)]
    built = BuiltCandidate.model_construct(steps=(), coverage=(), fallbacks=(*odd, Fallback(layer="h", reason="tied")))
    said = describe_built_candidate(built)
    assert "Fallback: `0.o`, `1.o`, `2.o` and 29 more: an odd width. Fallback: `h`: tied." in said
