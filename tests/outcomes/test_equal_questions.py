"""Equal questions are one cluster and weigh one, in every format: more ids of a question are no more evidence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.outcomes.cases import Grouping
from pipeline.outcomes.registry import read_side
from pipeline.records.evaluations import CaseRecord
from tests.fakes.outcome_tables import run, write_outcomes
from tests.paths import ROOT

REAL = ROOT / "tests/golden/records"
GENERATED = "samples_gen_2026-11-22T05-25-09.325403.jsonl"
FORMATS = ["table", "lm_eval", "inspect_ai"]
Row = tuple[str, str, float]  # id, question, score


def write_rows(path: Path, rows: list[Row], *, format: str, target: str = "4", **more: str) -> Path:
    """Write one side of an eval called `sums`, in one of the formats, with `more` fields of each case."""
    path.mkdir(parents=True, exist_ok=True)
    if format == "table":
        lines = [
            {
                "case_id": name,
                "prompt": asked,
                "target": target,
                "match": score,
                "run": str(path),
                "output": f"{path.name} {name}",
                **more,
            }
            for name, asked, score in rows
        ]
        file = path / "sums.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif format == "lm_eval":
        first = json.loads((REAL / GENERATED).read_text().splitlines()[0])
        lines = [
            first
            | {
                "doc_id": int(name),
                "doc": {"question": asked, "id": name, **more},
                "doc_hash": f"doc {name}",
                "prompt_hash": asked,
                "target_hash": target,
                "filter": "none",
                "match": score,
                "resps": [[f"{path.name} {name}"]],
                "arguments": {"gen_args_0": {"arg_0": asked, "arg_1": {}}},
            }
            for name, asked, score in rows
        ]
        file = path / "samples_sums_2026-11-22T05-25-09.325403.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        log = json.loads((REAL / "sums.json").read_text())
        sample = log["samples"][0]
        log["samples"] = [
            sample
            | {
                "id": name,
                "input": asked,
                "target": target,
                "metadata": {"id": name, **more},
                "scores": {"match": {"value": score}},
                "output": {"completion": f"{path.name} {name}"},
            }
            for name, asked, score in rows
        ]
        log["results"]["total_samples"] = len(rows)
        file = path / "log.json"
        file.write_text(json.dumps(log))
    return file


def number(questions: list[tuple[str, float]]) -> list[Row]:
    return [(str(i), asked, score) for i, (asked, score) in enumerate(questions)]


def read_records(path: Path, grouping: Grouping | None = None) -> list[CaseRecord]:
    side = read_side(path, grouping or Grouping())
    assert not side.problems, side.problems
    return next(iter(side.outcomes.values())).records


def compare(
    tmp_path: Path,
    ours: list[tuple[str, float]],
    theirs: list[tuple[str, float]],
    capsys: pytest.CaptureFixture[str],
    *options: object,
    format: str,
    **more: str,
) -> tuple[int, str]:
    sides = [
        write_rows(tmp_path / side, number(rows), format=format, **more) for side, rows in (("a", ours), ("b", theirs))
    ]
    return run("compare", *sides, "--metric", "match", "--better", "match=higher", *options, capsys=capsys)


@pytest.mark.parametrize("format", FORMATS)
def test_few_questions_under_many_ids_prove_no_more_than_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """Ten questions, each under 40 ids, were 400 clusters and passed."""
    rows = [(f"question {i % 10}", 1.0) for i in range(400)]
    code, said = compare(tmp_path, rows, rows, capsys, format=format)
    assert code == 10 and "400 cases in 10 clusters" in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_unflipped_questions_repeated_do_not_dilute_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """Of 1,000 questions 50 are lost; with the others there three times, 5 points shrank to 1.8."""

    def build(lost: int) -> list[tuple[str, float]]:
        rows = [(f"question {i}", float(i >= lost)) for i in range(1000)]
        return rows + rows[50:] + rows[50:]

    code, said = compare(tmp_path, build(0), build(50), capsys, format=format)
    assert code == 20 and "b 50, c 0 of n 1000" in said, said
    assert "1,900 of 2,900 cases were left out" in said and "'1000'" in said and "'50'" in said, said


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("lost", "code"), [(50, 30), (12, 0)])  # of 400 cases in all, 12 are tolerated
def test_a_loss_among_what_is_left_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, lost: int, code: int
) -> None:
    """200 rows had an instruction as their prompt; 199 of them were left out, with all that was lost, and it passed."""

    def build(lost: int) -> list[tuple[str, float]]:
        rows = [(f"question {i}", float(i > 20)) for i in range(200)]
        return rows + [("Answer in a word.", float(i < 100 or i >= 100 + lost)) for i in range(200)]

    came, said = compare(tmp_path, build(0), build(lost), capsys, format=format)
    assert came == code and "199 of 400 cases were left out" in " ".join(said.split()), said
    assert ("with them the loss is 12.50 points, tolerated 3 points" in " ".join(said.split())) == (code == 30), said


@pytest.mark.parametrize(("lost", "code"), [(40, 30), (20, 0)])  # of 800 hard rows, 32 are tolerated
def test_a_loss_of_a_bucket_among_what_is_left_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, code: int
) -> None:
    """Of 4,800 rows it was 0.8 points, and of the bucket that was gated 5."""
    prompts = [f"easy {i}" for i in range(4000)] + [f"hard {i % 400}" for i in range(800)]
    levels = ["easy"] * 4000 + ["hard"] * 800
    right = [1.0] * 4400
    sides = [
        write_outcomes(
            tmp_path / f"{name}.csv", right + [float(i >= gone) for i in range(400)], prompt=prompts, level=levels
        )
        for name, gone in (("a", 0), ("b", lost))
    ]
    came, said = run("compare", *sides, "--buckets-by", "level", "--bucket", "level/hard=0.04", capsys=capsys)
    assert came == code, said
    assert ("[level/hard]: 400 cases were left out" in " ".join(said.split())) == (code == 30), said


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "spell",
    [
        lambda asked, i: asked + " " * i,
        lambda asked, i: asked.replace(" ", " " * (i + 1)) + "\r\n" * i,
        lambda asked, i: asked.replace("\u00e9", "e\u0301"),
        lambda asked, i: asked.replace("\n\n", "\r\n" + " " * i + "\r\n"),
    ],
    ids=["trailing spaces", "more spaces", "composed letters", "spaces on an empty line"],
)
def test_the_same_question_spelled_otherwise_does_not_dilute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, spell: Callable[[str, int], str]
) -> None:
    """Five points of 1,000 questions: with a space more in each copy they were other questions, and 1.7 points."""

    def build(lost: int) -> list[tuple[str, float]]:
        rows = [(f"question {i}\n\ndu caf\u00e9", float(i >= lost)) for i in range(1000)]
        return rows + [(spell(asked, times), score) for times in (1, 2) for asked, score in rows[50:]]

    code, said = compare(tmp_path, build(0), build(50), capsys, format=format)
    assert code == 20 and "b 50, c 0 of n 1000" in said, said


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["# {i}\nfor x in xs:\n    a()\n{indent}b()", "{indent}return {i}\nprint(x)"],
    ids=["a line", "the first line"],
)
def test_questions_that_are_indented_otherwise_are_one_cluster_and_all_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, text: str
) -> None:
    """Where a line stands says what code does: with the second of each pair left out, a loss of 50 points passed."""

    def build(right: float) -> list[tuple[str, float]]:
        pairs = ((text.format(i=i, indent="    " * k), 1.0 if not k else right) for i in range(200) for k in (0, 1))
        return [*pairs, ("another question", 1.0)]

    code, said = compare(tmp_path, build(1.0), build(0.0), capsys, format=format)
    assert code == 20 and "b 200, c 0 of n 401" in said and "401 cases in 201 clusters" in said, said
    assert "its 401 questions are 201 but for white space" in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_a_space_behind_a_target_makes_no_other_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """Copies whose target has a space more counted, and hid the loss of others."""
    sides = []
    for side, lost in (("a", 0), ("b", 50)):
        rows = number([(f"question {i}", float(i >= lost)) for i in range(1000)])
        copies = [(str(1000 + int(name)), asked, score) for name, asked, score in rows[50:]]
        parts = (("own", rows, "4"), ("copies", copies, "4  "))
        both = [
            write_rows(tmp_path / side / part, own, format=format, target=target, side=side)
            for part, own, target in parts
        ]
        if format == "inspect_ai":
            log, other = (json.loads(file.read_text()) for file in both)
            log["samples"] += other["samples"]
            log["results"]["total_samples"] = len(log["samples"])
            both[0].write_text(json.dumps(log))
        else:
            both[0].write_text(both[0].read_text() + both[1].read_text())
        sides.append(both[0])
    code, said = run("compare", *sides, "--metric", "match", "--better", "match=higher", capsys=capsys)
    assert code == 20 and "b 50, c 0 of n 1000" in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_questions_of_other_words_stay_others(tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str) -> None:
    """The other side: a square is no two, and other letters are other questions."""
    spellings = ("what is {} x\u00b2?", "what is {} x2?", "what is {}x2?")
    rows = [(spelling.format(i), 1.0) for i in range(200) for spelling in spellings]
    code, said = compare(tmp_path, rows, rows, capsys, format=format)
    assert code == 0 and "n 600" in said and "left out" not in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_questions_repeated_do_not_make_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """The other side: five lost of 1,000, each there 20 times more, are five."""
    rows = [(f"question {i}", float(i >= 5)) for i in range(1000)]
    repeats = [row for row in rows[:5] for _ in range(20)]
    ours = [(asked, 1.0) for asked, _ in rows + repeats]
    code, said = compare(tmp_path, ours, rows + repeats, capsys, format=format)
    assert code == 0 and "b 5, c 0 of n 1000" in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_which_repeat_counts_depends_on_neither_order_nor_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    rows = number([(f"question {i % 300}", 1.0) for i in range(450)])
    theirs = rows.copy()
    random.Random(0).shuffle(theirs)
    sides = [write_rows(tmp_path / side, side_rows, format=format) for side, side_rows in (("a", rows), ("b", theirs))]
    code, said = run("compare", *sides, "--metric", "match", "--better", "match=higher", capsys=capsys)
    assert code == 0 and "n 300" in said, said


@pytest.mark.parametrize("format", FORMATS)
def test_as_many_repeats_of_each_question_all_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """Repeated trials under ids of their own: every question weighs the same already."""
    rows = [(f"question {i % 200}", 1.0) for i in range(600)]
    code, said = compare(tmp_path, rows, rows, capsys, format=format)
    assert code == 0 and "n 600" in said and "600 cases in 200 clusters" in said and "left out" not in said, said
    assert "its 600 cases ask 200 questions, 3 times each: equal questions are one cluster" in said


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("by_option", [True, False], ids=["--cluster-by", "own field"])
def test_a_field_makes_clusters_coarser_and_never_finer(tmp_path: Path, format: str, by_option: bool) -> None:
    """A field `cluster` in lm-eval's documents overrode what tells that two documents are one."""
    rows = number([(f"question {i % 10}", 1.0) for i in range(40)])
    name = "group" if by_option else "cluster"
    grouping = Grouping(cluster="group") if by_option else Grouping()
    if format == "inspect_ai" and not by_option:
        grouping = Grouping(cluster="cluster")  # its metadata has no field of its own
    for value, expected in (("all", 1), (None, 10)):
        path = write_rows(tmp_path / str(value), rows, format=format, **{name: value or ""})
        if value is None:
            path.write_text(_tell_apart(path.read_text(), name))
        assert len({r.cluster for r in read_records(path, grouping)}) == expected


