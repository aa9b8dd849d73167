"""What stages depend on: no kind can take the digest of the code out of it, and the order of settings counts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.products import inputs
from pipeline.products.params import load_params
from pipeline.running.stage_code import digest_code
from tests.paths import ROOT


def test_the_code_counts_whatever_a_kind_calls_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_inputs(*_: Any) -> dict[str, Any]:
        return {"evaluate": {"people": {"code": "forged", "cases": 1}}}

    monkeypatch.setattr(inputs, "_list_inputs", list_inputs)
    params = load_params(ROOT / "params.yaml")
    only = type(params)({"people": params.products["people"]})
    watched = inputs.digest_inputs(only, ROOT)["evaluate"]["people"]
    assert watched["code"] == digest_code("evaluate", "vision") and "cases" in watched


def test_another_first_tolerance_is_another_input() -> None:
    params = load_params(ROOT / "params.yaml")
    product = params.products["people"]
    tolerances = dict(reversed(product.gate.tolerances.items()))
    turned = product.model_copy(update={"gate": product.gate.model_copy(update={"tolerances": tolerances})})
    before, after = (
        inputs.digest_inputs(type(params)({"people": p}), ROOT)["compare"]["people"] for p in (product, turned)
    )
    assert before["code"] == after["code"] and before["settings"] != after["settings"]
