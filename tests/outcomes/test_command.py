"""The command `quantgate`: the same verdict as through DVC, its exit codes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

import pipeline.__main__ as command
from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import definition_of
from pipeline.products.params import Params
from pipeline.records.evaluations import read_cases
from pipeline.records.files import write_text
from pipeline.records.record_files import read_record, write_record
from pipeline.records.verdicts import Verdict
from tests.fakes.judging import compare_release
from tests.fakes.outcome_tables import run, write_outcomes
from tests.fakes.release_project import BUILD, VERDICT
from tests.fakes.synthetic_records import EVAL_KINDS, Behaviour, make_params, write_tree
from tests.paths import ROOT

REAL = ROOT / "tests/golden/records"
LOSSES = {"good": Behaviour(), "bad": Behaviour({"workflows": 0.2}), "dear": Behaviour(nll_shift=0.05)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Verdict]]:
    """A project's records, what DVC's path says of them, and its policy as a file."""
    root = tmp_path_factory.mktemp("project")
    write_tree(root / "build", LOSSES)
    params = make_params(list(LOSSES), ["good"])
    judgement = compare_release(params, root / "build").judgement
    with (root / "policy.yaml").open("w") as file:
        YAML(typ="safe").dump({"gate": params.gate.model_dump(), "evals": {}}, file)
    return root, {verdict.candidate: verdict for verdict in judgement.verdicts}


def export_tables(folder: Path, target: Path) -> Path:
    """Write an evaluation's records as tables, as another tool would."""
    for eval_name in EVAL_KINDS:
        records = read_cases(folder / f"{eval_name}.jsonl")
        columns = {key: [repr(r.scores[key]) for r in records] for key in records[0].scores}
        path = target / f"{eval_name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["case_id", "run", "cluster", "buckets", *columns])
            writer.writerows(
                [
                    r.case_id,
                    f"run {folder.name}",
                    r.cluster,
                    ";".join(r.buckets),
                    *(column[i] for column in columns.values()),
                ]
                for i, r in enumerate(records)
            )
    return target


@pytest.mark.parametrize("as_tables", [True, False], ids=["tables", "own records"])
@pytest.mark.parametrize("candidate", list(LOSSES))
def test_same_verdict_as_through_dvc(
    tree: tuple[Path, dict[str, Verdict]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    candidate: str,
    as_tables: bool,
) -> None:
    root, expected = tree
    sides = [root / "build/evaluations" / name for name in ("reference", candidate)]
    if as_tables:
        sides = [export_tables(side, tmp_path / side.name) for side in sides]
    code, _ = run("compare", *sides, "--policy", root / "policy.yaml", "--json", tmp_path / "v.json", capsys=capsys)
    verdict = read_record(tmp_path / "v.json", Judgement).verdicts[0]
    found, known = (
        {(c.metric, c.bucket): c for c in v.comparisons if c.tolerance is not None}
        for v in (verdict, expected[candidate])
    )
    assert verdict.outcome == expected[candidate].outcome
    assert code == command.EXIT_CODES["pass" if verdict.outcome == "inconclusive" else verdict.outcome]  # it warns
    assert found == known and len(found) == 5


@pytest.mark.parametrize(
    ("lost", "options", "code"),
    [
        (0, [], 0),
        (30, [], 10),
        (30, ["--on-inconclusive", "warn"], 0),
        (100, ["--on-inconclusive", "warn"], 20),
        (100, [], 20),
        (100, ["--tolerance", "0.2"], 0),
        (100, ["--tier", "advisory"], 30),
    ],
)
def test_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, options: list[str], code: int
) -> None:
    reference = write_outcomes(tmp_path / "a.csv", [1.0] * 1000)
    candidate = write_outcomes(tmp_path / "b.csv", [0.0] * lost + [1.0] * (1000 - lost))
    seen, said = run("compare", reference, candidate, *options, capsys=capsys)
    assert seen == code, said


