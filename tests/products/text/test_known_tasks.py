"""A task is loaded anew unless all that it read lies in its folder, and folder, settings and libraries are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.products.text.evals import known_tasks, material
from pipeline.products.text.evals.known_tasks import MEMORY, describe_task
from pipeline.products.text.settings import HarnessEval
from tests.products.text.test_task_material import CASES, CODE, EDITED, TASK, write_lines


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name the tasks that were loaded; the current folder is a project without any."""
    loaded: list[str] = []
    load = material.load_task

    def note(name: str, settings: HarnessEval) -> material.Task:
        loaded.append(name)
        return load(name, settings)

    monkeypatch.setattr(material, "load_task", note)
    monkeypatch.chdir(tmp_path)
    for folder in ("tasks", "data"):
        Path(folder).mkdir()
    return loaded


def write_task(file: str, **keys: Any) -> None:
    write_lines(Path(file), CASES)
    task = TASK | {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}} | keys
    Path("tasks/mine.yaml").write_text(json.dumps(task))


def digest(**settings: Any) -> str:
    asked = HarnessEval.model_validate({"kind": "harness", "task": "mine", "include_path": "tasks"} | settings)
    return describe_task("e", asked, Path()).digest


def test_a_task_that_lies_in_its_folder_is_loaded_once(loads: list[str]) -> None:
    write_task("tasks/cases.jsonl")
    assert digest() == digest() and loads == ["e"]


def test_it_is_loaded_again_for_other_cases_settings_and_libraries(
    loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task("tasks/cases.jsonl")
    digests = [digest(), digest(num_fewshot=1)]
    write_lines(Path("tasks/cases.jsonl"), EDITED)
    digests.append(digest())
    assert len(set(digests)) == 3 and len(loads) == 3
    monkeypatch.setattr(known_tasks, "read_libraries", lambda: {"lm-eval": "another"})
    assert digest() == digests[-1] and len(loads) == 4


def test_a_damaged_memory_is_no_memory(loads: list[str]) -> None:
    write_task("tasks/cases.jsonl")
    first = digest()
    MEMORY.write_text("[1]")
    assert digest() == first and len(loads) == 2


@pytest.mark.parametrize("what", ["data elsewhere", "code", "an include elsewhere"])
def test_what_its_folder_does_not_hold_is_looked_at_each_time(loads: list[str], what: str) -> None:
    write_task("data/cases.jsonl" if what == "data elsewhere" else "tasks/cases.jsonl")
    task = Path("tasks/mine.yaml")
    if what == "code":
        Path("tasks/code.py").write_text(CODE)
        Path("tasks/right.txt").write_text("yes")  # that the code reads
        task.write_text(task.read_text().removesuffix("}") + ', "process_results": !function code.read_results}')
    if what == "an include elsewhere":
        Path("data/base.yaml").write_text('description: "Or not"')
        task.write_text(json.dumps(json.loads(task.read_text()) | {"include": "../data/base.yaml"}))
    digest()
    digest()
    assert len(loads) == 2 and not MEMORY.exists()