def _tell_apart(text: str, name: str) -> str:
    """Give each case its own value of a field."""
    parts = text.split(f'"{name}": ""')
    return "".join(part + (f'"{name}": "own {i}"' if i < len(parts) - 1 else "") for i, part in enumerate(parts))


def test_clusters_that_share_a_question_are_one(tmp_path: Path) -> None:
    """a and b are one as they share a passage, b and c as they ask the same."""
    rows = [("a", "1?", "x"), ("b", "2?", "x"), ("c", "2?", "y"), ("d", "3?", "z"), ("e", "1?", "u"), ("f", "3?", "z")]
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps({"case_id": name, "prompt": asked, "cluster": cluster, "score": 1}) + "\n"
            for name, asked, cluster in rows
        )
    )
    found = {r.case_id: r.cluster for r in read_records(path)}
    assert len({found[name] for name in "abce"}) == 1 and found["d"] == found["f"] != found["a"]


@pytest.mark.parametrize("format", FORMATS)
def test_one_question_with_other_targets_is_one_cluster_of_other_cases(tmp_path: Path, format: str) -> None:
    """Their answers are one answer, and each is judged by another target."""
    rows = number([(f"question {i}", 1.0) for i in range(4)])
    both = []
    for target, part in (("4", rows), ("5", [("9", "question 0", 1.0)])):
        both.append(write_rows(tmp_path / target, part, format=format, target=target))
    if format == "inspect_ai":
        log, other = (json.loads(file.read_text()) for file in both)
        log["samples"] += other["samples"]
        log["results"]["total_samples"] = 5
        both[0].write_text(json.dumps(log))
    else:
        both[0].write_text(both[0].read_text() + both[1].read_text())
    records = read_records(both[0])
    assert len(records) == 5 and len({r.cluster for r in records}) == 4


