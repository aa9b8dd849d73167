"""Prompts that do not fit, and a benchmark that has too few, are told before any model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SettingsError
from pipeline.products.text import prompt_checks
from pipeline.products.text.evals.known_tasks import describe_tasks
from pipeline.products.text.model_loading import load_tokenizer
from pipeline.products.text.prompt_checks import check_prompts
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


def check(product: TextProduct, root: Path) -> None:
    check_prompts(product, describe_tasks(product, root), root)


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


def count_longest(root: Path, eval_name: str, *, is_scored: bool) -> tuple[str, int]:
    """Make one case of an eval long; return its id and its tokens as the server reads them."""
    tokenizer, long = load_tokenizer(root / "reference"), "Order one parcel. " * 40
    if eval_name == "calls":
        write_questions(root / "calls", *(f"Order {i} of them." for i in range(28)), "i" * 90, long)
        messages = [{"role": "user", "content": long}]
        return "t29", len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    cases = (root / "tasks/cases.jsonl").read_text().splitlines()
    cases[7] = json.dumps(json.loads(cases[7]) | {"question": long})
    (root / "tasks/cases.jsonl").write_text("\n".join(cases) + "\n")
    if is_scored:
        return "mine-7", len(tokenizer(f"{long} yes")["input_ids"]) - 1
    content = [{"role": "user", "content": long}]
    return "mine-7", len(tokenizer.apply_chat_template(content, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize(
    ("eval_name", "limit", "behind", "remedy"),
    [
        ("calls", 64, ", which with serving.max_tokens 64 are", ", lower serving.max_tokens"),
        ("mine", 64, ", which with serving.max_tokens 64 are", ", lower serving.max_tokens"),
        ("mine", 9, ", which with the task's max_gen_toks 9 are", ", lower the task's max_gen_toks"),
        ("mine", 0, ",", ""),
    ],
    ids=["chat", "task", "task-with-a-limit", "scored"],
)
def test_the_longest_prompt_fits_or_is_named(root: Path, eval_name: str, limit: int, behind: str, remedy: str) -> None:
    """A checkpoint was quantised first, for hours."""
    file = root / "tasks/mine.yaml"
    task = json.loads(file.read_text())
    if limit == 9:
        task["generation_kwargs"]["max_gen_toks"] = 9
    if not limit:
        (root / "reference/chat_template.jinja").unlink()
        task = {k: v for k, v in task.items() if k not in ("doc_to_target", "generation_kwargs")}
        task |= {"output_type": "multiple_choice", "doc_to_choice": ["yes", "no"], "doc_to_target": 0}
        task |= {"metric_list": [{"metric": "acc"}], "target_delimiter": " "}
    file.write_text(json.dumps(task))
    case, size = count_longest(root, eval_name, is_scored=not limit)
    product = make_product({eval_name: CALLS if eval_name == "calls" else TASK}, candidates=[])

    def serve(context_length: int) -> TextProduct:
        serving = product.serving.model_copy(update={"context_length": context_length, "max_tokens": 64})
        return product.model_copy(update={"serving": serving})

    check(serve(size + limit), root)
    with pytest.raises(SettingsError) as caught:
        check(serve(size + limit - 1), root)
    assert str(caught.value) == (
        f"products.agent.evals.{eval_name}: case {case!r} is too long: its prompt has {size} tokens{behind} above "
        f"serving.context_length {size + limit - 1}; raise the length{remedy}, or shorten the case"
    )


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
        check(make_product(evals, prompt_tokens=[band]), root)
    assert str(caught.value).startswith(
        f"products.agent.benchmark.prompt_tokens.0: expected {NEEDED} distinct prompts of {band[0]} to {band[1]} tokens"
    )
    assert f"found {num_found} in the evals" in str(caught.value)


def test_prompts_of_tasks_and_of_chats_count(root: Path) -> None:
    """Nothing is refused that the benchmark would take."""
    check(make_product({"calls": CALLS, "mine": TASK}, rounds=11), root)
    with pytest.raises(SettingsError, match="expected 72 distinct prompts .* found 69 in the evals"):
        check(make_product({"calls": CALLS, "mine": TASK}, rounds=12), root)


def test_the_outcome_is_kept_until_a_case_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a tokenizer takes seconds, and stage `env` runs every time."""
    product, asked = make_product({"calls": CALLS}), []
    find = prompt_checks._find_problem

    def note(*args: Any) -> str | None:
        asked.append(args)
        return find(*args)

    monkeypatch.setattr(prompt_checks, "_find_problem", note)
    for num_asked in (1, 1):
        with pytest.raises(SettingsError, match="found 29 in the evals"):
            check(product, root)
        assert len(asked) == num_asked
    write_questions(root / "calls", *(f"Order {i} of them." for i in range(60)))
    for _ in range(2):
        check(product, root)
        assert len(asked) == 2


def test_where_only_a_server_can_count_nothing_is_refused(root: Path) -> None:
    band: dict[str, Any] = {"prompt_tokens": [[1, 2]]}
    evals = {"calls": CALLS}
    attached = {"engine": {"kind": "openai", "base_url": "http://there:8000", "model": "m"}}
    vllm = {"kind": "vllm", "command": ["vllm"], "version": "0.32.0", "options": {"chat-template": "mine.jinja"}}
    check(make_product(evals, attached, **band), root)
    check(make_product(evals, {"engine": vllm}, **band), root)
    check(make_product(evals, candidates=[], **band), root)
    (root / "reference/chat_template.jinja").write_text("{{ raise_exception('no') }}")
    check(make_product(evals, **band), root)


def test_the_longest_is_told_by_bytes(root: Path) -> None:
    """A text of few characters may have many tokens."""
    wide = "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 80
    write_questions(root / "calls", *(f"{i} " * 60 for i in range(40)), wide)
    product = make_product({"calls": CALLS}, candidates=[])
    serving = product.serving.model_copy(update={"context_length": 200, "max_tokens": 16})
    with pytest.raises(SettingsError, match="case 't40' is too long"):
        check(product.model_copy(update={"serving": serving}), root)