def test_a_gated_bucket_of_a_metric_that_passes_overall_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["hard"] * 200 + ["easy"] * 1800
    reference = write_outcomes(tmp_path / "a.csv", [1.0] * 2000, buckets=where)
    candidate = write_outcomes(tmp_path / "b.csv", [0.0] * 30 + [1.0] * 1970, buckets=where)
    assert run("compare", reference, candidate, capsys=capsys)[0] == 0
    code, said = run("compare", reference, candidate, "--bucket", "hard=0.05", capsys=capsys)
    assert code == 20 and "outcomes/score [hard]" in said
    code, said = run("compare", reference, candidate, "--bucket", "hrad=0.05", capsys=capsys)
    assert code == 1 and "the buckets are easy, hard" in said


def test_a_bucket_that_falls_with_nothing_to_gate_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.5 % of cases lost 75 of 100, and no form that people look at said so."""
    where = ["rare"] * 40 + [f"usual/{i % 2}" for i in range(1960)]
    sides = [
        write_outcomes(tmp_path / f"{side}.csv", [0.0] * lost + [1.0] * (2000 - lost), buckets=where)
        for side, lost in (("a", 0), ("b", 30), ("c", 1))
    ]
    code, said = run("compare", *sides[:2], "--summary", tmp_path / "s.md", capsys=capsys)
    note = "not gated: outcomes/score [rare]: lost 75.00 points, and outcomes/score may lose 3 points overall: a bucket"
    assert code == 0 and said.count(note) == 1 and note in (tmp_path / "s.md").read_text().replace("\\", "")
    assert "not gated: outcomes" not in run("compare", sides[0], sides[2], capsys=capsys)[1], "one case is chance"
    assert "not gated: outcomes" not in run("compare", *sides[:2], "--bucket", "rare=0.05", capsys=capsys)[1]
    assert "not gated: outcomes" not in run("compare", *sides[:2], "--tolerance", "0.001", capsys=capsys)[1], "it fails"


def test_order_of_cases_does_not_matter_and_clusters_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty copies of five documents are five documents."""
    scores, clusters = [1.0] * 500, [str(i // 100) for i in range(500)]
    reference = write_outcomes(tmp_path / "a.csv", scores)
    header, *rows = reference.read_text().splitlines()
    write_text(tmp_path / "b.csv", "\n".join([header, *reversed(rows)]) + "\n")
    assert run("compare", reference, tmp_path / "b.csv", capsys=capsys)[0] == 0
    grouped = [write_outcomes(tmp_path / f"{name}.csv", scores, cluster=clusters) for name in "cd"]
    code, said = run("compare", *grouped, capsys=capsys)
    assert code == 10 and "5 clusters" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"doc_hash": "another"}, "the document is another one"),
        ({"prompt_hash": "another"}, "the prompt is another one"),
        ({"target_hash": "another"}, "the target is another one"),
        ({"arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": []}}}}, "the request is another one"),
        ({"exact_match": float("nan")}, "expected a finite number"),
        ({"filter": "another"}, "no such score"),
    ],
)
def test_lm_eval_samples_of_other_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    samples = REAL / "samples_gen_2026-11-22T05-25-09.325403.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows:  # what is asked is the same under every filter
        if row["filter"] == "strict-match" or not change.keys() & {"exact_match", "filter"}:
            row |= change
    write_text(tmp_path / samples.name, "".join(json.dumps(row) + "\n" for row in rows))
    sides = (tmp_path / samples.name, samples) if "filter" in change else (samples, tmp_path / samples.name)
    code, text = run("compare", *sides, "--policy", _policy(tmp_path, "gen/exact_match,strict-match"), capsys=capsys)
    assert code == 30 and said in text


def _policy(folder: Path, metric: str) -> Path:
    gate = {"alpha": 0.05, "on_inconclusive": "block", "tolerances": {metric: {"overall": 0.03}}}
    write_text(folder / "policy.yaml", json.dumps({"gate": gate}))
    return folder / "policy.yaml"


