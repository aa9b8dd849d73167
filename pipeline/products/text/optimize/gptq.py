"""GPTQ: round weights column by column and let the columns to come make up for the error.

Reference: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization
for Generative Pre-trained Transformers", arXiv 2210.17323, algorithm 1. The algorithm is
llm-compressor's; `activation_order` is its static order, which changes no format and costs
nothing when serving.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evalsets.cards import Evalset
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import StepResult, quantize
from pipeline.products.text.settings import GptqStep


def run_gptq(source: Path, destination: Path, *, step: GptqStep, calibration_set: Evalset) -> StepResult:
    """Quantise a checkpoint with GPTQ; arguments and errors as in `quantize.quantize`."""

    def build_recipe(model: Any, plan: LayerPlan, log: StepLog) -> list[Any]:
        from pipeline.products.text.optimize.llm_compressor import gptq_recipe

        return gptq_recipe(step, plan, log, model=model)

    return quantize(source, destination, step=step, calibration_set=calibration_set, build_recipe=build_recipe)
