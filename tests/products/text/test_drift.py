"""A live endpoint against the last evaluation: what counts as drift, and that it is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError, RequestError
from pipeline.products.text.drift import Comparison, Drift, check_drift
from pipeline.products.text.serving.engines.openai import adopt
from pipeline.products.text.settings import TextProduct
from pipeline.records.evaluations import Candidate, Evaluation
from pipeline.records.fingerprints import SECTIONS, fingerprint
from pipeline.records.record_files import read_record, write_record
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.synthetic_records import make_candidate, make_params
from tests.products.text.test_evaluate import CALL, FakeEndpoint, run, write_questions
from tests.products.text.test_evaluate import endpoint as endpoint

FACTS = {
    "checkpoint": {"digest": "c" * 64, "files": {"config.json": "1"}},
    "serving": {"dtype": "float32"},
    "libraries": {"torch": "2.13.0"},
    "engine": {"max_batch_tokens": 512},
    "sampling": {},
    "environment": {},
    "hardware": {"device": "cpu x86_64"},
}


class LiveEndpoint(FakeEndpoint):
    """The evaluated endpoint, or one that has changed since; `served` is what it answers to GET, by path."""

    def __init__(self, served: dict[str, Any], answers: dict[str, str], echo: str | None) -> None:
        super().__init__()
        self.served, self.answers, self.fingerprint = served, answers, echo or ""

    async def get(self, path: str) -> Any:
        if path not in self.served:
            raise RequestError("HTTP 404")
        return self.served[path]

    async def chat(self, messages: list[dict[str, Any]], return_token_ids: bool = False, **options: Any) -> Any:
        reply = await super().chat(messages, return_token_ids, **options)
        text = self.answers.get(messages[-1]["content"], CALL)
        return type(reply)(**{**reply.__dict__, "text": text})


def look(
    root: Path,
    server: dict[str, Any] | None = None,
    *,
    candidate: Candidate | None = None,
    echo: str | None = None,
    served: dict[str, Any] | None = None,
    **answers: str,
) -> Drift:
    params = make_params(["a"], ["a"])
    evals = {name: {"kind": "tool_calls", "evalset": name} for name in ("first", "second")}
    params = TextProduct.model_validate(params.model_dump() | {"evals": evals})
    client: Any = LiveEndpoint(served or ({} if server is None else {"/v1/fingerprint": server}), answers, echo)
    return asyncio.run(check_drift(candidate or make_candidate("a"), params, client, root=root, num_cases=10))


@pytest.fixture
def evaluated(tmp_path: Path, endpoint: FakeEndpoint) -> Path:
    """A project whose candidate was evaluated, by a server that described itself."""
    run(tmp_path)
    path = tmp_path / "build/agent/evaluations/a/evaluation.json"
    change = {"served_by": FACTS, "checkpoint_digest": "c" * 64}
    write_record(path, read_record(path, Evaluation).model_copy(update=change))
    return tmp_path


def test_the_same_server_has_not_drifted(evaluated: Path) -> None:
    whole = Comparison((), SECTIONS, ())
    assert look(evaluated, {"fingerprint": "f1", "facts": FACTS}) == Drift(whole, 3, 0, ())
    assert whole.is_whole


def test_a_server_without_a_fingerprint_is_known_by_its_behaviour(evaluated: Path) -> None:
    assert look(evaluated) == Drift(Comparison((), (), SECTIONS), 3, 0, ())
    (changed,) = look(evaluated, b=CALL.replace("2", "3")).changed
    assert (changed.eval_name, changed.case_id, changed.kind) == ("first", "t1", "argument value")
    assert changed.recorded == CALL


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        (
            "checkpoint",
            {"digest": "d" * 64, "files": {"config.json": "2"}},
            f"checkpoint digest (config.json differs): evaluated '{'c' * 12}', the endpoint has '{'d' * 12}'",
        ),
        ("serving", {"dtype": "float16"}, "serving.dtype: evaluated 'float32', the endpoint has 'float16'"),
        ("libraries", {"torch": "2.14.0"}, "libraries.torch: evaluated '2.13.0', the endpoint has '2.14.0'"),
        ("engine", {"max_batch_tokens": 256}, "engine.max_batch_tokens: evaluated 512, the endpoint has 256"),
        ("hardware", {"device": "NVIDIA L4"}, "hardware.device: evaluated 'cpu x86_64', the endpoint has 'NVIDIA L4'"),
    ],
)
def test_the_field_that_drifted_is_named(evaluated: Path, section: str, change: dict[str, Any], said: str) -> None:
    found = look(evaluated, {"fingerprint": "f2", "facts": FACTS | {section: change}}).fingerprint
    assert found.differences == (said,) and not found.is_whole


def test_all_fields_that_drifted_are_named_and_drafts_first(evaluated: Path) -> None:
    serving = {"dtype": "float16", "continuous_batching": True, "speculative.method": "prompt_lookup"}
    found = look(evaluated, {"facts": FACTS | {"serving": serving, "hardware": {"device": "NVIDIA L4"}}}).fingerprint
    assert [said.split(":")[0] for said in found.differences] == [
        "serving.speculative.method",
        "serving.dtype",
        "serving.continuous_batching",
        "hardware.device",
    ]


@pytest.mark.parametrize("facts", [{"x": 1}, {"checkpoint": {}}, FACTS | {"checkpoint": {}}, []])
def test_half_of_the_facts_prove_nothing(evaluated: Path, facts: Any) -> None:
    assert look(evaluated, {"facts": facts}).fingerprint.compared == ()


def test_where_runs_differ_as_many_changes_prove_nothing(evaluated: Path) -> None:
    path = evaluated / "build/agent/evaluations/a/evaluation.json"
    evaluation = read_record(path, Evaluation)
    assert evaluation.canary is not None
    canary = evaluation.canary.model_copy(update={"num_unstable": 1})
    write_record(path, evaluation.model_copy(update={"canary": canary}))
    assert look(evaluated).num_explained == 3


def test_an_attached_server_of_ours_has_not_drifted_when_it_is_as_it_was(evaluated: Path) -> None:
    """How it serves is a fact about the engine there, and stays one."""
    attached = make_candidate("a").model_copy(update={"serving": ServingConfig(engine="openai", model="m")})
    path = evaluated / "build/agent/evaluations/a/evaluation.json"
    facts = adopt(attached, FACTS)
    write_record(path, read_record(path, Evaluation).model_copy(update={"served_by": facts}))
    assert look(evaluated, {"facts": FACTS}, candidate=attached).fingerprint == Comparison((), SECTIONS, ())
    changed = FACTS | {"serving": {"dtype": "float16"}}
    said = look(evaluated, {"facts": changed}, candidate=attached).fingerprint.differences
    assert said == ("engine.serving.dtype: evaluated 'float32', the endpoint has 'float16'",)


RUNTIME = {"engine": {"speculative_config.method": "ngram"}, "sampling": {}, "environment": {}, "hardware": {}}
VLLM = ServingConfig(
    engine="vllm",
    version="0.32.0",
    command=("vllm", "serve"),
    speculative=SpeculativeConfig(method="prompt_lookup", num_tokens=3),
)
OF_VLLM = make_candidate("a").model_copy(update={"serving": VLLM})
BEFORE_START = ("checkpoint", "serving", "libraries")


@pytest.fixture
def evaluated_vllm(evaluated: Path) -> Path:
    """A project whose candidate was evaluated on a vLLM that we started."""
    path = evaluated / "build/agent/evaluations/a/evaluation.json"
    update = {"served_by": OF_VLLM.facts | RUNTIME, "serving": VLLM}
    write_record(path, read_record(path, Evaluation).model_copy(update=update))
    return evaluated


def look_at_vllm(root: Path, echo: str | None, **served: Any) -> Comparison:
    told = {"/version": {"version": "0.32.0+cpu"}} | {f"/{path}": value for path, value in served.items()}
    return look(root, candidate=OF_VLLM, echo=echo, served=told).fingerprint


def test_a_vllm_with_the_configuration_that_was_evaluated_agrees(evaluated_vllm: Path) -> None:
    found = look_at_vllm(evaluated_vllm, OF_VLLM.fingerprint)
    assert found == Comparison((), BEFORE_START, ("engine", "sampling", "environment", "hardware"), is_echoed=True)
    assert found.is_whole


@pytest.mark.parametrize(
    ("echo", "came"),
    [("f" * 64, "'ffffffffffff'"), (None, "nothing"), ("vllm-0.32.0-389eb09e", "'vllm-0.32.0-'"), ("other", "'other'")],
)
def test_a_vllm_that_was_started_otherwise_is_drift(evaluated_vllm: Path, echo: str | None, came: str) -> None:
    """Of the same release and without /server_info, so that no fact differs."""
    found = look_at_vllm(evaluated_vllm, echo)
    (said,) = found.differences
    assert said.startswith(f"system_fingerprint: evaluated {OF_VLLM.fingerprint[:12]!r}, the endpoint says {came}")
    assert "config/vllm.yaml" in said and found.compared == ("libraries",) and not found.is_whole


def test_a_vllm_that_tells_its_configuration_is_compared_in_it_too(evaluated_vllm: Path) -> None:
    info = {"vllm_config": {"speculative_config": None, "model_config": {"dtype": "torch.float32"}}}
    found = look_at_vllm(evaluated_vllm, None, **{"server_info?config_format=json": info})
    assert [said.split(":")[0] for said in found.differences] == [
        "engine.speculative_config.method",
        "engine.model_config.dtype",
        "system_fingerprint",
    ]


def test_an_attached_vllm_that_tells_its_version_alone_is_not_said_to_agree(evaluated: Path) -> None:
    attached = make_candidate("a").model_copy(update={"serving": ServingConfig(engine="openai", model="m")})
    path = evaluated / "build/agent/evaluations/a/evaluation.json"
    facts = attached.facts | {"libraries": {"vllm": "0.32.0"}}
    write_record(path, read_record(path, Evaluation).model_copy(update={"served_by": facts}))
    served = {"/version": {"version": "0.32.0"}}
    found = look(evaluated, candidate=attached, echo="vllm-0.32.0-389eb09e", served=served).fingerprint
    assert (found.differences, found.compared, found.is_whole) == ((), ("libraries",), False)


def test_an_embedded_server_behind_a_proxy_is_known_by_its_echo(evaluated: Path) -> None:
    found = look(evaluated, echo=fingerprint(FACTS)).fingerprint
    assert found == Comparison((), SECTIONS, (), is_echoed=True)
    (said,) = look(evaluated, echo="f" * 64).fingerprint.differences
    assert said.startswith("system_fingerprint: evaluated ")


def test_other_cases_or_records_than_were_evaluated_are_refused(evaluated: Path) -> None:
    write_questions(evaluated / "first", "a", "z")
    with pytest.raises(EvidenceError, match="first: expected the cases that were evaluated"):
        look(evaluated)
    (evaluated / "build/agent/evaluations/a/first.jsonl").write_text("")
    with pytest.raises(EvidenceError, match="first.jsonl: expected the records as they were written"):
        look(evaluated)
