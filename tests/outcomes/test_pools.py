"""Evals judged as one: the pool has the bound of all cases, its evals are buckets, and nothing of it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.outcome_tables import run, write_outcomes

SUBJECTS = ("algebra", "law", "logic")


def write_sides(
    tmp_path: Path,
    *,
    losses: tuple[int, int, int] = (2, 2, 2),
    gains: tuple[int, int, int] = (2, 2, 2),
    n: int = 120,
    **columns: Callable[[str], list[str]],
) -> tuple[Path, Path]:
    """Write a table a subject of both sides: 10 wrong at first, of which some are gained, others are lost."""
    for side, lost, gained in (("before", (0, 0, 0), (0, 0, 0)), ("after", losses, gains)):
        for subject, b, c in zip(SUBJECTS, lost, gained, strict=True):
            scores = [1.0] * c + [0.0] * (10 - c) + [0.0] * b + [1.0] * (n - 10 - b)
            own: dict[str, Any] = {name: values(subject) for name, values in columns.items()}
            write_outcomes(tmp_path / side / f"{subject}.csv", scores, **own)
    return tmp_path / "before", tmp_path / "after"


def test_a_pool_proves_what_its_evals_alone_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = write_sides(tmp_path)
    alone, said = run("compare", *sides, "--metric", "score", capsys=capsys)
    assert alone == 10 and said.count("not proven") >= 3
    code, said = run(
        "compare", *sides, "--pool", "school=algebra,law,logic", "--json", tmp_path / "v.json", capsys=capsys
    )
    assert code == 0
    verdict = json.loads((tmp_path / "v.json").read_text())
    comparisons = {(c["metric"], c["bucket"]): c for v in verdict["verdicts"] for c in v["comparisons"]}
    whole = comparisons["school/score", None]
    assert (whole["n"], whole["num_clusters"], whole["b"], whole["c"]) == (360, 360, 6, 6)
    assert {bucket for _, bucket in comparisons} == {None, *SUBJECTS}
    files = verdict["verdicts"][0]["facts"]["records"]
    assert sorted(files) == ["algebra.csv", "law.csv", "logic.csv"]


def test_an_eval_that_falls_in_a_pool_is_named_and_may_be_gated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a pool that hides one subject's loss behind the gains of others."""
    sides = write_sides(tmp_path, losses=(0, 12, 0), gains=(4, 0, 4))
    pool = ("--pool", "school=*", "--tolerance", 0.05)
    code, said = run("compare", *sides, *pool, capsys=capsys)
    assert code == 0 and "law" in said and "10.00 points" in said
    code, said = run("compare", *sides, *pool, "--bucket", "law=0.05", capsys=capsys)
    assert code == 20 and "[law]" in said


def test_questions_that_several_evals_share_are_one_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared: dict[str, Any] = {"prompt": lambda _: [f"question {i}" for i in range(120)]}
    other: dict[str, Any] = {"prompt": lambda subject: [f"{subject} {i}" for i in range(120)]}
    counts = []
    for name, columns in (("shared", shared), ("other", other)):
        sides = write_sides(tmp_path / name, **columns)
        run("compare", *sides, "--pool", "school=*", "--json", tmp_path / f"{name}.json", capsys=capsys)
        whole = json.loads((tmp_path / f"{name}.json").read_text())["verdicts"][0]["comparisons"][0]
        counts.append((whole["n"], whole["num_clusters"]))
    assert counts == [(360, 120), (360, 360)]


@pytest.mark.parametrize("absent", ["before", "after"])
def test_an_eval_of_a_pool_that_a_side_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], absent: str
) -> None:
    sides = write_sides(tmp_path)
    (tmp_path / absent / "law.csv").unlink()
    code, said = run("compare", *sides, "--pool", "school=*", capsys=capsys)
    assert code == 30 and "no fit outcomes of law" in said


def test_a_copied_file_within_a_pool_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = write_sides(tmp_path)
    (theirs / "law.csv").write_bytes((ours / "law.csv").read_bytes())
    code, said = run("compare", ours, theirs, "--pool", "school=*", capsys=capsys)
    assert code == 30 and "same bytes" in said


def test_evals_that_are_scored_otherwise_are_no_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = write_sides(tmp_path)
    for side in (ours, theirs):
        write_outcomes(side / "logic.csv", [float(side == ours)] + [1.0] * 59, name="accuracy")
    code, said = run("compare", ours, theirs, "--pool", "school=*", capsys=capsys)
    assert code == 30 and "only evals that are scored alike are one pool" in said


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (["school=algebra"], "expected two evals or more, got algebra"),
        (["school=algebra,art"], "no eval is named 'art'"),
        (["law=algebra,logic"], "expected a name of its own"),
        (["a=algebra,law", "b=l*"], "law is in pool a already"),
        (["a/b=algebra,law"], "without '/'"),
    ],
)
def test_a_pool_that_can_not_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pools: list[str], message: str
) -> None:
    sides = write_sides(tmp_path)
    code, said = run("compare", *sides, *(word for pool in pools for word in ("--pool", pool)), capsys=capsys)
    assert code == 1 and message in said and said.count("\n") == 1


