"""`quantgate compare FOLDER FOLDER`: every file is judged by its own reader, or refused by name."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.outcomes.cases import Grouping
from pipeline.outcomes.registry import read_side
from tests.fakes.outcome_tables import DATE, REAL, run, write_outcomes, write_samples

PLAIN = Grouping()


def write_log(folder: Path, *, num: int = 200, wrong: int = 0) -> Path:
    """Write a log of inspect_ai, with the samples of a real one numbered anew."""
    log = json.loads((REAL / "sums.json").read_text())
    first = log["samples"][0]
    log["samples"] = [
        first
        | {
            "id": f"s{i}",
            "input": f"what is {i}?",
            "scores": {"match": {"value": "CI"[i < wrong]}},
            "output": {"completion": f"{folder.name} {i}"},
        }
        for i in range(num)
    ]
    log["results"]["total_samples"] = num
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.json").write_text(json.dumps(log))
    return folder / "log.json"


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with samples of lm-eval that differ in nothing but their answers."""
    for side in ("a", "b"):
        write_samples(tmp_path / side)
    return tmp_path / "a", tmp_path / "b"


OPTIONS = ("--better", "gen/exact_match=higher")


@pytest.mark.parametrize("name", ["safety.csv", "safety.CSV", "safety.tsv", "deeper/safety.jsonl", "safety.JSONL"])
def test_a_table_beside_samples_is_judged(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The first reader that found a file took the folder, and a safety eval that fell to 0 % was never mentioned."""
    for side, score in zip(sides, (1.0, 0.0), strict=True):
        path = side / name
        path.parent.mkdir(exist_ok=True)
        separator = "\t" if name.endswith("tsv") else ","
        rows = [("case_id", "score"), *((f"c{i}", score) for i in range(500))]
        if name.lower().endswith("jsonl"):
            path.write_text("".join(json.dumps({"case_id": i, "score": score}) + "\n" for i in range(500)))
        else:
            path.write_text("".join(separator.join(map(str, row)) + "\n" for row in rows))
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 20 and "safety/score" in said and "gen/exact_match" in said, said


def test_every_format_of_a_folder_is_judged(sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for side in sides:
        write_log(side)
        write_outcomes(side / "safety.csv", [1.0] * 200)
        shutil.copy(REAL / f"results_{DATE}.json", side)
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 0, said
    assert all(f"{name}: " in said for name in ("gen/exact_match", "sums/match", "safety/score"))
    write_log(sides[1], wrong=100)
    assert run("compare", *sides, *OPTIONS, capsys=capsys)[0] == 20


def test_two_tasks_of_which_one_fell_are_both_judged(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for side, wrong in zip(sides, (0, 60), strict=True):
        write_samples(side, task="more", wrong=wrong)
    code, said = run("compare", *sides, *OPTIONS, "--better", "more/exact_match=higher", capsys=capsys)
    assert code == 20 and "more/exact_match" in said


@pytest.mark.parametrize(
    "name",
    [
        "safety.csv.gz",
        "safety.jsonl.zst",
        "safety.parquet",
        "safety.xlsx",
        "safety.json",
        "results_safety.json",
        "safety.eval.zip",
        "safety.arrow",
        "safety.pkl",
        "safety.sqlite",
        "safety",
        "safety.csv.bak",
        ".safety.dat",
    ],
)
@pytest.mark.parametrize("where", [0, 1])
def test_data_that_nothing_reads_is_refused_by_name(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str, where: int
) -> None:
    (sides[where] / name).write_bytes(gzip.compress(b"case_id,score\na,0\n"))
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 30 and f"{sides[where] / name}: " in said and "not judged" in said, said


@pytest.mark.parametrize(
    "name",
    [
        f"results_{DATE}.json",
        "README.md",
        "notes.txt",
        "run.log",
        "plot.png",
        "report.html",
        "config.yaml",
        ".DS_Store",
        "run.sh",
        "LICENSE",
    ],
)
def test_what_is_no_data_may_lie_beside(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for side in sides:
        (side / name).write_text("{}" if name.endswith("json") else "x")
    assert run("compare", *sides, *OPTIONS, capsys=capsys)[0] == 0


def test_what_an_eval_set_of_inspect_keeps_beside_its_logs_is_no_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder of `inspect eval-set` was judged: its list of logs has the words of a log, and holds no sample."""
    sides = [tmp_path / "a", tmp_path / "b"]
    for side in sides:
        log = json.loads(write_log(side).read_text())
        (side / "logs.json").write_text(json.dumps({"log.json": {key: log[key] for key in ("status", "eval")}}))
        (side / "eval-set.json").write_text("{}")
    assert run("compare", *sides, capsys=capsys)[0] == 30
    for side in sides:
        (side / ".eval-set-id").write_text("4fKc")
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 0, said
    (sides[1] / "safety.json").write_text("{}")
    assert run("compare", *sides, capsys=capsys)[0] == 30


@pytest.mark.parametrize(("where", "other"), [(0, "candidate"), (1, "reference")])
@pytest.mark.parametrize("options", [OPTIONS, (*OPTIONS, "--metric", "gen/exact_match")], ids=["all", "one metric"])
def test_an_eval_that_one_side_alone_has_is_refused(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], where: int, other: str, options: tuple[str, ...]
) -> None:
    write_outcomes(sides[where] / "safety.csv", [1.0] * 200)
    code, said = run("compare", *sides, *options, capsys=capsys)
    assert code == 30 and "safety: " in said and f"the {other} has no" in said, said


