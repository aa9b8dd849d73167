"""What became looser since the last release needs a reason; what became stricter or is new needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.loosening import check_loosening, digest_serving, list_loosened, name_material
from pipeline.gate.verdicts import GatedTolerance, Policy, build_policy
from pipeline.records.checksums import SUMS, write_sums
from pipeline.records.files import write_text
from pipeline.records.serving import ServingConfig
from pipeline.settings.base import RELEASE
from tests.fakes.synthetic_records import PRODUCT, make_params

TASK, CALLS = "workflows/task_completion_rate", "calls/tool_call_exact_match"
TOLERANCES = {TASK: {"overall": 0.02, "buckets": {"hard": 0.05}}, CALLS: {"overall": 0.02}}
WHY = "the product asks for less since June"
MATERIAL = name_material(
    weights="a" * 64,
    cases={"workflows": "b" * 64, "calls": "c" * 64, "choices": "d" * 64},
    serving="f" * 64,
    adapter="9" * 64,
)

GRID = {"concurrency": [1, 16], "prompt_tokens": [[16, 24], [40, 90]], "num_tokens": 32, "rounds": 8}
TIMED = {"benchmarked": ("a",), "max_slowdown": 0.1, "grid": GRID}


def policy(**gate: Any) -> Policy:
    return build_policy(make_params(["a"], ["a"], **({"tolerances": TOLERANCES, "on_inconclusive": "block"} | gate)))


def change_evals(name: str, **changed: Any) -> dict[str, Any]:
    """Return the policy's evals with one of them changed."""
    evals = policy().evals
    return {"evals": evals | {name: evals[name] | changed}}


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder whose last release was judged by `policy()`."""
    manifest = {
        "policy": policy().model_dump(mode="json"),
        "reference": {"weights_digest": "a" * 64, "serving_digest": "f" * 64, "adapter_digest": "9" * 64},
        "evalsets": {
            name: {"digest": digit * 64} for name, digit in (("workflows", "b"), ("calls", "c"), ("choices", "d"))
        },
    }
    write_text(tmp_path / RELEASE / PRODUCT / "manifest.json", json.dumps(manifest))
    return tmp_path


def test_a_manifest_that_was_edited_is_no_last_release(released: Path) -> None:
    """A tolerance was widened in the manifest and in params.yaml, and no reason was asked for."""
    folder = released / RELEASE / PRODUCT
    manifest, wider = folder / "manifest.json", policy(tolerances=TOLERANCES | {CALLS: {"overall": 0.03}})
    write_sums(folder)
    check_loosening(policy(), released, material={})
    content = json.loads(manifest.read_text())
    content["policy"]["tolerances"][CALLS]["overall"] = 0.03
    manifest.write_text(json.dumps(content))
    with pytest.raises(
        EvidenceError, match=r"manifest\.json: expected sha256 \w{12}, as SHA256SUMS says, got \w{12}; "
    ):
        check_loosening(wider, released, material={})
    (folder / SUMS).write_bytes(b"\xff\n" + (folder / SUMS).read_bytes())
    with pytest.raises(EvidenceError, match="it was changed since the release"):
        check_loosening(wider, released, material={})


@pytest.mark.parametrize(
    ("change", "key", "was", "now"),
    [
        ({"tolerances": TOLERANCES | {CALLS: {"overall": 0.03}}}, f"tolerances.{CALLS}.overall", 0.02, 0.03),
        (
            {"tolerances": TOLERANCES | {TASK: {"overall": 0.02, "buckets": {"hard": 0.06}}}},
            f"tolerances.{TASK}.buckets.hard",
            0.05,
            0.06,
        ),
        ({"tolerances": TOLERANCES | {TASK: {"overall": 0.02}}}, f"tolerances.{TASK}.buckets.hard", 0.05, "not set"),
        ({"tolerances": {TASK: TOLERANCES[TASK]}}, f"tolerances.{CALLS}", "gated", "not set"),
        (
            {"tolerances": TOLERANCES | {CALLS: {"overall": 0.02, "tier": "supporting"}}},
            f"tolerances.{CALLS}.tier",
            "critical",
            "supporting",
        ),
        ({"alpha": 0.1}, "alpha", 0.05, 0.1),
        ({"on_inconclusive": "warn"}, "on_inconclusive", "block", "warn"),
    ],
)
def test_a_looser_setting_needs_its_reason(
    released: Path, change: dict[str, Any], key: str, was: float | str, now: float | str
) -> None:
    """Of this change: a reason for another one, or of which the new value has moved on since, is none."""
    reason = {"was": was, "now": now, "why": WHY}
    with pytest.raises(SettingsError) as caught:
        check_loosening(policy(**change), released, material=MATERIAL)
    assert f"products.{PRODUCT}.gate.loosened: expected {key!r} with a reason" in str(caught.value)
    check_loosening(policy(**change, loosened={key: reason}), released, material=MATERIAL)
    for part in ("was", "now"):
        with pytest.raises(SettingsError, match=f"{part}: expected .*, got 0.001; correct it"):
            check_loosening(policy(**change, loosened={key: reason | {part: 0.001}}), released, material=MATERIAL)


@pytest.mark.parametrize(
    ("change", "key", "was", "now"),
    [
        ({"reference": "worse"}, "reference", "reference", "worse"),
        (
            change_evals("workflows", evalset="evalsets/easy"),
            "evals.workflows.evalset",
            "evalsets/workflows",
            "evalsets/easy",
        ),
        (change_evals("workflows", max_turns=99), "evals.workflows.max_turns", 16.0, 99.0),
        (change_evals("calls", kind="harness"), "evals.calls.kind", "tool_calls", "harness"),
        (change_evals("calls", send_tools=True), "evals.calls.send_tools", "false", "true"),
        (
            {"canary": policy().canary | {"target_rate": 0.45}},
            "canary.target_rate",
            policy().canary["target_rate"],
            0.45,
        ),
    ],
)
def test_another_question_needs_its_reason(
    released: Path, change: dict[str, Any], key: str, was: str | float, now: str | float
) -> None:
    """An easier evalset or a worse reference lets more through, and no tolerance moves."""
    asked = policy().model_copy(update=change)
    with pytest.raises(SettingsError) as caught:
        check_loosening(asked, released, material=MATERIAL)
    assert f"products.{PRODUCT}.gate.loosened: expected {key!r} with a reason" in str(caught.value)
    assert f"{{was: {json.dumps(was)}, now: {json.dumps(now)}, why: ...}}" in str(caught.value)
    reason = policy(loosened={key: {"was": was, "now": now, "why": WHY}}).loosened
    check_loosening(asked.model_copy(update={"loosened": reason}), released, material=MATERIAL)


def test_all_that_needs_a_reason_is_told_at_once(released: Path) -> None:
    """A user with a model of another origin wrote seven reasons, one failing run after the other."""
    other = name_material(weights="1" * 64, cases={"workflows": "2" * 64})
    with pytest.raises(SettingsError) as caught:
        check_loosening(policy(alpha=0.1), released, material=other)
    said = str(caught.value)
    assert "expected 'alpha' with a reason, as it was 0.05" in said and "\n" not in said
    assert "likewise 'reference.weights' was aaaaaaaaaaaa and is 111111111111" in said
    assert "'evals.workflows.cases' was bbbbbbbbbbbb and is 222222222222" in said


def test_a_release_of_before_products_had_names_is_compared_with(released: Path, tmp_path: Path) -> None:
    """Its policy said `track`; what is asked now says product and kind."""
    path = tmp_path / RELEASE / PRODUCT / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["policy"] = {key: value for key, value in manifest["policy"].items() if key not in ("product", "kind")}
    manifest["policy"] |= {"track": "text", "max_slowdown": 0.1}
    write_text(path, json.dumps(manifest))
    check_loosening(policy().model_copy(update={"max_slowdown": 0.1}), released, material=MATERIAL)
    with pytest.raises(SettingsError, match=r"^products\.agent\.gate\.loosened: expected 'benchmark\.max_slowdown'"):
        check_loosening(policy(), released, material=MATERIAL)


def test_an_eval_that_gates_nothing_may_change(released: Path) -> None:
    check_loosening(policy().model_copy(update=change_evals("choices", task="other")), released, material=MATERIAL)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"alpha": 0.01},
        {"tolerances": TOLERANCES | {CALLS: {"overall": 0.01}, "choices/accuracy": {"overall": 0.5}}},
    ],
)
def test_stricter_and_new_settings_need_none(released: Path, change: dict[str, Any]) -> None:
    check_loosening(policy(**change), released, material=MATERIAL)


def test_nothing_is_compared_before_a_first_release_and_a_broken_manifest_is_named(tmp_path: Path) -> None:
    check_loosening(policy(alpha=0.2), tmp_path, material=MATERIAL)
    write_text(tmp_path / RELEASE / PRODUCT / "manifest.json", "{")
    with pytest.raises(EvidenceError, match=r"release/agent/manifest.json: expected the manifest of a release"):
        check_loosening(policy(), tmp_path, material=MATERIAL)


@pytest.mark.parametrize(
    ("key", "was"),
    [
        ("reference.weights", "a" * 12),
        ("reference.serving", "f" * 12),
        ("reference.adapter", "9" * 12),
        ("evals.workflows.cases", "b" * 12),
    ],
)
def test_other_weights_or_cases_under_the_old_name_need_a_reason(released: Path, key: str, was: str) -> None:
    """Beside a worse reference, or on easier cases, a candidate passes that did not before."""
    other = MATERIAL | {key: "e" * 64}
    with pytest.raises(SettingsError, match=f"expected '{key}' with a reason, as it was {was} at the last .* is eeee"):
        check_loosening(policy(), released, material=other)
    reason = {"was": was, "now": "e" * 12, "why": WHY}
    check_loosening(policy(loosened={key: reason}), released, material=other)
    with pytest.raises(SettingsError, match=r"now: expected dddddddddddd, as is asked now, got eeeeeeeeeeee"):
        check_loosening(policy(loosened={key: reason}), released, material=MATERIAL | {key: "d" * 64})


def test_how_the_reference_is_run_counts_and_how_much_at_once_does_not() -> None:
    """Cut to four tokens, or drawn in one step, both sides are as bad as each other."""
    plain = ServingConfig()
    assert digest_serving(plain) == digest_serving(ServingConfig(concurrency=4, num_threads=2))
    assert digest_serving(plain) != digest_serving(ServingConfig(max_tokens=4))


def test_other_cases_of_an_eval_that_gates_nothing_need_none(released: Path) -> None:
    check_loosening(policy(), released, material=MATERIAL | {"evals.choices.cases": "e" * 64})


def test_another_evalset_needs_one_reason_and_not_one_for_its_cases_too(released: Path) -> None:
    changed = policy().model_copy(update=change_evals("workflows", evalset="evalsets/easy"))
    reason = policy(
        loosened={"evals.workflows.evalset": {"was": "evalsets/workflows", "now": "evalsets/easy", "why": WHY}}
    ).loosened
    other = MATERIAL | {"evals.workflows.cases": "e" * 64}
    check_loosening(changed.model_copy(update={"loosened": reason}), released, material=other)


def test_a_category_that_ap_watched_gets_a_wider_tolerance_by_a_reason_alone() -> None:
    """A category could lose nine tenths by a tolerance of its own, and nobody was asked why."""
    ap, ap_50 = "calls/ap", "calls/ap_50"
    last = policy().model_copy(update={"tolerances": {ap: GatedTolerance(overall=0.02, buckets={"tiny": 0.1})}})

    def compare(buckets: dict[str, float], other: GatedTolerance | None = None, **evals: Any) -> list[Any]:
        tolerances = {ap: GatedTolerance(overall=0.02, buckets={"tiny": 0.1} | buckets)}
        tolerances |= {ap_50: other} if other else {}
        return list(list_loosened(last, last.model_copy(update={"tolerances": tolerances} | evals)))

    own = f"tolerances.{ap}.buckets.person"
    assert compare({"person": 0.9}) == [(own, 0.02, 0.9)]
    assert compare({}, GatedTolerance(overall=None, buckets={"person": 0.9})) == [(own, 0.02, "not set")]
    assert not compare({"person": 0.02, "small": 0.9}), "no wider, and an area is not watched"
    assert not compare({}, GatedTolerance(overall=None, buckets={"person": 0.9}, tier="advisory"))
    known = {"calls": policy().evals["calls"] | {"categories": {"person": 1}, "areas": {"far": [0, 9]}}}
    assert compare({"person": 0.9, "night": 0.9, "far": 0.9}, evals=known) == [(own, 0.02, 0.9)]


@pytest.mark.parametrize(
    ("last", "now", "key"),
    [
        ({"max_slowdown": 0.1}, {}, "benchmark.max_slowdown"),
        (TIMED, {**TIMED, "grid": GRID | {"concurrency": [1]}}, "benchmark.concurrency"),
        (TIMED, {**TIMED, "grid": GRID | {"prompt_tokens": [[16, 90]]}}, "benchmark.prompt_tokens"),
        (TIMED, {**TIMED, "grid": GRID | {"num_tokens": 2}}, "benchmark.num_tokens"),
        (TIMED, {**TIMED, "grid": GRID | {"rounds": 6}}, "benchmark.rounds"),
        ({"max_slowdown": 0.1, "grid": {}}, {"grid": {}}, "max_slowdown"),  # nothing is timed on its own
        ({"exact": ("a",)}, {"release": ("b",)}, "candidates.b.exact"),
        ({"min_acceptance": {"a": 0.9}}, {"release": ("b",)}, "candidates.b.min_acceptance"),
        ({"min_acceptance": {"a": 0.9}}, {"min_acceptance": {"a": 0.8}}, "candidates.a.min_acceptance"),
    ],
)
def test_what_was_asked_of_a_candidate_is_asked_of_the_one_in_its_place(
    last: dict[str, Any], now: dict[str, Any], key: str
) -> None:
    """Renamed, or no longer timed, a candidate would escape what the last release was held to."""
    found = list_loosened(policy().model_copy(update=last), policy().model_copy(update=now))
    assert [name for name, _, _ in found] == [key]
    assert not list(list_loosened(policy().model_copy(update=last), policy().model_copy(update=last)))


@pytest.mark.parametrize(
    ("last", "now"),
    [
        ({}, {"grid": GRID | {"concurrency": [1, 4, 16], "rounds": 12}}),
        ({"max_slowdown": None}, {"max_slowdown": None, "grid": GRID | {"concurrency": [1]}}),
    ],
)
def test_more_may_be_timed_and_what_fails_nobody_may_be_timed_less(last: dict[str, Any], now: dict[str, Any]) -> None:
    assert not list(list_loosened(policy().model_copy(update=TIMED | last), policy().model_copy(update=TIMED | now)))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "alpha",
            "products.agent.gate.loosened.alpha: expected a setting that is looser than at the last release, found "
            "none",
        ),
        (f"tolerances.{CALLS}.overal", "found none of that name that is; remove it"),
        ("reference.weights", "gate.loosened.reference.weights: expected a setting that is looser"),
    ],
)
def test_a_reason_for_a_change_that_nobody_made_is_refused(released: Path, key: str, said: str) -> None:
    """The report told it as fact, and it lay ready for the day when the change would be made."""
    asked = policy(loosened={key: {"was": 0.05, "now": 0.2, "why": WHY}})
    with pytest.raises(SettingsError) as caught:
        check_loosening(asked, released, material=MATERIAL)
    assert said in str(caught.value)


def test_a_reason_may_stay_until_its_change_is_undone_and_before_weights_are_known(
    released: Path, tmp_path: Path
) -> None:
    reason = {"was": 0.05, "now": 0.1, "why": WHY}
    loose = policy(alpha=0.1, loosened={"alpha": reason})
    check_loosening(loose, released, material=MATERIAL)
    path = tmp_path / RELEASE / PRODUCT / "manifest.json"
    manifest = json.loads(path.read_text()) | {"policy": loose.model_dump(mode="json")}
    write_text(path, json.dumps(manifest))
    check_loosening(loose, tmp_path, material=MATERIAL)
    with pytest.raises(SettingsError, match=r"gate.loosened.alpha: expected a setting that is looser"):
        check_loosening(policy(alpha=0.05, loosened={"alpha": reason}), tmp_path, material=MATERIAL)
    known = policy(alpha=0.1, loosened={"alpha": reason, "reference.weights": reason})
    check_loosening(known, tmp_path, material={})


def test_a_reason_before_a_first_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected none before a first release, as nothing can be looser"):
        check_loosening(policy(loosened={"alpha": {"was": 0.05, "now": 0.2, "why": WHY}}), tmp_path, material={})


LINE = {"was": 12 * "a", "now": 12 * "e", "why": "another base model"}
OTHER = MATERIAL | {"reference.weights": "e" * 64, "evals.calls.cases": "0" * 64}


def test_a_model_of_another_origin_starts_a_new_line_by_one_reason(released: Path) -> None:
    """Seven reasons were asked for, one of them after all work."""
    evals = {name: settings for name, settings in policy().evals.items() if name != "calls"}
    mine: dict[str, Any] = {"reference": "b", "evals": evals, "tolerances": {TASK: policy().tolerances[TASK]}}
    with pytest.raises(SettingsError, match=r"new_line: \{was: \"a{12}\", now: \"e{12}\", why: ...\} stands for its "):
        check_loosening(policy().model_copy(update=mine), released, material=OTHER)
    with pytest.raises(SettingsError) as caught:
        check_loosening(policy(alpha=0.1), released, material=MATERIAL)
    assert "new_line" not in str(caught.value), "the model is the same"
    asked = policy(loosened={"new_line": LINE}).model_copy(update=mine)
    for material in (OTHER, {}):
        check_loosening(asked, released, material=material)
    path = released / RELEASE / PRODUCT / "manifest.json"
    manifest = json.loads(path.read_text()) | {"policy": asked.model_dump(mode="json")}
    manifest["reference"]["weights_digest"] = "e" * 64
    del manifest["evalsets"]["calls"]
    write_text(path, json.dumps(manifest))
    check_loosening(asked, released, material=OTHER)
    with pytest.raises(SettingsError, match=r"expected 'evals\.workflows\.cases' with a reason"):
        check_loosening(asked, released, material=OTHER | {"evals.workflows.cases": "1" * 64})


@pytest.mark.parametrize(
    ("reasons", "material", "said"),
    [
        ({"new_line": LINE}, MATERIAL, r"new_line: expected a reference of other weights than at the last release"),
        (
            {"new_line": LINE | {"was": "b"}},
            OTHER,
            r"new_line\.was: expected a{12}, the reference's weights in .*, got b;",
        ),
        (
            {"new_line": LINE | {"now": "b"}},
            OTHER,
            r"new_line\.now: expected e{12}, the reference's weights now, got b;",
        ),
        ({"new_line": LINE}, OTHER, r"expected 'alpha' with a reason, as it was 0\.05 .*set it back$"),
    ],
)
def test_a_new_line_lets_nothing_more_through(
    released: Path, reasons: dict[str, Any], material: dict[str, str], said: str
) -> None:
    """One more file beside the weights is another model, too: it must not be the key to every tolerance."""
    with pytest.raises(SettingsError, match=said):
        check_loosening(policy(alpha=0.1, loosened=reasons), released, material=material)


def test_a_wider_tolerance_of_an_eval_that_is_still_there_needs_its_own_reason(released: Path) -> None:
    wider = TOLERANCES | {CALLS: {"overall": 0.03}}
    with pytest.raises(SettingsError, match=rf"expected 'tolerances\.{CALLS}\.overall' with a reason"):
        check_loosening(policy(tolerances=wider, loosened={"new_line": LINE}), released, material=OTHER)
    reason = {"was": 0.02, "now": 0.03, "why": WHY}
    reasons = {"new_line": LINE, f"tolerances.{CALLS}.overall": reason}
    check_loosening(policy(tolerances=wider, loosened=reasons), released, material=OTHER)


def test_a_manifest_that_was_taken_away_is_not_a_first_release(released: Path) -> None:
    """Without it alone everything could be loosened, and no stage said a word."""
    folder = released / RELEASE / PRODUCT
    write_sums(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(EvidenceError, match=r"expected the manifest of the last release, found none beside its SHA256"):
        check_loosening(policy(alpha=0.1), released, material={})
