"""What became looser since the last release needs a reason; what became stricter or is new needs none."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import EvidenceError, SettingsError
from pipeline.files import write_text
from pipeline.gate.loosening import check_loosening
from pipeline.gate.verdicts import describe_policy
from tests.synthetic_records import make_params

TASK, CALLS = "workflows/task_completion_rate", "calls/tool_call_exact_match"
TOLERANCES = {TASK: {"overall": 0.02, "buckets": {"hard": 0.05}}, CALLS: {"overall": 0.02}}
WHY = "the product asks for less since June"


def policy(**gate):
    return describe_policy(make_params(["a"], ["a"], **({"tolerances": TOLERANCES, "on_inconclusive": "block"} | gate)))


@pytest.fixture
def released(tmp_path):
    """A folder whose last release was judged by `policy()`."""
    write_text(tmp_path / "release/text/manifest.json", json.dumps({"policy": policy().model_dump(mode="json")}))
    return tmp_path


@pytest.mark.parametrize(("change", "key", "was"), [
    ({"tolerances": TOLERANCES | {CALLS: {"overall": 0.03}}}, f"tolerances.{CALLS}.overall", 0.02),
    ({"tolerances": TOLERANCES | {TASK: {"overall": 0.02, "buckets": {"hard": 0.06}}}},
     f"tolerances.{TASK}.buckets.hard", 0.05),
    ({"tolerances": TOLERANCES | {TASK: {"overall": 0.02}}}, f"tolerances.{TASK}.buckets.hard", 0.05),
    ({"tolerances": {TASK: TOLERANCES[TASK]}}, f"tolerances.{CALLS}", "gated"),
    ({"tolerances": TOLERANCES | {CALLS: {"overall": 0.02, "tier": "supporting"}}}, f"tolerances.{CALLS}.tier",
     "critical"),
    ({"alpha": 0.1}, "alpha", 0.05),
    ({"on_inconclusive": "warn"}, "on_inconclusive", "block"),
])  # fmt: skip
def test_a_looser_setting_needs_its_reason(released, change, key, was) -> None:
    with pytest.raises(SettingsError) as caught:
        check_loosening(policy(**change), released)
    assert f"gate.loosened: expected {key!r} with a reason" in str(caught.value)
    check_loosening(policy(**change, loosened={key: {"was": was, "why": WHY}}), released)
    with pytest.raises(SettingsError, match="was: expected"):
        check_loosening(policy(**change, loosened={key: {"was": 0.001, "why": WHY}}), released)


@pytest.mark.parametrize("change", [
    {}, {"alpha": 0.01}, {"tolerances": TOLERANCES | {CALLS: {"overall": 0.01}, "choices/accuracy": {"overall": 0.5}}},
])
def test_stricter_and_new_settings_need_none(released, change) -> None:
    check_loosening(policy(**change), released)


def test_nothing_is_compared_before_a_first_release_and_a_broken_manifest_is_named(tmp_path) -> None:
    check_loosening(policy(alpha=0.2), tmp_path)
    write_text(tmp_path / "release/text/manifest.json", "{")
    with pytest.raises(EvidenceError, match=r"release/text/manifest.json: expected the manifest of a release"):
        check_loosening(policy(), tmp_path)