def test_folders_of_one_table_each_under_two_names_are_two_evals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`help.csv` against `safety.csv` was one eval called `outcomes`."""
    write_outcomes(tmp_path / "a/help.csv", [1.0] * 200)
    write_outcomes(tmp_path / "b/safety.csv", [1.0] * 200)
    code, said = run("compare", tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 30 and "help: " in said and "safety: " in said, said


@pytest.mark.parametrize("other", ["gen.csv", "deeper/gen.tsv"])
def test_two_files_of_one_eval_are_refused(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], other: str
) -> None:
    for side in sides:
        path = write_outcomes(side / other, [1.0] * 200, name="exact_match")
        path.write_text(path.read_text().replace(",", "\t" if other.endswith("tsv") else ","))
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 30 and "a second file of gen, beside " in said, said


def test_a_linked_folder_is_refused_and_not_passed_over(
    sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_outcomes(tmp_path / "elsewhere/safety.csv", [0.0] * 200)
    (sides[1] / "more").symlink_to(tmp_path / "elsewhere")
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 30 and f"{sides[1] / 'more'}: " in said and "a link that leads out of it" in said, said


@pytest.mark.parametrize("folder", [".cache", ".git", ".ipynb_checkpoints"])
def test_data_in_a_tools_folder_is_not_passed_over(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """A table in `.cache` was judged by nobody, whatever it lost."""
    for side, score in zip(sides, (1.0, 0.0), strict=True):
        write_outcomes(side / folder / "safety.csv", [score] * 200)
        (side / folder / "index").write_text("a tool's own")
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code != 0 and "safety" in said, said


def test_what_an_evaluation_keeps_beside_its_records_is_no_eval(tmp_path: Path) -> None:
    """Arrays, the canary and the server's own configuration are sealed by the index."""
    from tests.fakes.synthetic_records import Behaviour, write_tree

    write_tree(tmp_path, {"good": Behaviour()})
    folder = tmp_path / "evaluations/good"
    (folder / "config").mkdir(exist_ok=True)
    assert not read_side(folder, PLAIN).problems
    (folder / "stray.npz").write_bytes(b"x")
    assert "stray.npz: " in read_side(folder, PLAIN).problems[0]


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "copy": shutil.copy,
    "hard link": os.link,
    "symlink": lambda a, b: b.symlink_to(a),
}


@pytest.mark.parametrize("link", list(LINKS))
@pytest.mark.parametrize("kind", ["table", "lm-eval", "inspect_ai"])
def test_a_candidate_that_is_the_references_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str, kind: str
) -> None:
    """It was a note beside a pass."""
    write = {
        "table": lambda folder: write_outcomes(folder / "t.csv", [1.0] * 200, output=["x"] * 200),
        "lm-eval": write_samples,
        "inspect_ai": write_log,
    }[kind]
    ours = write(tmp_path / "a")
    theirs = tmp_path / "b" / ours.name
    theirs.parent.mkdir()
    LINKS[link](ours, theirs)
    better = () if kind != "lm-eval" else OPTIONS
    for pair in ((ours, theirs), (ours.parent, theirs.parent))[link == "symlink" :]:
        code, said = run("compare", *pair, *better, capsys=capsys)
        same = f"holds the same bytes as the reference's {ours}"
        why = "got a link that leads out of it" if link == "symlink" else same
        assert code == 30 and f"{theirs}: " in said and why in said, said


