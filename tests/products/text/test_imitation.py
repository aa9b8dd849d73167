"""Numbers that an engine imitated or left out: a mark on the verdict, and a refusal of a release without a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.gate.audits import CandidateFindings
from pipeline.products.text.findings.imitation import describe_left_out, find_imitation, judge_imitation
from pipeline.records.reasons import ReasonKind
from tests.fakes.synthetic_records import make_params

FP8 = ("fp8-token-dynamic inputs",)


def make_evidence(engine: dict[str, Any], rounded: tuple[str, ...] = FP8, kind: str = "vllm") -> Any:
    serving = SimpleNamespace(dtype="float32", engine=kind)
    candidate = SimpleNamespace(name="a", serving=serving, checkpoint=SimpleNamespace(rounded=rounded))
    return SimpleNamespace(candidate=candidate, evaluation=SimpleNamespace(served_by={"engine": engine}))


def judge(evidence: Any, release: list[str], **changes: Any) -> CandidateFindings:
    findings = CandidateFindings()
    product = make_params(["a", "b"], release).model_copy(update=changes)
    judge_imitation(findings, evidence, product)
    return findings


IMITATED = {"imitated": {"fp8-token-dynamic inputs": 21}}


def test_a_release_on_imitated_numbers_is_refused_also_of_a_checkpoint_that_came_so() -> None:
    findings = judge(make_evidence(IMITATED, kind="transformers"), ["a"])
    (refusal,) = findings.refusals
    assert refusal.startswith("it rests on emulation: the engine imitates fp8-token-dynamic inputs of 21 layers in ")
    assert "\n" not in refusal


def test_what_is_not_released_or_allowed_is_marked() -> None:
    evidence = make_evidence(IMITATED, kind="transformers")
    for findings in (judge(evidence, ["b"]), judge(evidence, ["a"], allow_emulated="the target was measured")):
        (note,) = findings.notes
        assert note.kind is ReasonKind.LIMIT and "rests on emulation" in note.text
        assert not findings.refusals
    assert note.text.endswith("; allowed, as the target was measured")


def test_what_the_engine_left_out_of_the_model_is_said() -> None:
    """A model with a cap on its attention scores passed as another one, and no report said so."""
    evidence = make_evidence({"left_out": {"attn_logit_softcapping": 50.0}}, rounded=(), kind="transformers")
    assert str(describe_left_out(evidence)).startswith("it was evaluated without attn_logit_softcapping 50 of its con")
    assert describe_left_out(make_evidence({}, rounded=(), kind="transformers")) is None


def test_weights_alone_are_no_imitation() -> None:
    findings = judge(make_evidence({}, rounded=(), kind="transformers"), ["a"])
    assert not findings.notes and not findings.refusals


@pytest.mark.parametrize(
    ("kernels", "dispatched"),
    [
        ({"QKVParallelLinear": {"CompressedTensorsW8A8Fp8 CutlassFP8ScaledMMLinearKernel": 28}}, None),
        ({"QKVParallelLinear": {"CompressedTensorsW8A8Fp8 MarlinFP8ScaledMMLinearKernel": 28}}, "MarlinFP8ScaledMM"),
        ({"QKVParallelLinear": {"CompressedTensorsW8A16Fp8": 28}}, "W8A16Fp8"),
        ({"MergedColumnParallelLinear": {"CompressedTensorsW4A4Nvfp4 MarlinNvFp4LinearKernel": 28}}, "MarlinNvFp4"),
        # other layers of a mixed recipe are for weights alone
        ({"RowParallelLinear": {"CompressedTensorsWNA16 MarlinLinearKernel": 28}}, None),
        ({"RowParallelLinear": {"CompressedTensorsW4A16 MarlinLinearKernel": 28}}, None),
        ({"worker 0": {"RowParallelLinear": {"CompressedTensorsW8A8Fp8 MarlinFP8Kernel": 28}}}, "MarlinFP8"),
    ],
)
def test_a_kernel_for_weights_alone_gives_a_fallback_away(kernels: dict[str, Any], dispatched: str | None) -> None:
    problem = find_imitation(make_evidence({"kernels": kernels}))
    assert (problem is None) == (dispatched is None)
    assert problem is None or (dispatched is not None and dispatched in problem)


def test_a_release_is_refused_where_the_engine_says_nothing_of_its_kernels() -> None:
    """It was a note: NVFP4 on a Hopper card, where vLLM leaves inputs as they are, could ship on it."""
    findings = judge(make_evidence({}), ["a"])
    (refusal,) = findings.refusals
    assert "fp8-token-dynamic inputs ran as asked is not known" in refusal and "set engine.report_kernels" in refusal
    for findings in (judge(make_evidence({}), ["b"]), judge(make_evidence({}), ["a"], allow_emulated="it was tried")):
        (note,) = findings.notes
        assert "ran as asked is not known" in note.text and not findings.refusals


@pytest.mark.parametrize(
    ("engine", "is_known"),
    [
        ({"kernels": {"a": 1}}, False),
        ({"kernels": {"a": 1}, "cache_config": {"cache_dtype": "auto"}}, False),
        ({"kernels": {"a": 1}, "cache_config": {"cache_dtype": "fp8_e4m3"}}, True),
        ({"cache_config": {"cache_dtype": "fp8"}}, True),
        # asked by the checkpoint: vLLM's own configuration goes on saying "auto"
        ({"cache_config": {"cache_dtype": "auto"}, "kernels": {"FlashAttentionImpl 3 cache_dtype=fp8": 6}}, True),
        ({"kernels": {"Fp8LinearMethod": 6, "FlashAttentionImpl 3 cache_dtype=auto": 6}}, False),
    ],
)
def test_a_cache_of_few_bits_is_proven_by_what_the_engine_says_of_it(engine: dict[str, Any], is_known: bool) -> None:
    """Kernels of layers were taken for a proof of the cache."""
    findings = judge(make_evidence(engine, rounded=("fp8-tensor keys and values",)), ["a"])
    assert (not findings.refusals) == is_known
    assert is_known or "set kv-cache-dtype: fp8 in engine.options" in findings.refusals[0]
