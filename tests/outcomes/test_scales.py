"""What a score's own scale and name say: a loss that can't show proves nothing, and `wer` is not better when higher."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipeline.outcomes.directions import looks_lower
from tests.fakes.outcome_tables import DATE, run, write_outcomes, write_samples

N = 300


def write_sides(
    folder: Path, ours: tuple[float, float], theirs: tuple[float, float], name: str, **columns: list[str]
) -> list[Path]:
    """Write two tables of scores drawn evenly from a range each."""
    rng = random.Random(0)
    return [
        write_outcomes(folder / f"{side}.csv", [round(rng.uniform(*bounds), 4) for _ in range(N)], name=name, **columns)
        for side, bounds in (("a", ours), ("b", theirs))
    ]


@pytest.mark.parametrize(
    ("name", "better", "ours", "theirs", "tolerance"),
    [
        ("toxicity", "lower", (0.0, 0.2), (0.9, 1.0), 3),
        ("toxicity", "lower", (0.4, 0.6), (0.9, 1.0), 0.5),  # the reference has half already
        ("toxicity_percent", "lower", (0, 20), (90, 100), 300),
        ("reward", "higher", (-0.2, -0.1), (-1.0, -0.9), 3),
        ("reward", "higher", (-4, -2), (-9, -8), 12),
        ("reward", "higher", (-1, 1), (-1, -0.9), 2.5),
        ("f1", "higher", (0.7, 0.8), (0.0, 0.1), 3),
        ("points", "higher", (40, 60), (0, 1), 60),
        ("cost", "lower", (-60, -40), (-1, 0), 60),  # the mirror image of the row above
    ],
)
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "ratio"])
def test_a_tolerance_beyond_all_that_a_score_can_lose_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    better: str,
    ours: tuple[float, float],
    theirs: tuple[float, float],
    tolerance: float,
    weighted: bool,
) -> None:
    """Toxicity went from .097 to .946 under a tolerance of 3, meant as 3 points, and passed."""
    sides = write_sides(tmp_path, ours, theirs, name, **({"weight": ["1"] * N} if weighted else {}))
    code, said = run("compare", *sides, "--better", f"{name}={better}", "--tolerance", tolerance, capsys=capsys)
    assert code == 30 and f"a loss above the tolerance of {tolerance:g} can't show" in said, said


@pytest.mark.parametrize(
    ("name", "better", "ours", "theirs", "tolerance", "code"),
    [
        ("toxicity", "lower", (0.0, 0.2), (0.0, 0.2), 0.1, 0),
        ("toxicity", "lower", (0.0, 0.2), (0.9, 1.0), 0.1, 20),
        ("latency_ms", "lower", (95, 105), (96, 106), 20, 0),  # it has no end above, so 20 more would show
        ("latency_ms", "lower", (95, 105), (195, 205), 20, 20),
        ("reward", "higher", (-4, -2), (-4, -2), 1, 0),
        ("reward", "higher", (-4, -2), (-9, -8), 1, 20),
        ("reward", "higher", (-0.9, 0.9), (-0.9, 0.9), 0.5, 30),  # its mean is near 0, as that of a score of no use is
        ("reward", "higher", (-0.2, 0.9), (-0.2, 0.9), 0.2, 0),
        ("points", "higher", (40, 60), (40, 60), 5, 0),
    ],
)
def test_a_tolerance_within_the_scale_is_judged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    better: str,
    ours: tuple[float, float],
    theirs: tuple[float, float],
    tolerance: float,
    code: int,
) -> None:
    sides = write_sides(tmp_path, ours, theirs, name)
    found, said = run("compare", *sides, "--better", f"{name}={better}", "--tolerance", tolerance, capsys=capsys)
    assert found == code, said


def test_a_bucket_that_can_not_lose_its_tolerance_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buckets = ["hard"] * 100 + ["easy"] * 200
    sides = [
        write_outcomes(
            tmp_path / f"{side}.csv",
            [0.9 + i % 9 / 100 if i < 100 else 0.1 for i in range(N)],
            name="toxicity",
            buckets=buckets,
        )
        for side in "ab"
    ]
    code, said = run(
        "compare",
        *sides,
        "--better",
        "toxicity=lower",
        "--tolerance",
        "0.1",
        "--bucket",
        "hard=0.2",
        "--bucket",
        "easy=0.2",
        capsys=capsys,
    )
    assert code == 30 and "[hard]: " in said and "[easy]: " not in said, said


LOWER = [
    "error",
    "errors",
    "num_errors",
    "ErrorRate",
    "fail",
    "failed",
    "is_failure",
    "toxic",
    "toxicity",
    "wer",
    "CER",
    "loss",
    "latency",
    "hallucinated",
    "unsafe",
    "refused",
    "timed-out",
    "exec_timeout",
    "violations",
    "wrong",
    "incorrect",
    "invalid_json",
    "jailbroken",
    "biased",
    "harmful",
    "perplexity",
    "mae",
    "false_positive",
    "crash",
    "num_incidents",
    "nsfw",
    "is_spam",
    "regressed",
    "anomaly",
    "complaints",
    "escalated",
    "was_escalated",
    "apologized",
    "apologised",
    "num_apologies",
    "abandoned",
    "churned",
    "interrupted",
    "evasive",
    "hedged",
    "unanswered",
    "unhelpful",
    "dissatisfied",
    "obscene",
    "insult",
    "identity_harassment",
    "illicit",
    "sycophancy",
    "deceptive",
    "deceived",
    "misleading",
    "malicious",
    "fabricated",
    "memorized",
    "inappropriate",
    "unethical",
    "degenerate",
]
HIGHER = [
    "score",
    "acc",
    "exact_match",
    "passed",
    "correct",
    "answer",
    "match",
    "pass@1",
    "closed",
    "power",
    "ferry",
    "certain",
    "transfer",
    "gloss",
    "success",
    "f1",
    "completed",
    "sound",
    "terminal",
    "concerned",
    "exceptional",
    "unbroken",
]


@pytest.mark.parametrize("name", LOWER)
def test_a_name_that_sounds_of_harm_asks_for_its_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """0 and 1 in a column `error` were taken for right answers: one error in each case passed."""
    sides = [
        write_outcomes(tmp_path / f"{side}.csv", [score] * 20 + [0.0] * 180, name=name)
        for side, score in (("a", 0.0), ("b", 1.0))
    ]
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 1 and f"give --better {name}=higher or --better {name}=lower" in said, said
    assert run("compare", *sides, "--better", f"{name}=lower", capsys=capsys)[0] == 20


@pytest.mark.parametrize("name", HIGHER)
def test_other_names_of_0_and_1_are_rates_of_what_is_right(name: str) -> None:
    assert not looks_lower(name)


def test_where_scores_are_a_file_its_name_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"c{i},1,1\n" for i in range(200))
    (tmp_path / "toxicity.csv").write_text(f"case_id,reference,candidate\n{rows}")
    code, said = run("compare", tmp_path / "toxicity.csv", capsys=capsys)
    assert code == 1 and "give --better score=higher or --better score=lower" in said
    assert run("compare", tmp_path / "toxicity.csv", "--better", "score=higher", capsys=capsys)[0] == 0
    sides = [write_outcomes(tmp_path / f"errors_{side}.csv", [1.0] * 200) for side in "ab"]
    assert run("compare", *sides, capsys=capsys)[0] == 1


def test_a_direction_that_the_records_tell_is_not_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """lm-eval's results file says that more of `acc` is better, whatever a task or metric is called."""
    for side in "ab":
        path = write_samples(tmp_path / side)
        path.write_text(path.read_text().replace('"exact_match": 1.0', '"error": 1.0'))
        (tmp_path / side / f"results_{DATE}.json").write_text('{"higher_is_better": {"gen": {"error": true}}}')
    assert run("compare", tmp_path / "a", tmp_path / "b", "--metric", "error", capsys=capsys)[0] == 0
    for side in "ab":
        (tmp_path / side / f"results_{DATE}.json").unlink()
    assert run("compare", tmp_path / "a", tmp_path / "b", "--metric", "error", capsys=capsys)[0] == 1


