"""The shipped evalsets: made by their command, solvable, honest about their buckets, never trained on."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

import evalsets.make.shipped
from evalsets.make.depot import (
    MAX_CALLS,
    TOOLS,
    Workflow,
    act_on_line,
    final_checks,
    first_binding_calls,
    make_catalogue,
    make_workflow,
)
from evalsets.make.shipped import EVALSETS, LATE_CALL, write_evalset
from evalsets.make.texts import split_of
from models.make.train_agent import MIX, draw_document, key_text
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.evalsets.cases import TrajectoryCase
from pipeline.products.text.evals.calls import is_accepted, is_exact
from pipeline.products.text.evals.tools import call_tool
from pipeline.products.text.evals.trajectories import is_completed
from tests.paths import ROOT

FOLDER = ROOT / "evalsets"
NUM_TRAINING_DOCUMENTS = 2000


@pytest.fixture(scope="module")
def shipped() -> dict[str, Evalset]:
    return {name: load_evalset(FOLDER / name) for name in EVALSETS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Workflow]]:
    """All evalsets written again, and the workflows that were kept, with the teacher's calls."""
    folder = tmp_path_factory.mktemp("evalsets")
    kept: list[Workflow] = []
    describe = evalsets.make.shipped._buckets

    def keep(workflow: Workflow) -> list[str]:
        kept.append(workflow)
        return describe(workflow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evalsets.make.shipped, "_buckets", keep)
        for name in EVALSETS:
            (folder / name).mkdir()
            write_evalset(name, folder / name)
    return folder, kept


@pytest.fixture(scope="module")
def workflows(made: tuple[Path, list[Workflow]], shipped: dict[str, Evalset]) -> list[tuple[TrajectoryCase, Workflow]]:
    """Each shipped workflow case with the workflow that it was made from."""
    pairs = list(zip(shipped["workflows"].cases, made[1], strict=True))
    assert all(case.messages[0].content == workflow.task for case, workflow in pairs)
    return pairs


@pytest.mark.parametrize("name", EVALSETS)
@pytest.mark.parametrize("file", ["cases.jsonl", "card.yaml"])
def test_the_shipped_files_are_what_the_command_writes(made: tuple[Path, Any], name: str, file: str) -> None:
    # compared as a truth value: a diff of megabytes would take minutes to render
    is_same = (made[0] / name / file).read_bytes() == (FOLDER / name / file).read_bytes()
    assert is_same, f"`python -m evalsets.make {name}` writes another {file}; run it and look at the difference"


def test_sizes(shipped: dict[str, Evalset]) -> None:
    least = {"workflows": 1000, "tool_calls": 2000, "prose": 100, "choices": 500, "calibration": 500, "shots": 192}
    assert {name: len(e.cases) >= least[name] for name, e in shipped.items()} == dict.fromkeys(EVALSETS, True)
    buckets = shipped["workflows"].card.buckets
    assert {
        "steps/2-4",
        "steps/5-8",
        "steps/9-12",
        "length/short",
        "length/medium",
        "length/long",
        "constraint_retention",
        "abstention",
    } == set(buckets)
    assert min(buckets.values()) >= 200