def test_one_copied_eval_among_others_is_refused(sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for side in sides:
        write_outcomes(side / "safety.csv", [1.0] * 200)
    shutil.copy(sides[0] / "safety.csv", sides[1] / "safety.csv")
    code, said = run("compare", *sides, *OPTIONS, capsys=capsys)
    assert code == 30 and said.count("holds the same bytes") == 1


@pytest.mark.parametrize(
    ("told", "code"),
    [
        pytest.param((None, None), 30, id="nothing"),
        pytest.param(({"model_args": "a"}, None), 30, id="of-one"),
        pytest.param(({"model_args": "a"}, {"model_args": "a"}), 30, id="one-model-twice"),
        pytest.param(({"model_args": "a"}, {"model_args": "b"}), 0, id="two-models"),
        pytest.param(({"model_args": "a"}, {"model_args": "b", "use_cache": "a.db"}), 30, id="answers-of-a-cache"),
        pytest.param(({"model_args": "a", "use_cache": "a.db"}, {"model_args": "b"}), 30, id="of-the-reference"),
        pytest.param(({"model": "hf"}, {"model": "vllm"}), 30, id="no-arguments"),
        pytest.param(
            ({"model_args": {"model": "<a at 0x7f>"}}, {"model_args": {"model": "<a at 0x8f>"}}), 30, id="an-address"
        ),
        pytest.param(({"model_args": {"timeout": math.inf}}, {"model_args": {"timeout": math.nan}}), 0, id="no-number"),
        pytest.param((["a"], "b"), 30, id="another-shape"),
    ],
)
def test_two_models_that_answer_alike_differ_in_their_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: tuple[Any, Any], code: int
) -> None:
    """Samples of lm-eval name no model: what loses nothing, as a kernel or drafts may, could not be judged at all."""
    files = []
    for side, config in zip("ab", told, strict=True):
        files.append(write_samples(tmp_path / side / "run"))
        if config:
            results = {"config": config, "end_time": side}
            files[-1].with_name(f"results_{DATE}.json").write_text(json.dumps(results))
    assert files[0].read_bytes() == files[1].read_bytes()
    got, said = run("compare", *files, *OPTIONS, capsys=capsys)
    assert got == code, said
    assert ("was it another model that answered?" if code == 0 else "holds the same bytes") in said


LOWER = '{"higher_is_better": {"gen": {"exact_match": false}}}'


@pytest.mark.parametrize("name", ["results", "x", "my.run_4"])
def test_results_are_found_under_the_name_that_lm_eval_gives_them(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """`--output_path x.json` writes `x_<date>.json`, which was refused as data that nothing reads."""
    for side in sides:
        (side / f"{name}_{DATE}.json").write_text(LOWER)
    said = run("compare", *sides, capsys=capsys)[1]
    assert "gen/exact_match: lm-eval samples, 200 cases; lower is better" in said and "not judged" not in said, said


def test_results_of_other_samples_are_none_of_these(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = sides[1] / f"x_{DATE[:-1]}9.json"
    other.write_text(LOWER)
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 30 and f"{other}: " in said and "not judged" in said and "higher is better" in said, said


def test_samples_in_another_format_are_no_results(sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A task that nobody can read would be missing in silence."""
    other = sides[1] / f"samples_mc_{DATE}.json"
    other.write_text("[]")
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 30 and f"{other}: " in said, said


def test_two_results_of_the_same_samples_are_refused(
    sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x", "y"):
        (sides[1] / f"{name}_{DATE}.json").write_text(LOWER)
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 30 and f"expected one results file beside it, found x_{DATE}.json and y_{DATE}.json" in said, said


def test_equal_outcomes_in_other_bytes_stay_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (write_outcomes(tmp_path / f"{side}.csv", [1.0] * 200) for side in "ab")
    code, said = run("compare", ours, theirs, capsys=capsys)
    assert code == 0 and "was it another model that answered?" in said


def test_a_table_of_both_sides_is_one_file_and_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"c{i},1,1\n" for i in range(200))
    (tmp_path / "t.csv").write_text(f"case_id,reference,candidate\n{rows}")
    assert run("compare", tmp_path / "t.csv", capsys=capsys)[0] == 0


def test_a_link_to_the_references_file_is_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write_outcomes(tmp_path / "a.csv", [1.0] * 200)
    (tmp_path / "b.csv").symlink_to(ours)
    code, said = run("compare", ours, tmp_path / "b.csv", capsys=capsys)
    assert code == 1 and "a comparison with itself proves nothing" in said
