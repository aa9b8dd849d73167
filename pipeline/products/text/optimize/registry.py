"""Step kind -> the function that runs it; the kinds are the members of the union `Step` in `settings.py`."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.products.text.optimize.quantize import StepResult, quantize
from pipeline.products.text.optimize.speculative import run_speculative

STEPS: dict[str, Callable[..., StepResult]] = {
    "quantize": quantize,
    "speculative": run_speculative,
}
