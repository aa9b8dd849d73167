"""AWQ: scale the input channels that carry large activations before rounding to nearest.

Reference: Lin, Tang, Tang, Yang, Dang, Gan, Han 2023, "AWQ: Activation-aware Weight Quantization",
arXiv 2306.00978, section 3.2. The search is llm-compressor's. A layer that no scale fits (an
output projection behind grouped-query attention, for one) is rounded without: a fallback.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evalsets.cards import Evalset
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import StepResult, quantize
from pipeline.products.text.settings import AwqStep


def run_awq(source: Path, destination: Path, *, step: AwqStep, calibration_set: Evalset) -> StepResult:
    """Quantise a checkpoint with AWQ; arguments and errors as in `quantize.quantize`."""

    def build_recipe(model: Any, plan: LayerPlan, log: StepLog) -> list[Any]:
        from pipeline.products.text.optimize.llm_compressor import awq_recipe

        return awq_recipe(step, plan, log)

    return quantize(source, destination, step=step, calibration_set=calibration_set, build_recipe=build_recipe)
