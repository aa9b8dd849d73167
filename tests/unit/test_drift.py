"""A live endpoint against the last evaluation: what counts as drift, and that it is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.drift import Drift, check_drift
from pipeline.errors import EvidenceError, RequestError
from pipeline.params import Params
from pipeline.records import Candidate, Evaluation, ServingConfig, read_record, write_record
from pipeline.serving.engines.openai import adopt
from tests.synthetic_records import make_candidate, make_params
from tests.unit.test_evaluate import CALL, FakeEndpoint, run, write_questions
from tests.unit.test_evaluate import endpoint as endpoint

FACTS = {"checkpoint": {"digest": "c" * 64, "files": {"config.json": "1"}}, "serving": {"dtype": "float32"},
         "libraries": {"torch": "2.13.0"}, "engine": {"max_batch_tokens": 512}, "sampling": {}, "environment": {},
         "hardware": {"device": "cpu x86_64"}}  # fmt: skip


class LiveEndpoint(FakeEndpoint):
    """The evaluated endpoint, or one that has changed since."""

    def __init__(self, server: dict[str, Any] | None, answers: dict[str, str]) -> None:
        super().__init__()
        self.server, self.answers, self.echo = server, answers, None

    async def get(self, path: str) -> Any:
        if self.server is None:
            raise RequestError("HTTP 404")
        return self.server

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        reply = await super().chat(messages, **options)
        text = self.answers.get(messages[-1]["content"], CALL)
        return type(reply)(**{**reply.__dict__, "text": text})


def look(
    root: Path, server: dict[str, Any] | None = None, *, candidate: Candidate | None = None, echo: str | None = None,
    **answers: str,
) -> Drift:
    params = make_params(["a"], ["a"])
    evals = {name: {"kind": "tool_calls", "evalset": name} for name in ("first", "second")}
    params = Params.model_validate(params.model_dump() | {"evals": evals})
    client: Any = LiveEndpoint(server, answers)
    client.echo = echo
    return asyncio.run(check_drift(candidate or make_candidate("a"), params, client, root=root, num_cases=10))


@pytest.fixture
def evaluated(tmp_path: Path, endpoint: FakeEndpoint) -> Path:
    """A project whose candidate was evaluated, by a server that described itself."""
    run(tmp_path)
    path = tmp_path / "build/evaluations/a/evaluation.json"
    change = {"served_by": FACTS, "checkpoint_digest": "c" * 64}
    write_record(path, read_record(path, Evaluation).model_copy(update=change))
    return tmp_path


def test_the_same_server_has_not_drifted(evaluated: Path) -> None:
    assert look(evaluated, {"fingerprint": "f1", "facts": FACTS}) == Drift(None, True, 3, 0, ())


def test_a_server_without_a_fingerprint_is_known_by_its_behaviour(evaluated: Path) -> None:
    assert look(evaluated) == Drift(None, False, 3, 0, ())
    (changed,) = look(evaluated, b=CALL.replace("2", "3")).changed
    assert (changed.eval_name, changed.case_id, changed.kind) == ("first", "t1", "argument value")
    assert changed.recorded == CALL


@pytest.mark.parametrize(("section", "change", "said"), [
    ("checkpoint", {"digest": "d" * 64, "files": {"config.json": "2"}},
     f"checkpoint digest (config.json differs): evaluated '{'c' * 12}', the endpoint has '{'d' * 12}'"),
    ("serving", {"dtype": "float16"}, "serving.dtype: evaluated 'float32', the endpoint has 'float16'"),
    ("libraries", {"torch": "2.14.0"}, "libraries.torch: evaluated '2.13.0', the endpoint has '2.14.0'"),
    ("engine", {"max_batch_tokens": 256}, "engine.max_batch_tokens: evaluated 512, the endpoint has 256"),
    ("hardware", {"device": "NVIDIA L4"}, "hardware.device: evaluated 'cpu x86_64', the endpoint has 'NVIDIA L4'"),
])  # fmt: skip
def test_the_field_that_drifted_is_named(evaluated: Path, section: str, change: dict[str, Any], said: str) -> None:
    assert look(evaluated, {"fingerprint": "f2", "facts": FACTS | {section: change}}).fingerprint == said


@pytest.mark.parametrize("facts", [{"x": 1}, {"checkpoint": {}}, FACTS | {"checkpoint": {}}, []])
def test_half_of_the_facts_prove_nothing(evaluated: Path, facts: Any) -> None:
    assert not look(evaluated, {"facts": facts}).has_fingerprint


def test_where_runs_differ_as_many_changes_prove_nothing(evaluated: Path) -> None:
    path = evaluated / "build/evaluations/a/evaluation.json"
    evaluation = read_record(path, Evaluation)
    canary = evaluation.canary.model_copy(update={"num_unstable": 1})
    write_record(path, evaluation.model_copy(update={"canary": canary}))
    assert look(evaluated).num_explained == 3


def test_an_attached_server_of_ours_has_not_drifted_when_it_is_as_it_was(evaluated: Path) -> None:
    """How it serves is a fact about the engine there, and stays one."""
    attached = make_candidate("a").model_copy(update={"serving": ServingConfig(engine="openai", model="m")})
    path = evaluated / "build/evaluations/a/evaluation.json"
    facts = adopt(attached, FACTS)
    write_record(path, read_record(path, Evaluation).model_copy(update={"served_by": facts}))
    assert look(evaluated, {"facts": FACTS}, candidate=attached).fingerprint is None
    changed = FACTS | {"serving": {"dtype": "float16"}}
    said = look(evaluated, {"facts": changed}, candidate=attached).fingerprint
    assert said == "engine.serving.dtype: evaluated 'float32', the endpoint has 'float16'"


def test_a_vllm_that_was_started_otherwise_says_so_in_its_replies(evaluated: Path) -> None:
    serving = ServingConfig(engine="vllm", version="0.32.0", command=("vllm", "serve"))
    candidate = make_candidate("a").model_copy(update={"serving": serving})
    path = evaluated / "build/evaluations/a/evaluation.json"
    write_record(path, read_record(path, Evaluation).model_copy(update={"served_by": candidate.facts}))
    assert look(evaluated, None, candidate=candidate, echo=candidate.fingerprint).fingerprint is None
    assert look(evaluated, None, candidate=candidate, echo="vllm-0.32.0-389eb09e").fingerprint is None, "its own"
    said = look(evaluated, None, candidate=candidate, echo="f" * 64).fingerprint
    assert said is not None and said.startswith("system_fingerprint: evaluated ")


def test_other_cases_or_records_than_were_evaluated_are_refused(evaluated: Path) -> None:
    write_questions(evaluated / "first", "a", "z")
    with pytest.raises(EvidenceError, match="first: expected the cases that were evaluated"):
        look(evaluated)
    (evaluated / "build/evaluations/a/first.jsonl").write_text("")
    with pytest.raises(EvidenceError, match="first.jsonl: expected the records as they were written"):
        look(evaluated)