@pytest.mark.parametrize("column", ["score", "value", "label", "result"])
def test_a_plain_name_in_a_file_that_sounds_of_harm_asks_for_its_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    sides = [write_outcomes(tmp_path / side / "toxicity.csv", [0.0, 1.0] * 60, name=column) for side in "ab"]
    code, said = run("compare", *sides, capsys=capsys)
    assert code == 1 and f"give --better {column}=higher or --better {column}=lower" in said


@pytest.mark.parametrize("weighted", [False, True], ids=["clusters", "weights"])
def test_graded_scores_that_large_clusters_may_hide_are_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weighted: bool
) -> None:
    """Of 6 large clusters among 250 small ones one falls in four; in one draw of five or six none does, and it passed.

    With one score of 0.5 a rate becomes such a mean, and must not prove more by it.
    """
    sizes = [100] * 6 + [5] * 250
    if weighted:
        columns: dict[str, Any] = {"weight": [str(size) for size in sizes]}
        scores = [float(size) for size in sizes]
        scores[-1] = 4.5
    else:
        columns = {"cluster": [f"k{i}" for i, size in enumerate(sizes) for _ in range(size)]}
        scores = [1.0] * (sum(sizes) - 1) + [0.5]
    sides = [write_outcomes(tmp_path / f"{side}.csv", scores, **columns) for side in "ab"]
    code, said = run("compare", *sides, "--better", "score=higher", "--tolerance", "0.08", capsys=capsys)
    assert code == 10 and "weigh as much as 22 of equal size" in said, said


