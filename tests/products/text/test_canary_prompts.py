"""Which first turns the canary asks, and the drift check with it: as many as asked for, from all over the evals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.cases import spread
from pipeline.products.text.evals import generation
from pipeline.products.text.evals.canary import ask_canary
from pipeline.products.text.evals.canary_prompts import pick_prompts
from pipeline.products.text.findings.canary import describe_batching, describe_blind
from pipeline.products.text.serving.answers import Reply
from pipeline.products.text.settings import ToolCallsEval
from tests.products.text.test_canary import judge
from tests.products.text.test_evaluate import write_questions


def pick(root: Path, sizes: dict[str, int], num_prompts: int) -> dict[str, list[int]]:
    """Return the cases that were picked, by eval."""
    evals: dict[str, Any] = {}
    for name, size in sizes.items():
        write_questions(root / name, *(f"{name} {i}" for i in range(size)))
        evals[name] = (ToolCallsEval(kind="tool_calls", evalset=name), load_evalset(root / name))
    ids = [prompt.case_id.split("/t") for prompt in pick_prompts(evals, num_prompts)]
    return {name: [int(i) for found, i in ids if found == name] for name in sizes}


@pytest.mark.parametrize(
    ("sizes", "num_prompts", "shares"),
    [
        pytest.param({"a": 10, "b": 160}, 100, {"a": 10, "b": 90}, id="too-few-in-the-first"),
        pytest.param({"a": 160, "b": 10}, 100, {"a": 90, "b": 10}, id="too-few-in-the-last"),
        pytest.param({"a": 3, "b": 30, "c": 200}, 100, {"a": 3, "b": 30, "c": 67}, id="passed-on-twice"),
        pytest.param({"a": 200, "b": 200, "c": 200}, 100, {"a": 34, "b": 33, "c": 33}, id="enough-everywhere"),
        pytest.param({"a": 10, "b": 20}, 100, {"a": 10, "b": 20}, id="no-more-to-have"),
        pytest.param({"a": 5, "b": 5}, 1, {"a": 1, "b": 0}, id="one"),
    ],
)
def test_what_one_eval_can_not_give_the_others_do(
    tmp_path: Path, sizes: dict[str, int], num_prompts: int, shares: dict[str, int]
) -> None:
    assert {name: len(found) for name, found in pick(tmp_path, sizes, num_prompts).items()} == shares


def test_cases_are_spread_over_the_whole_eval(tmp_path: Path) -> None:
    picked = pick(tmp_path, {"a": 160}, 100)["a"]
    assert len(set(picked)) == 100 and picked[0] == 0 and picked[-1] == 158


@pytest.mark.parametrize(
    ("num", "count", "expected"), [(4, 2, [0, 2]), (5, 3, [0, 1, 3]), (3, 7, [0, 1, 2]), (3, 0, []), (0, 2, [])]
)
def test_spread(num: int, count: int, expected: list[int]) -> None:
    assert spread(range(num), count) == expected


def test_its_answers_are_counted_where_a_run_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model it is half of an evaluation, in which nothing was to be seen."""

    async def answer(*_: Any, **__: Any) -> Reply:
        return Reply("x", (), "stop", 1, 1, 0.1, "f")

    write_questions(tmp_path / "a", "one", "two")
    prompts = pick_prompts({"a": (ToolCallsEval(kind="tool_calls", evalset="a"), load_evalset(tmp_path / "a"))}, 2)
    engine: Any = SimpleNamespace(connect=lambda *_, **__: contextlib.nullcontext(), fingerprint="f")
    monkeypatch.setattr(generation, "ask", answer)
    monkeypatch.setenv("QUANTGATE_PROGRESS", str(tmp_path / "facts.jsonl"))
    places = dict(enumerate(prompts))
    asyncio.run(ask_canary(engine, None, places, None, max_tokens=4, prefix="plain "))  # type: ignore[arg-type]
    facts = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    assert {fact["piece"] for fact in facts} == {"plain canary"}
    assert (facts[0]["done"], facts[-1]["done"], facts[-1]["total"]) == (0, 6, 6)


def test_where_the_evals_have_no_more_cases_more_prompts_are_no_advice(tmp_path: Path) -> None:
    canary = judge(tmp_path, {}, num_prompts=8).canary
    assert canary is not None
    assert "raise canary.num_prompts (14 do when the floor is none) or" in describe_blind(canary, num_asked=8)
    said = describe_blind(canary, num_asked=100)
    assert "raise canary.num_prompts" not in said
    assert "the evals that generate text have only 8 cases: add cases (14 do when the floor is none), or raise" in said


def test_in_half_precision_the_report_says_what_batches_changed(tmp_path: Path) -> None:
    canary = judge(tmp_path, {}, num_prompts=8).canary
    assert canary is not None
    assert describe_batching(canary, "float32") == ""
    assert "Batches changed 0 of 8 canary answers" in describe_batching(canary, "bfloat16")