@pytest.mark.parametrize(("metric", "limit", "code"), [("levels", 4.0, 0), ("levels", 2.0, 20), ("right", 4.0, 1)])
def test_a_policy_gives_a_tolerance_in_the_unit_of_the_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, limit: float, code: int
) -> None:
    rng = random.Random(0)
    sides = [
        write_outcomes(
            tmp_path / f"{name}.csv",
            [1.0] * 200,
            name="right",
            levels=[f"{rng.uniform(9, 10) + added:.3f}" for _ in range(200)],
        )
        for name, added in (("a", 0), ("b", 3))
    ]
    gate = {"alpha": 0.05, "on_inconclusive": "block", "tolerances": {f"outcomes/{metric}": {"overall": limit}}}
    write_text(tmp_path / "policy.yaml", json.dumps({"gate": gate}))
    found, text = run(
        "compare", *sides, "--policy", tmp_path / "policy.yaml", "--better", "levels=lower", capsys=capsys
    )
    assert found == code and ("expected less than 1" in text) is (code == 1), text


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda log: log["eval"].update(task="products"), "products: a tolerance is set|no fit outcomes"),
        (lambda log: log["eval"].update(task_version=2), "version: the reference has 0, the candidate 2"),
        (lambda log: log["plan"]["config"].update(temperature=1.0), "generation: the reference has {}"),
        (lambda log: log["eval"]["scorers"].pop(), "scorers: the reference has"),
        (lambda log: log["samples"][0].update(input="2+2?"), "the input is another one"),
        (lambda log: [s["output"].update(completion="") for s in log["samples"]], "not a single output with text"),
    ],
)
def test_inspect_logs_of_other_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    log = json.loads((REAL / "sums.json").read_text())
    edit(log)
    write_text(tmp_path / "log.json", json.dumps(log))
    code, text = run("compare", REAL / "sums.json", tmp_path / "log.json", "--metric", "match", capsys=capsys)
    assert code == 30 and any(part in text for part in said.split("|")), text


def test_settings_of_the_transport_are_no_other_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = json.loads((REAL / "sums.json").read_text())
    log["plan"]["config"]["max_connections"] = 99
    write_text(tmp_path / "log.json", json.dumps(log))
    code, text = run("compare", REAL / "sums.eval", tmp_path / "log.json", "--metric", "match", capsys=capsys)
    assert code == 10 and "every output is the reference's" in text


@pytest.mark.parametrize(("lost", "is_noted"), [(0, True), (1, False)])
def test_equal_scores_without_outputs_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, is_noted: bool
) -> None:
    reference = write_outcomes(tmp_path / "a.csv", [1.0] * 300)
    candidate = write_outcomes(tmp_path / "b.csv", [0.0] * lost + [1.0] * (300 - lost))
    code, text = run("compare", reference, candidate, capsys=capsys)
    assert code == 0 and ("was it another model" in text) is is_noted


def test_a_column_that_bears_the_name_of_an_own_score_is_its_own_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`clipped` is of quantgate's images, where less is better; what it is in a table only its author knows."""
    sides = [
        write_outcomes(tmp_path / f"{name}.csv", [1.0] * 200 + [0.0] * lost, name="clipped")
        for name, lost in (("a", 100), ("b", 100))
    ]
    assert "outcomes/clipped: table, 300 cases; higher is better" in run("compare", *sides, capsys=capsys)[1]
    sides = [write_outcomes(tmp_path / f"{name}.csv", [0.5] * 200, name="psnr_db") for name in "ab"]
    code, text = run("compare", *sides, "--tolerance", "0.1", capsys=capsys)
    assert code == 1 and "--better psnr_db=higher" in text
    sides = [write_outcomes(tmp_path / f"{name}.csv", [1.0] * 200, name="completed") for name in "ab"]
    assert (
        "task_completion_rate: table" in run("compare", *sides, "--metric", "task_completion_rate", capsys=capsys)[1]
    )  # as it was asked for


