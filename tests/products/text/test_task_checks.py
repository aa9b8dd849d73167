"""What an lm-eval task can't do is told before any model runs: too few cases, no texts, no template, no such name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SettingsError, SizeError
from pipeline.products.text import TextKind, task_checks
from pipeline.products.text.calibration_checks import warn_of_calibration
from pipeline.products.text.evals import jobs
from pipeline.products.text.evals.known_tasks import describe_tasks, digest_evalsets
from pipeline.products.text.preflight import _check_builtin
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.task_checks import check_tasks, warn_of_missing_cards
from tests.fakes.synthetic_records import make_candidate, make_params
from tests.fakes.tiny_llama import write_documents
from tests.products.text.test_task_material import TASK

IN_WORDS = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"]}}
DRAFTS = {"kind": "speculative", "method": "prompt_lookup", "num_speculative_tokens": 3}


def write_project(root: Path, *, num_documents: int = 40, num_clusters: int = 40, in_words: bool = True) -> None:
    """Write two checkpoints, the first with a chat template, and a task."""
    for folder in ("reference", "other", "tasks"):
        (root / folder).mkdir()
    (root / "reference/chat_template.jinja").write_text("{{ messages }}")
    cases = [{"question": f"What is {i}?", "answer": "a", "cluster": i % num_clusters} for i in range(num_documents)]
    (root / "tasks/cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    task = TASK | {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "tasks/cases.jsonl"}}}
    if in_words:
        task = {k: v for k, v in task.items() if k != "doc_to_choice"} | IN_WORDS
        task |= {"metric_list": [{"metric": "exact_match"}], "doc_to_target": "{{answer}}"}
    (root / "tasks/mine.yaml").write_text(json.dumps(task))
    (root / "tasks/card.yaml").touch()


def check(product: TextProduct, root: Path) -> list[str]:
    return check_tasks(product, describe_tasks(product, root), root)


def make_product(checkpoint: str = "reference", steps: Any = (), on_inconclusive: str = "block") -> TextProduct:
    data = make_params(["a"], ["a"]).model_dump()
    data["evals"] = {"mine": {"kind": "harness", "task": "mine", "include_path": "tasks"}}
    data["candidates"] = {
        "reference": {"checkpoint": "reference", "steps": []},
        "a": {"checkpoint": checkpoint, "steps": list(steps)},
    }
    data["gate"] |= {"tolerances": {"mine/accuracy": {"overall": 0.2}}, "tripwires": {}}
    data["gate"]["on_inconclusive"] = on_inconclusive
    return TextProduct.model_validate(data)


def test_a_task_of_too_few_clusters_can_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, num_clusters=20)
    with pytest.raises(SizeError, match=r"gate.tolerances.mine/accuracy.overall: .*20 clusters.*30"):
        check(make_product(), tmp_path)
    (warning,) = check(make_product(on_inconclusive="warn"), tmp_path)
    assert "30" in warning


def test_a_task_that_can_be_asked_and_proves_enough_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    assert check(make_product(steps=[DRAFTS]), tmp_path) == []


@pytest.mark.parametrize(("num_samples", "num_warnings"), [(1, 1), (2, 0)])
def test_one_calibration_text_is_a_warning(num_samples: int, num_warnings: int) -> None:
    calibration = {"sources": ["prose"], "num_samples": num_samples, "max_tokens": 8, "length_exponent": 0}
    step = {"kind": "quantize", "algorithm": "awq", "scheme": "W4A16", "calibration": calibration}
    warnings = warn_of_calibration(make_product(steps=[step]))
    assert len(warnings) == num_warnings
    assert all("candidates.a.steps.0.calibration.num_samples: expected several texts, got 1" in w for w in warnings)


def test_a_folder_of_tasks_without_a_card_is_a_warning(tmp_path: Path) -> None:
    """Forty questions asked five times each proved a loss of 1.8 points, and nobody said a word."""
    product = make_product()
    folder = tmp_path / "tasks"
    folder.mkdir()
    (warning,) = warn_of_missing_cards(product, tmp_path)
    assert "evals.mine.include_path: tasks has" in warning and "no card.yaml" in warning
    (folder / "card.yaml").touch()
    assert warn_of_missing_cards(product, tmp_path) == []


def test_drafts_need_an_eval_whose_answers_count_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, in_words=False)
    assert check(make_product(), tmp_path) == []
    with pytest.raises(SettingsError, match=r"candidates.a.steps: expected an eval of kind .*answered in words, found"):
        check(make_product(steps=[DRAFTS]), tmp_path)


def test_a_candidate_that_lacks_the_references_template_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    with pytest.raises(SettingsError, match=r"candidates.a.checkpoint: expected a chat template, as the reference "):
        check(make_product("other"), tmp_path)
    (tmp_path / "reference/chat_template.jinja").rename(tmp_path / "other/chat_template.jinja")
    (said,) = check(make_product("other"), tmp_path)
    assert said.endswith(
        "asked by plain prompts, as reference has no chat template: right for a base model; for one "
        "that chats copy chat_template.jinja from its source"
    ), "the reference has none"


def test_a_misspelt_name_is_told_without_lm_evals_index() -> None:
    with pytest.raises(SettingsError, match="evals.arc.task: lm-eval knows no task 'arc_easi'"):
        _check_builtin("evals.arc.task", "arc_easi")
    for name in ("arc_easy", "mmlu", "ai2_arc"):
        _check_builtin("evals.arc.task", name)


def test_a_template_that_comes_or_goes_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of a task stay the same, and so does a candidate's own folder: the keys alone tell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "import_library", lambda *_: None)
    write_project(tmp_path)
    write_documents(tmp_path / "evalsets/calibration", {"long": ["a"]})
    product, keys, inputs = make_product("other"), [], []
    for _ in range(2):
        (job,) = jobs.describe_evals(product, make_candidate("a"), {"mine": None}, tmp_path)
        keys.append((job.key, job.evalset_digest, job.is_plain, len(job.questions)))
        inputs.append(TextKind().list_inputs(product, tmp_path).evaluate["a"])
        (tmp_path / "reference/chat_template.jinja").unlink(missing_ok=True)
    (chat, digest, *of_chat), (plain, same_digest, *of_plain) = keys
    assert (of_chat, of_plain) == ([False, 40], [True, 40])
    assert chat != plain and digest == same_digest and inputs[0] != inputs[1]


def test_what_a_task_asks_is_compared_with_the_last_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate alone did so, after all evaluations."""
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(task_checks, "check_cases", lambda _, cases, __: seen.append(cases))
    write_project(tmp_path)
    check(make_product(), tmp_path)
    assert seen == [{"mine": digest_evalsets(make_product(), tmp_path)["mine"]}]