def test_a_bucket_that_bears_another_evals_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound cases of other evals that call themselves `law` filled its bucket, and its loss passed."""
    sides = write_sides(
        tmp_path,
        losses=(0, 30, 0),
        gains=(1, 1, 1),
        buckets=lambda subject: ["law" if subject != "law" else "other"] * 120,
    )
    code, said = run(
        "compare", *sides, "--pool", "school=*", "--bucket", "law=0.1", "--tolerance", "0.2", capsys=capsys
    )
    assert code == 30 and "expected buckets that bear no other eval's name, got 'law'" in said


def test_a_pool_of_which_any_file_sounds_of_harm_asks_for_its_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in ("before", "after"):
        for name in ("answers", "toxicity"):
            write_outcomes(tmp_path / side / f"{name}.csv", [0.0, 1.0] * 60)
    code, said = run("compare", tmp_path / "before", tmp_path / "after", "--pool", "all=*", capsys=capsys)
    assert code == 1 and "give --better score=higher" in said


def write_samples(
    folder: Path,
    task: str,
    *,
    prompt: Callable[..., str],
    n: int = 200,
    lost: Sequence[int] = (),
    facts: object = None,
    chat: bool = False,
    document: str = "d",
    stop: object = (),
) -> None:
    """Write lm-eval's samples of one side of a task: `n` documents, those of `lost` wrong."""
    folder.mkdir(exist_ok=True)
    date = "2026-01-01T00-00-00.000000"
    rows = [
        {
            "doc_id": i,
            "doc": {"q": i},
            "target": "x",
            "resps": [[f"{folder.name} {i}"]],
            "filter": "none",
            "arguments": {"gen_args_0": {"arg_0": "chat" if chat else prompt(i), "arg_1": stop or prompt(i)}},
            "doc_hash": f"{document}{i}",
            "prompt_hash": prompt(i),
            "target_hash": "x",
            "acc": float(i not in lost),
        }
        for i in range(n)
    ]
    (folder / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if facts is not None:
        (folder / f"results_{date}.json").write_text(json.dumps({"versions": {name: facts for name in ("q0", "q1")}}))


@pytest.mark.parametrize(
    ("prompt", "document", "stop"),
    [
        ("question {i}{spaces}", "{t}d", ""),
        ("template {t} of {i}", "d", ""),
        ("question {i}", "{t}d", "until {t}"),
    ],
    ids=["one prompt but for spaces", "one document, other templates", "one prompt, other stop strings"],
)
def test_one_question_in_several_tasks_is_one_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, document: str, stop: str
) -> None:
    """Five templates of 200 documents were 1,000 clusters, and losses of a document in all five were five."""
    for side, lost in (("a", ()), ("b", (3, 50, 111))):
        for t in range(5):
            write_samples(
                tmp_path / side,
                f"q{t}",
                lost=lost,
                document=document.format(t=t),
                stop=stop.format(t=t),
                prompt=lambda i, t=t: prompt.format(i=i, t=t, spaces=" " * t),
            )
    code, said = run(
        "compare",
        tmp_path / "a",
        tmp_path / "b",
        "--pool",
        "all=q*",
        "--metric",
        "acc",
        "--better",
        "acc=higher",
        capsys=capsys,
    )
    assert code == 10 and "1,000 cases in 200 clusters" in said, said


def test_tasks_whose_first_argument_is_one_text_keep_their_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other side: by their prompts alone all cases of such tasks were one cluster."""
    for side in "ab":
        for t in range(2):
            write_samples(tmp_path / side, f"q{t}", prompt=lambda i, t=t: f"{t} of {i}", chat=True, document=f"{t}d")
    code, said = run(
        "compare",
        tmp_path / "a",
        tmp_path / "b",
        "--pool",
        "all=q*",
        "--metric",
        "acc",
        "--better",
        "acc=higher",
        capsys=capsys,
    )
    assert code == 0 and "400 cases, " in said.replace(";", ","), said


@pytest.mark.parametrize(("option", "clusters"), [(("--cluster-by", "passage"), 120), ((), 360)])
def test_clusters_that_a_field_names_reach_over_evals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], clusters: int
) -> None:
    """Nine questions of one passage in three evals were three clusters; ids that nobody named stay their eval's."""
    sides = write_sides(tmp_path, passage=lambda _: [f"passage {i}" for i in range(120)])
    _, said = run("compare", *sides, "--pool", "school=*", "--json", tmp_path / "v.json", *option, capsys=capsys)
    assert ("120 clusters have one name in several evals and are one each" in said) == bool(option), said
    whole = json.loads((tmp_path / "v.json").read_text())["verdicts"][0]["comparisons"][0]
    assert (whole["n"], whole["num_clusters"]) == (360, clusters)


@pytest.mark.parametrize(("ours", "theirs", "refused"), [(1, None, False), (1, 2, True)])
def test_a_pool_compares_the_facts_that_both_sides_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: int, theirs: int | None, refused: bool
) -> None:
    """As its evals do alone: a results file that one side lacks refused the pool."""
    for side, facts in (("a", ours), ("b", theirs)):
        for t in range(2):
            write_samples(tmp_path / side, f"q{t}", prompt=lambda i, t=t: f"{t} of {i}", facts=facts, document=f"{t}d")
    code, said = run(
        "compare",
        tmp_path / "a",
        tmp_path / "b",
        "--pool",
        "all=q*",
        "--metric",
        "acc",
        "--better",
        "acc=higher",
        capsys=capsys,
    )
    assert code == (30 if refused else 0) and ("version: the reference has 1" in said) == refused, said