def test_a_mean_that_can_lose_no_more_than_its_tolerance_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 meant as 3 points let F1 fall from 0.75 to 0."""
    sides = [
        write_outcomes(tmp_path / f"{name}.csv", [value + i / 1e4 for i in range(300)], name="f1")
        for name, value in (("a", 0.75), ("b", 0.0))
    ]
    code, text = run("compare", *sides, "--better", "f1=higher", "--tolerance", "3", capsys=capsys)
    assert code == 30 and "a loss above the tolerance of 3 can't show; it is in the unit of the scores" in text


@pytest.mark.parametrize(("half", "weight"), [(True, False), (False, True)], ids=["one graded", "weighted"])
def test_a_graded_score_proves_no_more_than_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], half: bool, weight: bool
) -> None:
    """Its spread was zero where all scored the same: 30 cases, one of them 0.5, proved a loss of 0.0000."""
    for num, code in ((30, 10), (200, 0)):
        columns: dict[str, Any] = {"weight": ["1"] * num} if weight else {}
        sides = [
            write_outcomes(tmp_path / f"{side}{num}.csv", [0.5 if half else 1.0, *[1.0] * (num - 1)], **columns)
            for side in "ab"
        ]
        assert run("compare", *sides, "--tolerance", 0.03, "--better", "score=higher", capsys=capsys)[0] == code


def test_scores_whose_squares_are_zero_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [
        write_outcomes(tmp_path / f"{side}.csv", [(1 + i * step % 7) * 1e-120 for i in range(200)])
        for side, step in (("a", 2), ("b", 3))
    ]
    code, said = run("compare", *sides, "--tolerance", 1e-120, "--better", "score=higher", capsys=capsys)
    assert code == 30 and "outcomes/score: can't be compared: float division by zero" in said


def test_a_weighted_score_that_can_lose_no_more_than_its_tolerance_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns: dict[str, Any] = {"weight": [str(1 + i % 3) for i in range(120)]}
    sides = [
        write_outcomes(tmp_path / f"{name}.csv", [float(right and i % 2) for i in range(120)], **columns)
        for name, right in (("a", True), ("b", False))
    ]
    code, said = run("compare", *sides, "--tolerance", 0.3, "--better", "score=higher", capsys=capsys)
    assert code == 30 and "a loss above the tolerance of 0.3 can't show" in said


@pytest.mark.parametrize("options", [("--json", "a.csv"), ("--html", "b.csv"), ("--json", "o", "--html", "o")])
def test_nothing_is_written_over_what_is_read_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [write_outcomes(tmp_path / name, [1.0] * 200).read_bytes() for name in ("a.csv", "b.csv")]
    code, said = run("compare", "a.csv", "b.csv", *options, capsys=capsys)
    assert code == 1 and f"{options[-2]}: expected a file of its own, '{options[-1]}' is " in said
    assert [(tmp_path / name).read_bytes() for name in ("a.csv", "b.csv")] == before
    assert not (tmp_path / "o").exists()


def test_nothing_is_written_over_a_file_of_a_folder_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [write_outcomes(tmp_path / side / "n.csv", [1.0] * 200) for side in "ab"]
    before = [path.read_bytes() for path in sides]
    code, said = run("compare", tmp_path / "a", tmp_path / "b", "--json", sides[1], capsys=capsys)
    assert code == 1 and f"--json: expected a file of its own, '{sides[1]}' is read; name another" in said
    assert [path.read_bytes() for path in sides] == before


def test_an_eval_of_another_name_on_the_other_side_is_to_be_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, names in (("a", "mn"), ("b", "mo")):
        for name in names:
            write_outcomes(tmp_path / side / f"{name}.csv", [1.0] * 200)
    code, said = run("compare", tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 30 and "has no fit outcomes of it; it has m, o; one eval has one name on both sides: rename" in said


def test_one_question_under_many_ids_proves_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores, prompts = [1.0] * 1200, [f"question {i % 60}" for i in range(1200)]
    sides = [write_outcomes(tmp_path / f"{name}.csv", scores, prompt=prompts) for name in "ab"]
    code, text = run("compare", *sides, capsys=capsys)
    assert code == 10 and "in 60 clusters" in text


def test_a_summary_is_added_to_that_of_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two comparisons in one step of CI the first one's verdict was gone."""
    sides = [write_outcomes(tmp_path / f"{name}.csv", [1.0] * 200) for name in "ab"]
    step, other = tmp_path / "step.md", tmp_path / "other.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    step.write_text("built\n")
    for _ in range(2):
        for path in (step, other):
            assert run("compare", *sides, "--summary", path, capsys=capsys)[0] == 0
    assert step.read_text() == "built\n" + 2 * other.read_text()


