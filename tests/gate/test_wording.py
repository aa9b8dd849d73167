"""Numbers as people read them: rounding must not claim what is not so."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gate.wording import escape_markdown, format_num, format_value, natural_key
from tests.fakes.outcome_tables import run, write_outcomes


@pytest.mark.parametrize(
    ("right", "n", "said"),
    [
        (2000, 2000, "100.0 %"),
        (1999, 2000, "99.95 %"),
        (29_999, 30_000, "99.997 %"),
        (1998, 2000, "99.9 %"),
        (0, 2000, "0.0 %"),
        (1, 2500, "0.04 %"),
        (1, 2000, "0.1 %"),
        (833, 1000, "83.3 %"),
    ],
)
def test_all_and_none_are_said_only_of_all_and_none(right: int, n: int, said: str) -> None:
    assert format_value("workflows/task_completion_rate", right / n) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps/2-4 task_completion_rate", "steps/2-4 task_completion_rate"),
        ("p <1e-6", "p <1e-6"),
        ("<b>A & B</b>", "&lt;b>A &amp; B&lt;/b>"),
        ("ends with <", "ends with &lt;"),
        ("&lt;", "&amp;lt;"),
        ("a|b", "a&#124;b"),
        ("a\\|b", "a&#92;&#124;b"),  # a backslash left before the entity would show it as it is written
        ("C:\\new \\d+ \\", "C:\\new \\d+ &#92;"),
        ("__main__ _x a_b", "&#95;&#95;main&#95;&#95; &#95;x a_b"),
        ("**PASS** $x$", "&#42;&#42;PASS&#42;&#42; &#36;x&#36;"),
        ("run `dvc repro`", "run 'dvc repro'"),
        ("![x](y)", "![x]&#40;y)"),
        ("a\r\n\tb\u2028c\x00", "a\\r\\n\\tb\\u2028c\\x00"),
        ("Ça va, 東京\u3000駅 ❌", "Ça va, 東京\u3000駅 ❌"),
    ],
)
def test_a_text_stays_in_its_line_of_markdown(text: str, said: str) -> None:
    assert escape_markdown(text) == said


def test_names_are_sorted_as_people_count_and_any_name_is_sorted() -> None:
    """A bucket "①" was a traceback, and so was a case whose name has 5,000 digits."""
    assert sorted(["10", "①", "x2²", "9" * 5_000, "007", ""], key=natural_key) == [
        "",
        "x2²",
        "①",
        "007",
        "10",
        "9" * 5_000,
    ]
    assert sorted(["s_10", "s_2", "s_02b", "s_2a"], key=natural_key) == ["s_2", "s_2a", "s_02b", "s_10"]


def test_one_is_not_written_as_many() -> None:
    """Reports and MLflow said "1 layers" and "1 prompts are longer"."""
    assert [format_num(num, "prompt is", "prompts are") for num in (0, 1, 2_000)] == [
        "0 prompts are",
        "1 prompt is",
        "2,000 prompts are",
    ]


def test_one_cluster_is_not_told_as_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [write_outcomes(tmp_path / name, [1.0] * 200, cluster=["one"] * 200) for name in ("a.csv", "b.csv")]
    _, said = run("compare", *sides, capsys=capsys)
    assert "200 cases in 1 cluster; " in said and "its 1 cluster weighs as much as 1 of equal size" in said
