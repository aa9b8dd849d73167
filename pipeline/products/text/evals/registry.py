"""Which function runs which kind of eval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pipeline.products.text.evals import harness, perplexity, tool_calls, trajectories
from pipeline.products.text.evals.context import EvalContext
from pipeline.records.evaluations import CaseRecord

EVALS: dict[str, Callable[[EvalContext], Awaitable[list[CaseRecord]]]] = {
    "perplexity": perplexity.evaluate,
    "harness": harness.evaluate,
    "tool_calls": tool_calls.evaluate,
    "trajectories": trajectories.evaluate,
}