def test_one_document_with_few_shot_texts_drawn_anew_is_one_question(tmp_path: Path) -> None:
    rows = number([(f"question {i}", 1.0) for i in range(5)])
    path = write_rows(tmp_path, rows, format="lm_eval")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["doc_hash"] = lines[0]["doc_hash"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [r.case_id for r in read_records(path)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("num_more", [40, 45])
def test_epochs_of_a_sample_are_trials_and_uneven_ones_weigh_alike(tmp_path: Path, num_more: int) -> None:
    path = write_rows(tmp_path, number([(f"question {i}", 1.0) for i in range(40)]), format="inspect_ai")
    log = json.loads(path.read_text())
    log["samples"] += [log["samples"][i % 40] | {"epoch": 2 + i // 40} for i in range(num_more)]
    log["results"]["total_samples"] = len(log["samples"])
    path.write_text(json.dumps(log))
    records = read_records(path)
    assert len(records) == 80 and len({r.cluster for r in records}) == 40


def test_a_repeat_without_a_judgement_is_not_left_out_in_silence(tmp_path: Path) -> None:
    path = write_rows(tmp_path, number([("q", 1.0), ("r", 1.0), ("q", 1.0)]), format="inspect_ai")
    log = json.loads(path.read_text())
    log["samples"][2]["error"] = {"message": "boom"}
    path.write_text(json.dumps(log))
    assert "1 of 3 cases have no judgement" in read_side(path, Grouping()).problems[0]


def test_real_sets_lose_nothing() -> None:
    records = read_records(REAL / GENERATED)
    assert len(records) == len({r.cluster for r in records}) == 4
    assert len(read_records(REAL / "sums.eval")) == 6


def test_an_empty_input_tells_no_question(tmp_path: Path) -> None:
    """What such samples ask is elsewhere: in files that a log does not hold, or in a dialogue."""
    path = write_rows(tmp_path, number([("", 1.0)] * 40), format="inspect_ai")
    assert len({r.cluster for r in read_records(path)}) == 40
    path = write_rows(tmp_path / "t", number([("", 1.0)] * 40), format="table")
    assert len({r.cluster for r in read_records(path)}) == 40
