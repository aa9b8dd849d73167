"""First turns of cases that were evaluated: what the benchmark and the drift check ask again, outside of an eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.evals.calls import openai_tools
from pipeline.evalsets import Evalset, load_evalset
from pipeline.params import ToolCallsEval, TrajectoriesEval
from pipeline.records import EvalFile

ChatEval = ToolCallsEval | TrajectoriesEval


def load_evaluated(settings: ChatEval, file: EvalFile, root: Path) -> Evalset:
    """Load the evalset of an eval that chats, as it was when it was evaluated.

    Raises:
        EvidenceError: it was edited since.
    """
    evalset = load_evalset(root / settings.evalset)
    if evalset.digest != file.evalset_digest:
        raise EvidenceError(f"{root / settings.evalset}: expected the cases that were evaluated, found others; run "
                            "`dvc repro`")
    return evalset


def declare_tools(evalset: Evalset, settings: ChatEval) -> list[dict[str, Any]] | None:
    """Return the tools that requests of an eval carry, None when they carry none."""
    return openai_tools(evalset.card.tools) if settings.send_tools else None