def test_a_hostile_file_name_breaks_neither_xml_nor_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = write_outcomes(tmp_path / "a.csv", [1.0] * 200)
    theirs = write_outcomes(tmp_path / "b`c|d\x1b\n# e.csv", [1.0] * 150 + [0.0] * 50)
    junit, summary = tmp_path / "junit.xml", tmp_path / "summary.md"
    code, _ = run("compare", ours, theirs, "--junit", junit, "--summary", summary, capsys=capsys)
    assert code == 20
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    assert suite.get("name", "").endswith("b`c|d\\x1b\\n# e.csv")
    text = summary.read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and "# e.csv" not in text.splitlines()
    assert text.count("`") % 2 == 0 and "\x1b" not in text


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("a,1\nb,1", "a,1", "1 cases of the reference have no partner, first 'b'"),
        ("a,1", "a,1\nb,1", "1 cases of the candidate have no partner, first 'b'"),
        ("a,1\na,1", "a,1\na,0", "is there twice"),
        ("a,1\nb,1", "a,1\nb,", "expected a finite number as 'score', got none"),
        ("a,0\nb,0", "a,0\nb,0", "a loss above the tolerance of 0.03 can't show"),
        ("a,1\nb,1", "a,1\nb,100", "case 'b': expected 'score' to be 0 or 1, got {'score': 100.0}"),
        ("a,1\nb,1", "a,yes\nb,no", "expected numbers as 'score' on the candidate's side, found none in any case"),
    ],
)
def test_unfit_tables_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: str, theirs: str, said: str
) -> None:
    for name, rows in (("a", ours), ("b", theirs)):
        write_text(tmp_path / f"{name}.csv", f"case_id,score\n{rows}\n" + "\n" * (name == "b"))
    code, text = run("compare", tmp_path / "a.csv", tmp_path / "b.csv", capsys=capsys)
    assert code == 30 and said in text and "REFUSED" in text and "no fit outcomes" not in text


