"""A benchmark that has too few prompts is told so before any model runs, in the words of the benchmark itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SettingsError
from pipeline.products.text.benchmark import preflight
from pipeline.products.text.benchmark.preflight import check_prompts
from pipeline.products.text.settings import TextProduct
from tests.fakes.synthetic_records import make_params
from tests.fakes.tiny_llama import write_tiny_llama
from tests.products.text.test_evaluate import write_questions
from tests.products.text.test_task_checks import write_project

BAND = [5, 200]
TASK = {"kind": "harness", "task": "mine", "include_path": "tasks"}
CALLS = {"kind": "tool_calls", "evalset": "calls"}
NEEDED = 48  # a warm-up and 6 rounds of 4 requests, and the probes


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with 30 cases that chat, one of them twice, and a task of 40 questions."""
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    write_tiny_llama(tmp_path / "reference")
    write_questions(tmp_path / "calls", *(f"Order {i} of them." for i in range(29)), "Order 0 of them.")
    return tmp_path


def make_product(evals: dict[str, Any], reference: dict[str, Any] | None = None, **benchmark: Any) -> TextProduct:
    work = {"concurrency": [1], "prompt_tokens": [BAND], "num_tokens": 8, "rounds": 6}
    data = make_params(["a"], ["a"], benchmark={"candidates": ["a"]} | work | benchmark).model_dump()
    data |= {"evals": evals}
    data["candidates"] = {
        "reference": {"checkpoint": "reference", "steps": []} | (reference or {}),
        "a": {"checkpoint": "reference", "steps": []},
    }
    scores = {name: "accuracy" if settings is TASK else "tool_call_exact_match" for name, settings in evals.items()}
    tolerances = {f"{name}/{score}": {"overall": 0.2} for name, score in scores.items()}
    data["gate"] |= {"tolerances": tolerances, "tripwires": {}}
    return TextProduct.model_validate(data)


@pytest.mark.parametrize(
    ("evals", "band", "num_found"),
    [
        ({"calls": CALLS}, BAND, 29),
        ({"calls": CALLS}, [1, 4], 0),
        ({"mine": TASK}, BAND, 40),
    ],
    ids=["one-twice", "chats-too-long", "task"],
)
def test_too_few_prompts_are_told_with_how_many_there_are(
    root: Path, evals: dict[str, Any], band: list[int], num_found: int
) -> None:
    """All candidates were evaluated first, for hours."""
    with pytest.raises(SettingsError) as caught:
        check_prompts(make_product(evals, prompt_tokens=[band]), root)
    assert str(caught.value).startswith(
        f"products.agent.benchmark.prompt_tokens.0: expected {NEEDED} distinct prompts of {band[0]} to {band[1]} tokens"
    )
    assert f"found {num_found} in the evals" in str(caught.value)


def test_prompts_of_tasks_and_of_chats_count(root: Path) -> None:
    """Nothing is refused that the benchmark would take."""
    check_prompts(make_product({"calls": CALLS, "mine": TASK}, rounds=11), root)
    with pytest.raises(SettingsError, match="expected 72 distinct prompts .* found 69 in the evals"):
        check_prompts(make_product({"calls": CALLS, "mine": TASK}, rounds=12), root)


def test_the_outcome_is_kept_until_a_case_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a tokenizer takes seconds, and stage `env` runs every time."""
    product, asked = make_product({"calls": CALLS}), []
    find = preflight._find_problem

    def note(*args: Any) -> str | None:
        asked.append(args)
        return find(*args)

    monkeypatch.setattr(preflight, "_find_problem", note)
    for num_asked in (1, 1):
        with pytest.raises(SettingsError, match="found 29 in the evals"):
            check_prompts(product, root)
        assert len(asked) == num_asked
    write_questions(root / "calls", *(f"Order {i} of them." for i in range(60)))
    for _ in range(2):
        check_prompts(product, root)
        assert len(asked) == 2


def test_where_only_a_server_can_count_nothing_is_refused(root: Path) -> None:
    band: dict[str, Any] = {"prompt_tokens": [[1, 2]]}
    evals = {"calls": CALLS}
    attached = {"engine": {"kind": "openai", "base_url": "http://there:8000", "model": "m"}}
    vllm = {"kind": "vllm", "command": ["vllm"], "version": "0.32.0", "options": {"chat-template": "mine.jinja"}}
    check_prompts(make_product(evals, attached, **band), root)
    check_prompts(make_product(evals, {"engine": vllm}, **band), root)
    check_prompts(make_product(evals, candidates=[], **band), root)
    (root / "reference/chat_template.jinja").write_text("{{ raise_exception('no') }}")
    check_prompts(make_product(evals, **band), root)
