"""From records to verdicts: worked examples of the rule, refusals, tripwires."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.clusters import sum_by_cluster
from pipeline.gate.compare import find_unfit
from pipeline.gate.decision import Measurement, combine, judge_all
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import align
from pipeline.gate.statistics import proportion_bounds, sign_flip_p, sign_flip_tail
from pipeline.gate.verdicts import build_policy, is_blocking
from pipeline.products import list_known_metrics
from pipeline.products.text.findings import TextAuditor
from pipeline.products.text.findings.divergence import TopTokens, divergence_by_document, top_k_kl
from pipeline.products.text.findings.speculation import check_speculation
from pipeline.products.text.settings import CandidateSettings, OpenaiEngine
from pipeline.products.text.show.plots import plot_completion
from pipeline.products.text.step_settings import SpeculativeStep
from pipeline.records.differences import first_difference
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import OUTGROWN, BuiltCandidate, CaseRecord, Evaluation
from pipeline.records.fingerprints import fingerprint
from pipeline.records.record_files import read_record, write_record
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.report.plots import plot_harm
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_records import (
    Behaviour,
    make_candidate,
    make_flips,
    make_params,
    rewrite_records,
    write_candidate,
    write_tree,
)

COMPLETION = list_known_metrics()["task_completion_rate"]


def judge_flips(b: int, c: int, n: int, *, right: int, tolerance: float = 0.02, alpha: float = 0.05) -> Comparison:
    pairs = align(*make_flips(b, c, n, right=right), where="workflows")
    measured = measure_metric(pairs, COMPLETION, None, eval_name="workflows", tolerance=tolerance, alpha=alpha)
    return judge_all({"a": [measured]}, ["a"], alpha=alpha)["a"][0]


@pytest.mark.parametrize("c", [0, 10, 40, 64])
def test_from_81_2_to_74_1_fails_whatever_the_flips(c: int) -> None:
    comparison = judge_flips(24 + c, c, 340, right=276)
    assert (round(100 * comparison.reference, 1), round(100 * comparison.candidate, 1)) == (81.2, 74.1)
    assert comparison.outcome == "fail"


@pytest.mark.parametrize("c", [0, 1, 10, 60])
def test_from_81_2_to_79_3_is_inconclusive_whatever_the_flips(c: int) -> None:
    comparison = judge_flips(6 + c, c, 340, right=276)
    assert comparison.outcome == "inconclusive"
    assert "within tolerance as seen (1.76 points" in comparison.sentence
    assert "more cases" in comparison.sentence or "no affordable number" in comparison.sentence


@pytest.mark.parametrize(
    ("b", "n", "said"),
    [
        (36, 2_000, "about 12,000 more cases"),  # 6 times as many
        (37, 2_000, "more cases will hardly settle it"),  # 11 times as many
        (40, 2_000, "more cases will hardly settle it"),  # no number would do
        (0, 30, "about 700 more cases"),  # 23 times as many, but a suite too small is no loss too large
    ],
)
def test_more_cases_are_no_advice_where_the_loss_takes_most_of_the_tolerance(b: int, n: int, said: str) -> None:
    comparison = judge_flips(b, 0, n, right=n, tolerance=0.02 if b else 0.005)
    assert comparison.outcome == "inconclusive" and said in comparison.sentence
    is_close = "hardly" in said
    assert ("the loss seen is so close to the tolerance that" in comparison.sentence) == is_close
    # of a candidate that loses and gains as seen; a plan counts all cases that one without a loss needs
    like = (
        "more cases, in clusters of their own, would give an even chance to prove it with losses and gains like these"
    )
    assert comparison.sentence.endswith(like) != is_close


@pytest.mark.parametrize(("n", "outcome"), [(179, "inconclusive"), (180, "pass")])
def test_a_bucket_without_flips_needs_180_cases_for_two_points(n: int, outcome: str) -> None:
    assert judge_flips(0, 0, n, right=n).outcome == outcome


def test_few_clusters_prove_nothing_but_can_fail() -> None:
    """29 cases without a flip have an upper bound of 11.5 points: below the tolerance, and still a guess."""
    unproven = judge_flips(0, 0, 29, right=29, tolerance=0.2)
    assert unproven.high <= 0.2 and unproven.outcome == "inconclusive"
    assert "its 29 clusters weigh as much as 29 of equal size, too few to bound a loss" in unproven.sentence
    assert judge_flips(0, 0, 30, right=30, tolerance=0.2).outcome == "pass"
    assert judge_flips(12, 0, 29, right=29, tolerance=0.2).outcome == "fail"


def test_beyond_tolerance_but_possibly_noise_is_inconclusive() -> None:
    comparison = judge_flips(6, 3, 100, right=80)
    assert comparison.outcome == "inconclusive"
    assert comparison.sentence.startswith("beyond tolerance as seen (3.00 points")


def test_nothing_is_rounded_before_it_is_compared() -> None:
    """U is 2.0009 points at n = 179: a gate that compares printed numbers would pass it at 2 points."""
    comparison = judge_flips(0, 0, 179, right=179)
    assert round(100 * comparison.high, 1) == 2.0
    assert comparison.outcome == "inconclusive"


def test_a_large_gain_is_suspicious_and_no_pass() -> None:
    """A scorer that says yes to everything would otherwise ship whatever it scored."""
    assert judge_flips(0, 4, 340, right=200).outcome == "pass"
    comparison = judge_flips(0, 40, 340, right=200)
    assert comparison.outcome == "inconclusive"
    assert comparison.sentence.startswith("suspicious gain: better by 11.76 points")


def test_the_release_is_one_holm_family_and_others_stand_alone() -> None:
    pairs = align(*make_flips(8, 0, 200, right=160), where="workflows")
    measured = measure_metric(pairs, COMPLETION, None, eval_name="workflows", tolerance=0.02, alpha=0.05)
    judged = judge_all({"a": [measured] * 2, "b": [measured] * 2, "outside": [measured]}, ["a", "b"], alpha=0.05)
    assert judged["a"][0].p_holm == pytest.approx(4 * measured.p)
    assert judged["outside"][0].p_holm == pytest.approx(measured.p)


def test_fail_outranks_refused_outranks_inconclusive() -> None:
    failing, unsure, passing = (judge_flips(*flips, right=276) for flips in ((40, 2, 340), (6, 0, 340), (0, 0, 340)))
    assert combine([passing, failing], ["unreadable"]) == "fail"
    assert combine([passing, unsure], ["unreadable"]) == "refused"
    assert combine([passing, unsure], []) == "inconclusive"
    assert combine([passing], []) == "pass"
    assert combine([], []) == "refused"


def measure_swapped(rng: np.random.Generator, clusters: NDArray[np.int64]) -> Measurement:
    """Measure two equal models: a fifth of the cases flips, and which side lost is a coin toss per cluster."""
    flips = rng.random(len(clusters)) < 0.2
    d = np.where(flips, rng.choice([-1.0, 1.0], int(clusters.max()) + 1)[clusters], 0.0)
    bounds, sums = proportion_bounds(d, clusters, confidence=0.95), sum_by_cluster(d, clusters)
    return Measurement(
        metric="w/task_completion_rate",
        bucket=None,
        reference=0.8,
        candidate=0.8 - bounds.harm,
        unit="",
        n=len(d),
        num_clusters=int(clusters.max()) + 1,
        effective_clusters=float(clusters.max()) + 1,
        b=int((d > 0).sum()),
        c=int((d < 0).sum()),
        harm=bounds.harm,
        low=bounds.low,
        high=bounds.high,
        p=sign_flip_p(d, clusters),
        p_gain=1.0,
        tolerance=0.02,
        more_cases=None,
        tier="critical",
        sums=sums,
        weights=sum_by_cluster(np.ones(len(d)), clusters),
        tail=sign_flip_tail(sums),
    )


@pytest.mark.parametrize("size", [1, 4], ids=["independent", "clusters-of-4"])
def test_identical_models_are_blocked_no_more_often_than_alpha(size: int) -> None:
    """A/A with four gated metrics at once: without Holm one release in six would be blocked."""
    rng, runs = np.random.default_rng(1), 800
    clusters = np.arange(200) // size
    judged = [
        judge_all({"a": [measure_swapped(rng, clusters) for _ in range(4)]}, ["a"], alpha=0.05)["a"]
        for _ in range(runs)
    ]
    fails = sum(any(c.outcome == "fail" for c in comparisons) for comparisons in judged)
    assert fails / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def tree(tmp_path: Path, behaviours: dict[str, Behaviour], **options: int) -> Path:
    write_tree(tmp_path / "build", behaviours, **options)
    return tmp_path / "build"


def judge_tree(build: Path, names: list[str], release: list[str] | None = None, **gate: Any) -> dict[str, Verdict]:
    return {
        v.candidate: v for v in compare_release(make_params(names, release or names, **gate), build).judgement.verdicts
    }


def test_planted_loss_is_found_in_its_bucket_and_said_in_words(tmp_path: Path) -> None:
    build = tree(
        tmp_path, {"bad": Behaviour({"workflows/constraint_retention": 0.3}, nll_shift=0.004), "same": Behaviour()}
    )
    verdicts = judge_tree(build, ["bad", "same"])
    outcomes = {(c.metric, c.bucket): c.outcome for c in verdicts["bad"].comparisons}
    assert outcomes["workflows/task_completion_rate", "constraint_retention"] == "fail"
    assert outcomes["prose/perplexity_per_token", None] == "pass"
    assert list_said(verdicts["bad"])[0].startswith(
        "perplexity flat, task down: bad moves prose/perplexity_per_token by"
    )
    assert verdicts["same"].outcome == "pass"


def test_perplexity_harm_is_the_ratio_of_perplexities(tmp_path: Path) -> None:
    verdict = judge_tree(tree(tmp_path, {"worse": Behaviour(nll_shift=0.05)}), ["worse"])["worse"]
    comparison = next(c for c in verdict.comparisons if c.metric == "prose/perplexity_per_token")
    assert comparison.harm == pytest.approx(comparison.candidate / comparison.reference - 1, rel=1e-9)
    assert comparison.low < comparison.harm < comparison.high
    assert comparison.outcome == "fail"


def test_a_bucket_in_no_case_is_refused_by_name(tmp_path: Path) -> None:
    verdict = judge_tree(
        tree(tmp_path, {"a": Behaviour()}),
        ["a"],
        tolerances={"workflows/task_completion_rate": {"overall": 0.02, "buckets": {"retntion": 0.05}}},
    )["a"]
    assert verdict.outcome == "refused"
    assert any("task_completion_rate [retntion]: the bucket is empty" in reason for reason in list_said(verdict))


def drop_last(records: list[CaseRecord]) -> list[CaseRecord]:
    return records[:-1]


def repeat_first(records: list[CaseRecord]) -> list[CaseRecord]:
    return [*records[:-1], records[0]]


def change_first(**update: Any) -> Callable[[list[CaseRecord]], list[CaseRecord]]:
    return lambda records: [records[0].model_copy(update=update), *records[1:]]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(drop_last, "have no partner", id="missing-case"),
        pytest.param(repeat_first, "asks the same as case 'workflows-0000'", id="duplicated-case"),
        pytest.param(lambda records: [], "at least one case", id="no-case"),
        pytest.param(change_first(input_digest="0" * 64), "have no partner", id="another-prompt"),
        pytest.param(change_first(fingerprint="e" * 64), "answered by another endpoint", id="another-endpoint"),
        pytest.param(change_first(failure="infrastructure: reset", scores={}), "1 infrastructure", id="failed-case"),
        pytest.param(change_first(scores={}), "has no score 'completed'", id="absent-metric"),
        pytest.param(change_first(scores={"completed": 0.5}), "to be 0 or 1", id="half-right"),
        pytest.param(change_first(cluster="elsewhere"), "is in cluster", id="another-cluster"),
    ],
)
@pytest.mark.parametrize("side", ["a", "reference"])
def test_unfit_records_are_refused_and_named(
    tmp_path: Path, edit: Callable[[list[CaseRecord]], list[CaseRecord]], said: str, side: str
) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    rewrite_records(build, side, "workflows", edit)
    verdict = judge_tree(build, ["a"])["a"]
    assert verdict.outcome == "refused"
    assert any(said in reason for reason in list_said(verdict)), list_said(verdict)


def test_unequal_work_is_refused(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    rewrite_records(
        build,
        "a",
        "prose",
        lambda records: [
            records[0].model_copy(update={"scores": {**records[0].scores, "num_tokens": 7.0}}),
            *records[1:],
        ],
    )
    verdict = judge_tree(build, ["a"])["a"]
    assert verdict.outcome == "refused"
    assert any("unequal work: 'num_tokens' of case 'prose-0000'" in reason for reason in list_said(verdict))


def break_nan(path: Path) -> None:
    path.write_text(path.read_text().replace('"completed":1.0', '"completed":NaN', 1))


def break_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def break_score(path: Path) -> None:
    path.write_text(path.read_text().replace('"completed":0.0', '"completed":1.0', 1))


@pytest.mark.parametrize(
    "damage",
    [break_nan, break_truncate, break_score, lambda path: path.unlink()],
    ids=["nan", "truncated", "score-edited", "file-gone"],
)
def test_files_that_were_touched_after_the_evaluation_are_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    damage(build / "evaluations" / "a" / "workflows.jsonl")
    assert judge_tree(build, ["a"])["a"].outcome == "refused"


def test_nan_is_refused_even_when_it_was_sealed(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    path, index = build / "evaluations/a/workflows.jsonl", build / "evaluations/a/evaluation.json"
    old = digest_file(path)
    break_nan(path)
    index.write_text(index.read_text().replace(old, digest_file(path)))
    verdict = judge_tree(build, ["a"])["a"]
    assert verdict.outcome == "refused"
    assert any("workflows.jsonl:" in reason for reason in list_said(verdict))


def test_bytes_that_are_no_text_refuse_one_candidate_and_hide_no_other(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour(), "b": Behaviour()}, num_cases=400)
    path, index = build / "evaluations/a/workflows.jsonl", build / "evaluations/a/evaluation.json"
    old = digest_file(path)
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"crate", b"\xff", 1)
    path.write_bytes(b"\n".join(lines))
    index.write_text(index.read_text().replace(old, digest_file(path)))
    verdicts = judge_tree(build, ["a", "b"])
    assert (verdicts["a"].outcome, verdicts["b"].outcome) == ("refused", "pass")
    assert any("workflows.jsonl:2: not UTF-8 (" in reason for reason in list_said(verdicts["a"]))


@pytest.mark.parametrize("nll", [1e308, -1e308])
@pytest.mark.parametrize("num_huge", [1, 40])
def test_a_number_too_large_for_a_mean_refuses_one_candidate_and_hides_no_other(
    tmp_path: Path, nll: float, num_huge: int
) -> None:
    build = tree(tmp_path, {"a": Behaviour(), "b": Behaviour()}, num_cases=400)
    rewrite_records(
        build,
        "a",
        "prose",
        lambda records: [
            r.model_copy(update={"scores": r.scores | {"nll_bits": nll, "nll_nats": nll}}) if i < num_huge else r
            for i, r in enumerate(records)
        ],
    )
    verdicts = judge_tree(build, ["a", "b"])
    assert (verdicts["a"].outcome, verdicts["b"].outcome) == ("refused", "pass")
    for metric in ("prose/bits_per_byte", "prose/perplexity_per_token"):
        assert any(metric in reason for reason in list_said(verdicts["a"]))


def test_what_was_evaluated_must_be_what_would_ship(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour(), "b": Behaviour()}, num_cases=400)
    write_candidate(build, make_candidate("a").model_copy(update={"libraries": {"torch": "2.99"}}))
    verdicts = judge_tree(build, ["a", "b"])
    assert "is not what would ship: libraries.torch: expected" in list_said(verdicts["a"])[0]
    assert (verdicts["a"].outcome, verdicts["b"].outcome) == ("refused", "pass")


def test_a_serving_setting_changed_after_the_evaluation_is_named(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    params = make_params(["a"], ["a"])
    params = params.model_copy(update={"serving": params.serving.model_copy(update={"concurrency": 1})})
    reasons = list_said(compare_release(params, build).judgement.verdicts[0])
    assert "not what would ship: serving.concurrency: expected 1, got 32" in reasons[0]


SPECULATIVE = SpeculativeConfig(method="draft_model", num_tokens=2, draft_digest="d" * 64, draft_path="models/draft")
COUNTS = SpeculationCounts(
    method="draft_model",
    num_tokens=2,
    num_target_forwards=100,
    num_completion_tokens=230,
    num_drafted=200,
    accepted_by_position=(80, 50),
)


def speculate(
    build: Path,
    counts: SpeculationCounts | None,
    *,
    evaluated: SpeculativeConfig | None = SPECULATIVE,
    num_uncounted: int = 0,
) -> None:
    """Turn candidate `a` of a tree into one that is served with drafts, and set what its evaluation counted.

    All is counted on one answer; the others end with their first token, but for those that nobody counted.
    """
    write_candidate(build, make_candidate("a").model_copy(update={"speculative": SPECULATIVE}))
    path = build / "evaluations/a/evaluation.json"
    old = read_record(path, Evaluation)
    serving = old.serving.model_copy(update={"speculative": evaluated, "continuous_batching": False})
    facts = make_candidate("a").model_copy(update={"serving": serving}).facts
    write_record(
        path,
        old.model_copy(
            update={"serving": serving, "fingerprint": fingerprint(facts), "served_by": facts, "speculation": counts}
        ),
    )
    for name in old.evals:

        def count(records: list[CaseRecord], name: str = name) -> list[CaseRecord]:
            return [
                r.model_copy(
                    update={
                        "fingerprint": fingerprint(facts),
                        "num_completion_tokens": 230 if i == 0 else 40 if i <= num_uncounted else 1,
                        "speculation": counts if (name, i) == ("calls", 0) else None,
                    }
                )
                if name == "calls"
                else r.model_copy(update={"fingerprint": fingerprint(facts), "num_completion_tokens": 1})
                for i, r in enumerate(records)
            ]

        rewrite_records(build, "a", name, count)


def judge_speculation(build: Path, min_acceptance: float | None = None) -> tuple[Verdict, str]:
    params = make_params(["a"], ["a"])
    step = SpeculativeStep(
        kind="speculative",
        method="draft_model",
        draft="models/draft",
        num_speculative_tokens=2,
        min_acceptance=min_acceptance,
    )
    path = build / "candidates/a/candidate.json"
    write_record(path, read_record(path, BuiltCandidate).model_copy(update={"steps": (step.model_dump(mode="json"),)}))
    settings = CandidateSettings(checkpoint="models/agent", steps=[step])
    compared = compare_release(params.model_copy(update={"candidates": params.candidates | {"a": settings}}), build)
    return compared.judgement.verdicts[0], render_report(compared)


def test_speculation_that_ran_passes_and_is_reported(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()})
    speculate(build, COUNTS)
    verdict, report = judge_speculation(build, min_acceptance=0.65)
    assert verdict.outcome == "pass", list_said(verdict)
    assert (
        "Speculation (draft_model, 2 tokens): 65.0% of 200 drafted tokens accepted, 1.30 per target forward pass; "
        "passes that accepted 1, 2, ... tokens or more (a draft stops where the answer ends): 80.0%, 50.0%. "
        "0.435 target forward passes per token."
    ) in report


@pytest.mark.parametrize(
    ("counts", "min_acceptance", "said"),
    [
        (None, None, "draft_model was asked for, and the evaluation shows no drafted token"),
        (COUNTS.model_copy(update={"num_drafted": 0, "accepted_by_position": (0, 0)}), None, "shows no drafted token"),
        (
            COUNTS.model_copy(update={"method": "prompt_lookup"}),
            None,
            "expected draft_model with 2 tokens, the evaluation counted prompt_lookup with 2",
        ),
    ],
    ids=["not-counted", "nothing-drafted", "another-method"],
)
def test_speculation_that_was_not_what_was_asked_for_is_refused(
    tmp_path: Path, counts: SpeculationCounts | None, min_acceptance: float | None, said: str
) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    speculate(build, counts)
    verdict, _ = judge_speculation(build, min_acceptance)
    assert verdict.outcome == "refused"
    assert list_said(verdict)[0].startswith("refused: speculation of a: ") and said in list_said(verdict)[0]


def test_the_totals_of_a_vllm_that_counts_no_drafts_by_request_will_do(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    speculate(build, COUNTS, num_uncounted=7)
    for name in read_record(build / "evaluations/a/evaluation.json", Evaluation).evals:
        rewrite_records(build, "a", name, lambda records: [r.model_copy(update={"speculation": None}) for r in records])
    said = judge_speculation(build)[0]
    assert "the evaluation's sum differs" in list_said(said)[0], "the embedded engine counts every request"
    serving = ServingConfig(engine="vllm", version="0.26.0", speculative=SPECULATIVE)
    evidence: Any = SimpleNamespace(
        candidate=SimpleNamespace(name="a", serving=serving),
        evaluation=SimpleNamespace(speculation=COUNTS),
        records={},
        problems=[],
    )
    assert check_speculation(evidence) == []
    # a release that counts by request has no sum to fall back on
    evidence.candidate.serving = serving.model_copy(update={"version": "0.32.0"})
    assert "the evaluation's sum differs from what its records counted" in check_speculation(evidence)[0]


def test_of_an_attached_server_that_counts_no_drafts_it_is_said_what_makes_it_count() -> None:
    """An eval that generates text, which the advice for others names, is there, and changes nothing."""
    serving = ServingConfig(engine="openai", base_url="http://there", model="m", speculative=SPECULATIVE)
    evidence: Any = SimpleNamespace(
        candidate=SimpleNamespace(name="a", serving=serving),
        evaluation=SimpleNamespace(speculation=None),
        records={},
        problems=[],
    )
    assert check_speculation(evidence) == [
        "speculation of a: draft_model was asked for, and the evaluation shows no drafted token; have the attached "
        "server count the drafts of each request (vLLM by --per-request-spec-decode-metrics summary), or remove the "
        "speculative step"
    ]


def test_drafts_that_only_some_answers_counted_are_refused(tmp_path: Path) -> None:
    """Two tokens of one answer would otherwise stand for all."""
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    speculate(build, COUNTS, num_uncounted=7)
    verdict, _ = judge_speculation(build)
    assert verdict.outcome == "refused"
    assert "speculation of a: 7 of 8 answers of several tokens carry no count of their drafts" in list_said(verdict)[0]


def test_drafts_that_are_accepted_too_seldom_fail_though_every_answer_is_right(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()})
    speculate(build, COUNTS)
    verdict, _ = judge_speculation(build, 0.66)
    assert all(c.outcome in ("pass", "reported") for c in verdict.comparisons)
    assert verdict.outcome == "fail"
    said = "130 of 200 drafted tokens were accepted (65.00%), expected at least 66.00% (min_acceptance)"
    assert list_said(verdict)[0].startswith(f"fail: speculation: {said}")
    assert is_blocking(verdict, build_policy(make_params(["a"], ["a"])))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 3}, "serving.speculative.num_tokens: expected 2, got 3"),
        ({"method": "prompt_lookup"}, "serving.speculative.method: expected 'draft_model', got 'prompt_lookup'"),
        ({"draft_digest": "e" * 64}, f"serving.speculative.draft_digest: expected '{'d' * 64}', got '{'e' * 64}'"),
    ],
)
def test_another_speculation_than_the_candidates_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    speculate(build, COUNTS, evaluated=SPECULATIVE.model_copy(update=change))
    verdict, _ = judge_speculation(build)
    assert verdict.outcome == "refused" and said in list_said(verdict)[0]


def test_speculation_that_its_records_did_not_count_is_refused(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    speculate(build, COUNTS)
    path = build / "evaluations/a/evaluation.json"
    better = COUNTS.model_copy(update={"accepted_by_position": (99, 98)})
    write_record(path, read_record(path, Evaluation).model_copy(update={"speculation": better}))
    verdict, _ = judge_speculation(build)
    assert verdict.outcome == "refused" and "differs from what its records counted" in list_said(verdict)[0]


@pytest.mark.parametrize(("key", "value"), [("key", "another"), ("settings", {"send_tools": True})])
def test_sides_that_were_asked_or_scored_otherwise_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    path = build / "evaluations/a/evaluation.json"
    old = read_record(path, Evaluation)
    file = old.evals["calls"]
    edited = file.settings | value if key == "settings" else value
    evals = old.evals | {"calls": file.model_copy(update={key: edited})}
    write_record(path, old.model_copy(update={"evals": evals}))
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    said = "evals.calls.send_tools: expected False" if key == "settings" else "by different settings or code"
    assert verdict.outcome == "refused" and said in list_said(verdict)[0]


def test_arrays_that_are_gone_are_refused_as_edited_ones_are(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    path = build / "evaluations/a/evaluation.json"
    old = read_record(path, Evaluation)
    evals = old.evals | {"prose": old.evals["prose"].model_copy(update={"arrays_sha256": "0" * 64})}
    write_record(path, old.model_copy(update={"evals": evals}))
    (build / "evaluations/a/prose.npz").unlink()
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    assert verdict.outcome == "refused" and "prose.npz: expected arrays, found no file" in list_said(verdict)[0]


@pytest.mark.parametrize(("side", "outcome"), [("reference", "refused"), ("a", "pass")])
def test_conversations_without_room_are_told_and_the_reference_has_none(
    tmp_path: Path, side: str, outcome: str
) -> None:
    """Wrong on both sides, they would hide what the candidate loses."""
    build = tree(tmp_path, {"a": Behaviour()})
    rewrite_records(
        build,
        side,
        "workflows",
        lambda records: [records[0].model_copy(update={"output": f"{records[0].output}\n{OUTGROWN}"}), *records[1:]],
    )
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    assert verdict.outcome == outcome
    assert any("workflows: 1 of 400 conversations outgrew serving.context_length" in r for r in list_said(verdict))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"config.json": "1"}}, "checkpoint digest (chat_template.jinja is new): expected"),
        (
            {"files": {"config.json": "2", "chat_template.jinja": "1"}},
            "checkpoint digest (config.json differs): expected",
        ),
        ({}, "libraries.torch: expected '2.14.0', got '2.13.0'"),
    ],
)
def test_what_drifted_between_evaluation_and_release_is_named(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    path = build / "evaluations/a/evaluation.json"
    candidate = make_candidate("a")
    files = {"config.json": "1", "chat_template.jinja": "1"}
    facts = candidate.facts | {"checkpoint": {"digest": candidate.checkpoint.digest, "files": files}}
    write_record(path, read_record(path, Evaluation).model_copy(update={"served_by": facts}))
    checkpoint = candidate.checkpoint.model_copy(update=change | ({"digest": "f" * 64} if change else {}))
    libraries = candidate.libraries if change else {"torch": "2.14.0"}
    write_candidate(build, candidate.model_copy(update={"checkpoint": checkpoint, "libraries": libraries}))
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    assert verdict.outcome == "refused"
    assert said in list_said(verdict)[0]


def test_weights_that_other_steps_made_are_refused(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    params = make_params(["a"], ["a"])
    step = params.candidates["a"].steps[0].model_copy(update={"group_size": 64})
    asked = params.candidates["a"].model_copy(update={"steps": [step]})
    params = params.model_copy(update={"candidates": params.candidates | {"a": asked}})
    verdict = compare_release(params, build).judgement.verdicts[0]
    assert verdict.outcome == "refused"
    assert "candidate.json: steps.0.group_size: expected 64, as params.yaml asks, got 128" in list_said(verdict)[0]


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ((), []),
        (("a",), ["it was evaluated without attn_logit_softcapping 50 of its config.json"]),
        (("reference",), ["the reference was evaluated without attn_logit_softcapping 50 of its config.json"]),
        (("a", "reference"), ["it was evaluated without attn_logit_softcapping 50 of its config.json"]),
    ],
)
def test_what_an_engine_left_out_of_either_side_is_said(
    tmp_path: Path, sides: tuple[str, ...], said: list[str]
) -> None:
    """A candidate behind vLLM, which applies the cap, was judged beside a reference without it, and nothing said so."""
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=60)
    for side in sides:
        path = build / "evaluations" / side / "evaluation.json"
        evaluation = read_record(path, Evaluation)
        facts = evaluation.served_by | {"engine": {"left_out": {"attn_logit_softcapping": 50.0}}}
        known = {"fingerprint": fingerprint(facts)}
        write_record(path, evaluation.model_copy(update={"served_by": facts, **known}))

        def sign(records: list[CaseRecord], known: dict[str, str] = known) -> list[CaseRecord]:
            return [record.model_copy(update=known) for record in records]

        for name in evaluation.evals:
            rewrite_records(build, side, name, sign)
    notes = [text for text in list_said(judge_tree(build, ["a"])["a"]) if "softcapping" in text]
    leaves_out = ", which the embedded engine leaves out, as transformers does by default"
    assert [text.partition(": ")[2].partition(";")[0] for text in notes] == [text + leaves_out for text in said]


@pytest.mark.parametrize(("url", "outcome"), [("http://127.0.0.1:1", "pass"), ("http://127.0.0.1:2", "pass")])
def test_an_attached_endpoint_is_known_by_its_own_fingerprint_and_that_is_said(
    tmp_path: Path, url: str, outcome: str
) -> None:
    """Which port it listens on is no part of what it is."""
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    path = build / "evaluations/a/evaluation.json"
    evaluation = read_record(path, Evaluation)
    attached: dict[str, Any] = {"engine": "openai", "model": "m", "base_url": "http://127.0.0.1:1"}
    there = make_candidate("a").model_copy(update={"steps": (), "serving": ServingConfig(**attached)})
    write_record(
        path,
        evaluation.model_copy(
            update={
                "served_by": there.facts,
                "fingerprint": there.fingerprint,
                "serving": there.serving,
                "is_declared": True,
            }
        ),
    )
    for name in evaluation.evals:
        rewrite_records(
            build, "a", name, lambda records: [r.model_copy(update={"fingerprint": there.fingerprint}) for r in records]
        )
    write_candidate(build, there)
    params = make_params(["a"], ["a"])
    engine = OpenaiEngine(kind="openai", base_url=url, model="m")
    endpoint = CandidateSettings(checkpoint="models/agent", steps=[], engine=engine)
    params = params.model_copy(update={"candidates": params.candidates | {"a": endpoint}})
    judgement = compare_release(params, build).judgement
    assert judgement.verdicts[0].outcome == outcome
    assert "fingerprint is declared by params.yaml, not proved" in render_gate(judgement)


def test_arrays_that_were_touched_are_refused(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    arrays, index = build / "evaluations/a/prose.npz", build / "evaluations/a/evaluation.json"
    evaluation = read_record(index, Evaluation)
    sealed = evaluation.evals["prose"].model_copy(update={"arrays_sha256": digest_file(arrays)})
    write_record(index, evaluation.model_copy(update={"evals": evaluation.evals | {"prose": sealed}}))
    assert judge_tree(build, ["a"])["a"].outcome == "pass"
    arrays.write_bytes(arrays.read_bytes() + b"x")
    assert any("prose.npz: expected sha256" in reason for reason in list_said(judge_tree(build, ["a"])["a"]))


def test_a_broken_reference_refuses_everyone(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour(), "b": Behaviour()}, num_cases=400)
    (build / "evaluations" / "reference" / "evaluation.json").unlink()
    verdicts = judge_tree(build, ["a", "b"])
    assert {v.outcome for v in verdicts.values()} == {"refused"}
    assert list_said(verdicts["a"])[0].startswith(f"refused: the reference is unfit: {build}/evaluations/reference/")


def test_different_evalsets_are_refused(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    path = build / "evaluations" / "a" / "evaluation.json"
    data = json.loads(path.read_text())
    data["evals"]["calls"]["evalset_digest"] = "0" * 64
    path.write_text(json.dumps(data))
    verdict = judge_tree(build, ["a"])["a"]
    assert "different evalsets" in list_said(verdict)[0]


def judge_equal_choices(folder: Path, *, right: int, num_choices: int = 0) -> Verdict:
    """Judge a candidate that has the same 400 choices right as the reference, the first so many."""
    build = tree(folder, {"a": Behaviour()}, num_cases=400)
    for name in ("reference", "a"):
        rewrite_records(
            build,
            name,
            "choices",
            lambda records: [
                r.model_copy(update={"scores": {"accuracy": float(i < right)}, "num_choices": num_choices})
                for i, r in enumerate(records)
            ],
        )
    return judge_tree(build, ["a"])["a"]


def test_an_evalset_that_the_reference_can_not_solve_proves_nothing(tmp_path: Path) -> None:
    verdict = judge_equal_choices(tmp_path, right=12)
    assert verdict.outcome == "refused"
    # a blank before each right answer is seen at once
    assert list_said(verdict)[0] == (
        "refused: choices/accuracy: the reference is right in 12 of 400 cases, so a loss above the tolerance of 0.03 "
        "can't show; look at the evalset, where its answers are such as "
        """'{"name": "move", "arguments": {"crate": 0, "to": "bay-0"}}\\n{' and """
        """'{"name": "move", "arguments": {"crate": 1, "to": "bay-0"}}\\n{'"""
    )


@pytest.mark.parametrize(("right", "is_unfit"), [(12, True), (13, False)])  # of 400, 12 tolerated
def test_an_unfit_reference_is_found_without_any_candidate(tmp_path: Path, right: int, is_unfit: bool) -> None:
    """It was told after all candidates had been evaluated."""
    refused = judge_equal_choices(tmp_path, right=right)
    product, build = make_params(["a"], ["a"]), tmp_path / "build"
    shutil.rmtree(build / "evaluations/a")
    found = find_unfit(product, TextAuditor(), build)
    assert [f"refused: {problem}" for problem in found] == [s for s in list_said(refused) if "can't show" in s]
    assert len(found) == is_unfit


@pytest.mark.parametrize(
    ("right", "num_choices", "is_refused"),
    [(112, 4, True), (113, 4, False), (212, 2, True), (213, 2, False), (112, 0, False)],  # of 400, 12 tolerated
)
def test_a_reference_that_knows_little_more_than_guessing_gets_proves_nothing(
    tmp_path: Path, right: int, num_choices: int, is_refused: bool
) -> None:
    verdict = judge_equal_choices(tmp_path, right=right, num_choices=num_choices)
    said = [
        f"refused: choices/accuracy: the reference is right in {right} of 400 cases and guessing in "
        f"{400 // num_choices}, so a loss above the tolerance of 0.03 can't show; look at the evalset"
        for _ in range(is_refused)
    ]
    assert verdict.outcome == ("refused" if is_refused else "pass")
    assert [s for s in list_said(verdict) if "guessing in" in s] == said


@pytest.mark.parametrize(
    ("right", "num_choices", "said"),
    [
        (120, 0, ""),  # 12 of them are a tenth
        (119, 0, "the reference is right in 119 of 400 cases; the tolerance of 3 points lets 10 % of these be lost"),
        (220, 4, ""),
        (
            219,
            4,
            "the reference is right in 219 of 400 cases, 100 of them by guessing; the tolerance of 3 points lets 10 % "
            "of the others be lost",
        ),
    ],
)
def test_a_tolerance_that_is_a_large_share_of_what_the_reference_knows_is_told(
    tmp_path: Path, right: int, num_choices: int, said: str
) -> None:
    verdict = judge_equal_choices(tmp_path, right=right, num_choices=num_choices)
    assert verdict.outcome == "pass"
    told = [reason.text for reason in verdict.reasons if "lets" in reason.text]
    assert told == ([f"choices/accuracy: {said}"] if said else [])


def test_missing_tripwire_material_is_said_and_does_not_decide(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()})
    (build / "evaluations" / "a" / "prose.npz").write_bytes(b"not an archive")
    verdict = judge_tree(build, ["a"])["a"]
    assert verdict.outcome == "pass"
    assert any(reason.startswith("note: divergence of prose was not measured") for reason in list_said(verdict))


def as_lists(p: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    order = np.argsort(-p, axis=1)
    return order.astype(np.int32), np.log(np.take_along_axis(p, order, axis=1)).astype(np.float32)


def test_kl_is_exact_when_the_lists_hold_everything_and_a_lower_bound_otherwise() -> None:
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in rng.normal(0, 1.5, (2, 50, 12)))
    full = (p * np.log(p / q)).sum(axis=1)
    (ids_p, log_p), (ids_q, log_q) = as_lists(p), as_lists(q)
    assert top_k_kl(ids_p, log_p, ids_q, log_q) == pytest.approx(full, abs=1e-5)
    cut = top_k_kl(ids_p[:, :5], log_p[:, :5], ids_q[:, :5], log_q[:, :5])
    assert (cut <= full + 1e-6).all()
    assert cut.sum() > 0.2 * full.sum()
    assert (top_k_kl(ids_p, log_p, ids_p, log_p) == 0).all()


def test_divergence_follows_the_pairing_and_refuses_unequal_documents() -> None:
    rng = np.random.default_rng(1)
    p = np.exp(rng.normal(0, 1, (9, 6)))
    ids, logprobs = as_lists(p / p.sum(axis=1, keepdims=True))
    ours = TopTokens(np.array([0, 4, 9]), ids, logprobs)
    swapped = np.r_[4:9, 0:4]
    theirs = TopTokens(np.array([0, 5, 9]), ids[swapped], logprobs[swapped])
    kl, changes, tokens = divergence_by_document(ours, theirs, np.array([1, 0]))
    assert kl.tolist() == [0, 0] and changes.tolist() == [0, 0] and tokens.tolist() == [4, 5]
    with pytest.raises(EvidenceError, match="unequal work"):
        divergence_by_document(ours, theirs, np.array([0, 1]))


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [("same", "same", None), ("one\ntwo", "one\ntwX", (1, 6)), ("abc", "abcd", (0, 3)), ("", "x", (0, 0))],
)
def test_first_difference_counts_turns_and_characters(a: str, b: str, place: tuple[int, int] | None) -> None:
    assert first_difference(a, b) == place


@pytest.mark.parametrize(
    ("release", "tolerances", "outcome"),
    [
        pytest.param(["a"], {"prose/bits_per_byte": {"overall": 0.02}}, "pass", id="only-likelihood"),
        pytest.param(["ghost"], {"calls/tool_call_exact_match": {"overall": 0.02}}, "refused", id="never-evaluated"),
    ],
)
def test_unusual_releases_still_get_a_report(
    tmp_path: Path, release: list[str], tolerances: dict[str, Any], outcome: str
) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    compared = compare_release(make_params(["a", "ghost"], release, tolerances=tolerances), build)
    verdict = next(v for v in compared.judgement.verdicts if v.candidate == release[0])
    assert verdict.outcome == outcome
    assert f"`{release[0]}`" in render_report(compared)
    plot_harm(compared.judgement, tmp_path / "harm.png")
    plot_completion(compared, tmp_path / "completion.png")


def test_metrics_of_the_reference_survive_a_broken_candidate(tmp_path: Path) -> None:
    build = tree(tmp_path, {"a": Behaviour()}, num_cases=400)
    rewrite_records(build, "a", "workflows", drop_last)
    judgement = compare_release(make_params(["a"], ["a"]), build).judgement
    rates = {m.name: m for m in judgement.reference_metrics if m.bucket is None}
    assert rates["workflows/task_completion_rate"].n == 400
    low = rates["prose/perplexity_per_token"].low
    assert low is not None and low < rates["prose/perplexity_per_token"].value