def test_an_edited_file_of_quantgates_own_is_refused(
    tree: tuple[Path, dict[str, Verdict]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = tree
    folder = tmp_path / "edited"
    folder.mkdir()
    for path in (root / "build/evaluations/bad").glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes().replace(b'"completed":0.0', b'"completed":1.0'))
    code, text = run(
        "compare", root / "build/evaluations/reference", folder, "--policy", root / "policy.yaml", capsys=capsys
    )
    assert code == 30 and "the records were edited or cut after they were written" in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compare"], "REFERENCE"),
        (["compare", "a.csv", "b.csv", "--metric", "nope"], "outcomes/one, outcomes/real"),
        (["compare", "a.csv", "b.csv"], "name the metrics to judge with --metric"),
        (["compare", "a.csv", "a.csv"], "a comparison with itself proves nothing"),
        (["compare", "a.csv", "b.csv", "--metric", "real"], "don't say which direction is better"),
        (["compare", "a.csv", "b.csv", "--metric", "real", "--better", "real=lower"], "say with --tolerance"),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--tolerance", "3"], "expected less than 1"),
        (
            ["compare", "a.csv", "b.csv", "--metric", "one", "--bucket", "easy=3"],
            "expected less than 1 for outcomes/one",
        ),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--better", "ome=lower"], "--better ome: no such metric"),
        (["compare", "a.csv", "b.csv", "--policy", "."], ".: not YAML: expected a file, got something else"),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--tolerance", "-1"], "expected a number above 0"),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--tolerance", "nan"], "expected a number above 0"),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--bucket", "x"], "expected NAME=VALUE"),
        (["compare", "a.csv", "b.csv", "--metric", "one", "--html", "."], "--html: expected a file, '.' is a folder"),
        (["compare", "a.csv", "b.csv", "--policy", "none.yaml"], "expected a policy, found no file"),
        (["compare", "a.csv", "b.csv", "--policy", "a.csv"], "expected the key `gate`"),
        (["gate", "agent"], "params.yaml"),
        (["gte"], "invalid choice"),
        (["gate"], "params.yaml"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_outcomes(tmp_path / f"{name}.csv", [1.0, 0.0], name="one", real=["0.5", "0.7"], buckets=["easy", "easy"])
    code, text = run(*argv, capsys=capsys)
    assert code == 1 and said in text and text.startswith("quantgate: ") and text.count("\n") == 1


def test_scores_in_words_are_named_as_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It said to name a metric of none."""
    sides = [
        write_outcomes(tmp_path / side / "help.csv", [1.0] * 40, name="weight", verdict=["yes", "no"] * 20)
        for side in ("a", "b")
    ]
    code, text = run("compare", *sides, capsys=capsys)
    assert (code, text.count("\n")) == (1, 1)
    assert f"{sides[0]}: expected scores that are numbers, or true and false, found none" in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gate"], "expected the name of a product (agent, shots, people, upscaler)"),
        (["gate", "texts"], "products: expected agent or shots or people or upscaler, got 'texts'"),
        (["gate", "agent", "shots"], "unrecognized arguments: shots; see `quantgate --help`"),
    ],
)
def test_which_product_is_meant_is_asked_for_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    assert run(*argv, capsys=capsys) == (1, f"quantgate: {said}\n")


def test_a_score_where_less_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [
        write_outcomes(tmp_path / f"{name}.csv", scores, name="wer")
        for name, scores in (("a", [0.1] * 200), ("b", [0.1] * 100 + [0.4] * 100))
    ]
    options = ["--metric", "wer", "--tolerance", "0.05", "--better"]
    assert run("compare", *sides, *options, "wer=lower", capsys=capsys)[0] == 20
    assert run("compare", *sides, *options, "wer=higher", capsys=capsys)[0] == 10  # a suspicious gain


def test_one_table_with_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"c{i},1,{int(i % 10 > 0)}\n" for i in range(1000))
    write_text(tmp_path / "pairs.csv", "case_id,reference,candidate\n" + rows)
    code, said = run("compare", tmp_path / "pairs.csv", capsys=capsys)
    assert code == 20 and "b 100, c 0 of n 1000" in said


def test_metrics_of_others_are_unknown_after_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [write_outcomes(tmp_path / f"{name}.csv", [1.0] * 50) for name in "ab"]
    run("compare", *sides, capsys=capsys)
    with pytest.raises(KeyError):
        definition_of("outcomes/score")


def test_a_hostile_name_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [write_outcomes(tmp_path / f"{name}.csv", [1.0] * 50, name="x\x1b[2J") for name in "ab"]
    assert "\x1b" not in run("compare", *sides, capsys=capsys)[1]


def test_gate_gives_its_exit_codes_and_leaves_the_marker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(BUILD, LOSSES)
    write_text(BUILD / "gate.ok", "of another run")
    for release, code in ((["good"], 0), (["good", "bad"], 20)):
        product = make_params(list(LOSSES), release, on_inconclusive="block")
        params = Params({product.name: product})
        monkeypatch.setattr(command, "load_params", lambda params=params: params)
        write_record(VERDICT, compare_release(product, BUILD).judgement)
        assert run("gate", capsys=capsys)[0] == run("gate", product.name, capsys=capsys)[0] == code
    assert (BUILD / "gate.ok").read_text() == "of another run"
    VERDICT.unlink()
    code, said = run("gate", capsys=capsys)
    assert code == 30 and said.startswith("quantgate: refused: ")


def test_runs_as_a_program_without_anything_heavy(tmp_path: Path) -> None:
    """It must start in about a second, and where torch is not installed."""
    sides = [write_outcomes(tmp_path / f"{name}.csv", [1.0] * 200) for name in "ab"]
    heavy = {"torch", "mlflow", "dvc", "lm_eval", "matplotlib", "pandas", "pyarrow"}
    script = (
        "import sys; from pipeline.__main__ import main; code = main(sys.argv[1:]);"
        f"sys.exit(99 if {heavy} & sys.modules.keys() else code)"
    )
    for program in ([sys.executable, "-c", script], [sys.executable, "-m", "pipeline"]):
        child = subprocess.run([*program, "compare", *sides], cwd=ROOT, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        assert "PASS" in child.stdout and not child.stderr


def test_a_reader_of_the_pipe_that_has_gone_changes_neither_exit_code_nor_files(tmp_path: Path) -> None:
    """`quantgate compare ... | head -1` ended with 1 instead of the verdict's code, and wrote no page."""
    sides = [write_outcomes(tmp_path / f"{i}.csv", [score] * 200) for i, score in enumerate((1.0, 0.0))]
    page, (read, written) = tmp_path / "page.html", os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipeline", "compare", *map(str, sides), "--html", str(page)]
    child = subprocess.run(command, cwd=ROOT, stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert (child.returncode, child.stderr) == (20, "")
    assert "fail" in page.read_text()


def test_what_an_installed_command_needs_is_what_was_run() -> None:
    """Another range than that of requirements.txt was never tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = {line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert set(project["dependencies"]) <= lines


def test_the_launcher_of_a_clone_runs_its_own_pipeline_from_anywhere(tmp_path: Path) -> None:
    """A folder `pipeline` where it is called is somebody else's."""
    folder = tmp_path / "clone/.venv/bin"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts/quantgate", folder)
    write_text(folder / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    (tmp_path / "clone/pipeline").symlink_to(ROOT / "pipeline")
    write_text(tmp_path / "here/pipeline/__main__.py", "raise SystemExit('another')")
    child = subprocess.run([folder / "quantgate", "gte"], cwd=tmp_path / "here", capture_output=True, text=True)
    assert child.returncode == 1 and child.stderr.startswith("quantgate: argument")


def test_the_judgement_is_written_in_every_form_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = write_outcomes(tmp_path / "a.csv", [1.0] * 200, output=["yes"] * 200)
    theirs = write_outcomes(tmp_path / "b.csv", [1.0] * 150 + [0.0] * 50, output=["yes"] * 150 + ["<b>no</b>"] * 50)
    forms = {name: tmp_path / name for name in ("html", "junit", "summary", "json")}
    asked = [word for name, path in forms.items() for word in (f"--{name}", path)]
    code, _ = run("compare", ours, theirs, *asked, capsys=capsys)
    assert code == 20
    page = forms["html"].read_text()
    assert "&lt;b&gt;no&lt;/b&gt;" in page.replace("<mark>", "").replace("</mark>", "") and "<b>no</b>" not in page
    assert "<failure" in forms["junit"].read_text()
    assert "fail" in forms["summary"].read_text()


@pytest.mark.parametrize(
    ("products", "options", "code", "said"),
    [
        (("own",), (), 20, "FAIL"),
        (("own", "other"), ("--product", "own"), 20, "FAIL"),
        (("own", "other"), ("--product", "other"), 0, "PASS"),
        (("own", "other"), (), 1, "--product: expected one of own, other, got none"),
        (("own",), ("--product", "others"), 1, "--product: expected one of own, got others"),
    ],
)
def test_the_policy_of_params_yaml_is_that_of_one_product(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    products: tuple[str, ...],
    options: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    sides = [
        write_outcomes(tmp_path / f"{name}.csv", [0.0] * lost + [1.0] * (1000 - lost), name="score")
        for name, lost in (("a", 0), ("b", 100))
    ]
    gates = {
        name: {"alpha": 0.05, "on_inconclusive": "block", "tolerances": {"outcomes/score": {"overall": limit}}}
        for name, limit in (("own", 0.03), ("other", 0.5))
    }
    write_text(tmp_path / "params.yaml", json.dumps({"products": {name: {"gate": gates[name]} for name in products}}))
    found, text = run("compare", *sides, "--policy", tmp_path / "params.yaml", *options, capsys=capsys)
    assert found == code and said in text, text
