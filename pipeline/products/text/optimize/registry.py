"""Step kind -> the function that runs it; the kinds are the members of the union `Step` in `settings.py`."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.products.text.optimize.awq import run_awq
from pipeline.products.text.optimize.gptq import run_gptq
from pipeline.products.text.optimize.quantize import StepResult
from pipeline.products.text.optimize.speculative import run_speculative

STEPS: dict[str, Callable[..., StepResult]] = {
    "gptq": run_gptq,
    "awq": run_awq,
    "speculative": run_speculative,
}
