"""Endpoints that did not do the work: the reference's weights, or nothing at all, under a candidate's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.products.text.findings.endpoint import describe_other_prompts, holds_same_model
from pipeline.products.text.settings import CandidateSettings, OpenaiEngine
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Evaluation, read_cases
from pipeline.records.record_files import read_record, write_record
from pipeline.records.verdicts import Verdict
from tests.fakes.judging import compare_release, list_said
from tests.fakes.synthetic_records import Behaviour, make_candidate, make_params, rewrite_records, write_tree

SAME = "prose: the endpoint answers with the reference's weights: over 40 documents the log-probabilities differ by"
URL = "http://127.0.0.1:8000"


@pytest.fixture
def build(tmp_path: Path) -> Path:
    write_tree(tmp_path / "build", {"a": Behaviour()})
    return tmp_path / "build"


def judge(build: Path, attached_at: str | None = None, **params: Any) -> Verdict:
    settings = make_params(["a"], ["a"], **params)
    if attached_at:
        engine = OpenaiEngine(kind="openai", base_url=attached_at, model="m")
        endpoint = CandidateSettings(checkpoint="models/agent", steps=[], engine=engine)
        settings = settings.model_copy(update={"candidates": settings.candidates | {"a": endpoint}})
    return compare_release(settings, build).judgement.verdicts[0]


def answer_as_the_reference(build: Path, *, num_documents: int = 40) -> None:
    """Give the candidate's first documents the reference's likelihoods, in its own order."""
    folders = [build / "evaluations" / name for name in ("reference", "a")]
    theirs = {r.input_digest: r.scores for r in read_cases(folders[0] / "prose.jsonl")[:num_documents]}
    rewrite_records(
        build,
        "a",
        "prose",
        lambda records: [r.model_copy(update={"scores": theirs.get(r.input_digest, r.scores)}) for r in records],
    )
    (folders[1] / "prose.npz").write_bytes((folders[0] / "prose.npz").read_bytes())


def attach(build: Path) -> None:
    """Make the candidate one that was evaluated on a server that somebody else runs, and that has no steps."""
    path = build / "evaluations/a/evaluation.json"
    old = read_record(path, Evaluation)
    serving = old.serving.model_copy(update={"engine": "openai", "base_url": URL, "model": "m"})
    candidate = make_candidate("a").model_copy(update={"serving": serving})
    for name in old.evals:
        rewrite_records(
            build,
            "a",
            name,
            lambda records: [r.model_copy(update={"fingerprint": candidate.fingerprint}) for r in records],
        )
    write_record(
        path,
        read_record(path, Evaluation).model_copy(
            update={
                "serving": serving,
                "served_by": candidate.facts,
                "fingerprint": candidate.fingerprint,
                "is_declared": True,
            }
        ),
    )
    path = build / "candidates/a/candidate.json"
    write_record(path, read_record(path, BuiltCandidate).model_copy(update={"steps": ()}))


def test_likelihoods_that_all_equal_the_references_are_refused(build: Path) -> None:
    answer_as_the_reference(build)
    attach(build)
    verdict = judge(build, URL)
    assert verdict.outcome == "refused"
    reason = next(r for r in list_said(verdict) if SAME in r)
    assert f"{SAME} 0 nat a token, which is rounding, although the checkpoints differ (" in reason
    assert "`dvc repro -f -s evaluate@a`" in reason


def test_an_endpoint_that_proved_its_weights_may_agree(build: Path) -> None:
    """The same numbers saved again are other files."""
    answer_as_the_reference(build)
    assert judge(build).outcome == "pass"


@pytest.mark.parametrize(("nats", "outcome"), [(1e-6, "refused"), (1e-3, "pass")])
def test_rounding_does_not_hide_the_references_weights(build: Path, nats: float, outcome: str) -> None:
    answer_as_the_reference(build)
    edit_arrays(build, lambda arrays: arrays | {"top_logprobs": arrays["top_logprobs"] - nats})
    attach(build)
    assert judge(build, URL).outcome == outcome


def edit_arrays(build: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = build / "evaluations/a/prose.npz"
    with np.load(path) as arrays:
        changed = change({name: arrays[name] for name in arrays.files})
    np.savez(path, **changed)


def test_the_order_of_the_documents_does_not_hide_it(build: Path) -> None:
    def reverse(arrays: dict[str, Any]) -> dict[str, Any]:
        sizes = np.diff(arrays["offsets"])
        rows = {
            name: np.concatenate(np.split(arrays[name], arrays["offsets"][1:-1])[::-1])
            for name in ("token_logprobs", "top_ids", "top_logprobs")
        }
        return {"offsets": np.concatenate([[0], np.cumsum(sizes[::-1])]), **rows}

    answer_as_the_reference(build)
    edit_arrays(build, reverse)
    rewrite_records(build, "a", "prose", lambda records: records[::-1])
    attach(build)
    assert any(SAME in reason for reason in list_said(judge(build, URL)))


def test_sums_that_agree_over_tokens_that_do_not_clear_it(build: Path) -> None:
    """Documents of one certain token would otherwise be enough."""
    own = (build / "evaluations/a/prose.npz").read_bytes()
    answer_as_the_reference(build)
    (build / "evaluations/a/prose.npz").write_bytes(own)
    attach(build)
    assert judge(build, URL).outcome == "pass"


@pytest.mark.parametrize(("num_documents", "is_refused"), [(40, True), (39, False)])
def test_without_arrays_the_sums_have_to_do(build: Path, num_documents: int, is_refused: bool) -> None:
    answer_as_the_reference(build, num_documents=num_documents)
    (build / "evaluations/a/prose.npz").unlink()
    attach(build)
    assert any(SAME in reason for reason in list_said(judge(build, URL))) == is_refused


@pytest.mark.parametrize(
    ("files", "outcome"),
    [
        ({"model.safetensors": "1", "chat_template.jinja": "2"}, "pass"),
        ({"model.safetensors": "2", "chat_template.jinja": "1"}, "refused"),
        ({"chat_template.jinja": "1"}, "refused"),
    ],
    ids=["another-template", "other-weights", "no-weights-known"],
)
def test_checkpoints_of_the_same_weights_may_agree(build: Path, files: dict[str, str], outcome: str) -> None:
    answer_as_the_reference(build)
    attach(build)
    ours = {"model.safetensors": "1", "chat_template.jinja": "1"}
    for name, found in {"reference": ours, "a": files}.items():
        path = build / f"candidates/{name}/candidate.json"
        built = read_record(path, BuiltCandidate)
        checkpoint = built.checkpoint.model_copy(update={"files": found})
        write_record(path, built.model_copy(update={"checkpoint": checkpoint}))
    assert judge(build, URL).outcome == outcome


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"LICENSE": "x"}, True),
        ({"chat_template.jinja": "x"}, False),
        ({"config.json": "x"}, False),
        ({"model.safetensors": "x"}, False),
    ],
    ids=lambda value: str(value),
)
def test_a_file_that_changes_no_answer_makes_no_other_model(changed: dict[str, str], is_same: bool) -> None:
    """The canary judges the path only where the model is the same; a licence must not turn that off."""
    files = {"model.safetensors": "1", "config.json": "2", "chat_template.jinja": "3"}
    ours = make_candidate("a").checkpoint.model_copy(update={"files": files, "digest": "1" * 64})
    theirs = ours.model_copy(update={"files": files | changed, "digest": "2" * 64})
    assert holds_same_model(ours, theirs) == is_same


def test_without_a_perplexity_eval_it_is_said_that_nothing_could_tell(build: Path) -> None:
    attach(build)
    said = "note: no eval of kind perplexity: whether its endpoint answers with the reference's weights could not be"
    tolerances = {"calls/tool_call_exact_match": {"overall": 0.02}}
    assert not any(said in reason for reason in list_said(judge(build, URL, tolerances=tolerances)))
    for name in ("a", "reference"):
        path = build / f"evaluations/{name}/evaluation.json"
        old = read_record(path, Evaluation)
        evals = {key: file for key, file in old.evals.items() if key != "prose"}
        write_record(path, old.model_copy(update={"evals": evals}))
    assert any(said in reason for reason in list_said(judge(build, URL, tolerances=tolerances)))
    assert not any(said in reason for reason in list_said(judge(build, tolerances=tolerances))), "its server proved it"


def silence(records: list[CaseRecord]) -> list[CaseRecord]:
    return [r.model_copy(update={"output": "\n", "num_completion_tokens": 0}) for r in records]


@pytest.mark.parametrize("side", ["reference", "a"])
def test_an_eval_without_a_single_reply_is_refused_though_every_score_is_right(build: Path, side: str) -> None:
    """Silence does what it should wherever nothing was to be done."""
    rewrite_records(build, side, "workflows", silence)
    verdict = judge(build)
    assert verdict.outcome == "refused"
    assert any(
        f"workflows: all 400 replies of {side} are empty, and silence" in reason for reason in list_said(verdict)
    )


def test_some_empty_replies_are_answers(build: Path) -> None:
    rewrite_records(build, "a", "workflows", lambda records: [*silence(records[:-1]), records[-1]])
    assert judge(build).outcome == "pass"


def test_an_attached_candidate_that_has_changed_is_refused_by_name(build: Path) -> None:
    """Its endpoint knows of its checkpoint only the digest that was declared."""
    attach(build)
    path = build / "evaluations/a/evaluation.json"
    old = read_record(path, Evaluation)
    facts = old.served_by | {"checkpoint": {"digest": "d" * 64}}
    write_record(path, old.model_copy(update={"served_by": facts, "checkpoint_digest": "d" * 64}))
    verdict = judge(build, URL)
    assert verdict.outcome == "refused"
    said = "is not what would ship: checkpoint digest (which file differs is not known): expected"
    assert any(said in reason for reason in list_said(verdict))


def test_a_chat_template_that_is_another_is_named() -> None:
    """A candidate that was asked by another template lost everything, and the verdict spoke of other weights."""
    plain = make_candidate("a").checkpoint
    one, other = (plain.model_copy(update={"files": {"chat_template.jinja": d, "config.json": d}}) for d in "12")
    said = describe_other_prompts(one, other)
    assert said is not None and said.startswith("its chat_template.jinja differs from the reference's")
    assert describe_other_prompts(one, one) is None
    assert describe_other_prompts(plain, one) is None  # what an attached endpoint has, no file tells