def run_calls(case: TrajectoryCase, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    state = case.state
    for name, arguments in calls:
        state, result = call_tool(TOOLS, state, name, arguments)
        # looking up what does not exist is the one call whose answer should be an error
        assert name == "stock" or "error" not in result, f"{case.id}: {name} {arguments}: {result}"
    return state


def test_the_teacher_completes_every_workflow(workflows: list[tuple[TrajectoryCase, Workflow]]) -> None:
    for case, workflow in workflows:
        assert is_completed(case, run_calls(case, list(workflow.calls))), case.id
        assert 2 <= len(workflow.calls) <= MAX_CALLS, case.id


def test_no_workflow_is_complete_without_its_last_line(workflows: list[tuple[TrajectoryCase, Workflow]]) -> None:
    for case, workflow in workflows:
        calls = list(workflow.calls)
        assert not is_completed(case, run_calls(case, calls[:-2] + calls[-1:])), case.id
        assert not is_completed(case, run_calls(case, calls[:-1])), case.id
        assert not is_completed(case, case.state), case.id


def test_step_buckets_count_the_right_calls(workflows: list[tuple[TrajectoryCase, Workflow]]) -> None:
    for case, workflow in workflows:
        (bucket,) = (b for b in case.buckets if b.startswith("steps/"))
        low, high = map(int, bucket.removeprefix("steps/").split("-"))
        assert low <= len(workflow.calls) <= high, case.id


def play_without(workflow: Workflow, rule: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a teacher that never heard of one rule."""
    calls: list[tuple[str, dict[str, Any]]] = [("account", {"id": workflow.account})] if workflow.account else []
    state = workflow.state
    for number, line in enumerate(workflow.lines, start=1):
        for name, arguments in act_on_line(number, line, workflow.rules.without(rule), state):
            calls.append((name, arguments))
            state = call_tool(TOOLS, state, name, arguments)[0]
    return [*calls, ("finish", {})]


def test_constraint_retention_needs_a_rule_that_first_binds_late(
    workflows: list[tuple[TrajectoryCase, Workflow]],
) -> None:
    """And whoever forgets that rule does well up to that call, and fails the case."""
    late = 0
    for case, workflow in workflows:
        binding = {rule: call for rule, call in first_binding_calls(workflow).items() if call >= LATE_CALL}
        assert bool(binding) == ("constraint_retention" in case.buckets), case.id
        for rule, call in binding.items():
            forgetful = play_without(workflow, rule)
            assert forgetful[: call - 1] == list(workflow.calls[: call - 1]), case.id
            assert forgetful[call - 1] != workflow.calls[call - 1], case.id
            assert not is_completed(case, run_calls(case, forgetful)), case.id
        late += bool(binding)
    assert LATE_CALL == 5 and late >= 200


def test_abstention_needs_a_line_that_has_to_be_declined(workflows: list[tuple[TrajectoryCase, Workflow]]) -> None:
    for case, workflow in workflows:
        declined = any(name == "skip" for name, _ in workflow.calls)
        assert declined == ("abstention" in case.buckets), case.id


def test_checks_cover_every_log(workflows: list[tuple[TrajectoryCase, Workflow]]) -> None:
    logs = {"orders", "approvals", "moves", "messages", "skipped", "finished"}
    assert {frozenset(check.path for check in case.checks) for case, _ in workflows} == {frozenset(logs)}


def test_expected_calls_are_calls_that_the_tools_take(shipped: dict[str, Evalset]) -> None:
    from jsonschema import Draft202012Validator

    validators = {name: Draft202012Validator(tool.parameters) for name, tool in TOOLS.items()}
    for case in shipped["tool_calls"].cases:
        assert validators[case.expected.name].is_valid(case.expected.arguments), case.id
        assert is_exact(case.expected, case.expected)
        assert is_accepted(case.expected, case.expected, case.accepted), case.id


def test_every_choice_has_one_right_answer(shipped: dict[str, Evalset]) -> None:
    answers = set()
    for case in shipped["choices"].cases:
        assert len(set(case.choices)) == 4 and 0 <= case.answer < 4, case.id
        differing = [set(words) for words in zip(*(choice.split() for choice in case.choices), strict=True)]
        assert {len(words) for words in differing} == {1, 4}, f"{case.id}: one name, at one place or more"
        answers.add(case.answer)
    assert answers == {0, 1, 2, 3}


def first_message(rendered: str) -> str:
    """Return the user's first message of a conversation rendered in the agent's chat template."""
    return rendered.removeprefix("<|begin|><|user|>").split("<|end|>")[0]


def evaluated_keys(shipped: dict[str, Evalset]) -> dict[str, set[str]]:
    """Return, by evalset, the texts by which the generators assign a case to a split."""
    return {
        "workflows": {case.messages[0].content for case in shipped["workflows"].cases},
        "tool_calls": {case.messages[0].content for case in shipped["tool_calls"].cases},
        "prose": {case.text for case in shipped["prose"].cases},
        "choices": {case.question.removeprefix("<|begin|>") for case in shipped["choices"].cases},
    }


def test_what_is_evaluated_is_neither_trained_on_nor_calibrated_with(shipped: dict[str, Evalset]) -> None:
    evaluated = {key for keys in evaluated_keys(shipped).values() for key in keys}
    cases = shipped["calibration"].cases
    calibrated = {case.text if "prose" in case.buckets else first_message(case.text) for case in cases}
    rng = Random("drawn by a test")
    trained = {key_text(draw_document(rng, MIX)) for _ in range(NUM_TRAINING_DOCUMENTS)}
    assert {split_of(key) for key in evaluated} == {"eval"}
    assert {split_of(key) for key in calibrated} == {"calibration"}
    assert {split_of(key) for key in trained} == {"train"}
    assert len(evaluated) > 4000 and len(calibrated) > 1000 and len(trained) > 1500


def test_training_text_is_of_every_kind() -> None:
    """Else the disjointness above would say little."""
    rng = Random(0)
    drawn = [draw_document(rng, MIX) for _ in range(200)]
    workflows = [d for d in drawn if isinstance(d, list) and len(d) > 2]
    assert {type(d) for d in drawn} == {list, str} and workflows


def test_splits_have_the_shares_they_say() -> None:
    splits = [split_of(f"text {i}") for i in range(20_000)]
    for name, share in (("train", 200 / 256), ("calibration", 28 / 256), ("eval", 28 / 256)):
        assert splits.count(name) / len(splits) == pytest.approx(share, abs=0.01)


def test_a_rule_that_never_matters_binds_nothing() -> None:
    rng = Random(1)
    for _ in range(50):
        workflow = make_workflow(rng, make_catalogue(rng), num_calls=rng.randint(2, MAX_CALLS))
        binding = first_binding_calls(workflow)
        assert binding.keys() <= set(workflow.rules.names())
        for rule in workflow.rules.names():
            assert (play_without(workflow, rule) != list(workflow.calls)) == (rule in binding)
        assert final_checks(workflow)[-1] == {"path": "finished", "equals": True}