@pytest.mark.parametrize(
    ("metric", "num_choices", "guessed"), [("acc", 4, 75), ("acc", 2, 150), ("acc", 5, None), ("polite", 4, None)]
)
def test_right_choices_are_set_against_those_of_guessing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, num_choices: int, guessed: int | None
) -> None:
    sides = []
    for name in ("a", "b"):
        path = write_samples(tmp_path / name, num=N, task="quiz")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for i, row in enumerate(rows):
            row["arguments"] = {f"gen_args_{k}": {"arg_0": f"quiz {i}", "arg_1": f" {k}"} for k in range(num_choices)}
            row["resps"] = row["filtered_resps"] = [[-float(k + (name == "b")), False] for k in range(num_choices)]
            del row["exact_match"]
            row[metric] = float(i % 25 < 7)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sides.append(path)
    code, text = run("compare", *sides, "--metric", metric, "--better", f"{metric}=higher", capsys=capsys)
    said = " ".join(text.split())
    expected = f"the reference is right in 84 of 300 cases and guessing in {guessed}, so a loss"
    assert expected in said if guessed else "guessing" not in said
    assert code == (30 if guessed else 0), said


@pytest.mark.parametrize("metric", ["score", "outcomes/score"])
def test_a_graded_score_beside_one_of_0_and_1_is_told_what_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    """The refusal said "expected 0 or 1", of neither side and with nothing to do."""
    reference = write_outcomes(tmp_path / "a.csv", [1.0] * 200)
    candidate = write_outcomes(tmp_path / "b.csv", [1.0] * 199 + [0.9])
    code, text = run("compare", reference, candidate, capsys=capsys)
    assert code == 30 and text.count("case 'c199': expected 'score' to be 0 or 1, got {'score': 0.9}") == 1
    assert "got {'score': 0.9} on the candidate's side; all of the reference's are" in text
    assert "say `--better score=higher` (or lower) and --tolerance" in text
    told = ("--better", f"{metric}=higher", "--tolerance", "0.05")
    code, text = run("compare", reference, candidate, *told, capsys=capsys)
    assert code == 0 and "PASS" in text


@pytest.mark.filterwarnings("error")
def test_scores_too_large_to_add_are_refused_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines of numpy's stood above the verdict."""
    sides = [write_outcomes(tmp_path / name, [score] * 200) for name, score in (("a.csv", 1e308), ("b.csv", -1e308))]
    code, text = run("compare", *sides, "--better", "score=higher", "--tolerance", "0.2", capsys=capsys)
    assert code == 30 and "expected finite numbers, got scores too large to compute with" in text
