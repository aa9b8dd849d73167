"""Speculative decoding: a step that rewrites how a candidate is served, never its weights.

Greedy only: a drafted token counts when it is the target's own choice, so nothing but rounding can
change an answer. Prompt lookup drafts from the prompt's own n-grams. A draft model is served from
its folder; its digest goes into the candidate's record, and so into the fingerprint.

Reference: Leviathan, Kalman, Matias 2022, "Fast Inference from Transformers via Speculative
Decoding", arXiv 2211.17192.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.drafts import check_draft
from pipeline.products.text.optimize.quantize import StepResult
from pipeline.products.text.step_settings import SpeculativeStep
from pipeline.records.speculation import SpeculativeConfig
from pipeline.running.hub import locate_checkpoint
from pipeline.running.weight_files import check_finite, iterate_weights


def run_speculative(source: Path, *, step: SpeculativeStep, root: Path) -> StepResult:
    """Check the draft model and describe how to serve with it.

    Args:
        source: the target's checkpoint.
        step: method, number of drafted tokens and the draft's checkpoint.
        root: project root, which a folder is relative to.

    Raises:
        CheckpointError: the draft is broken or does not speak the target's tokens.
    """
    config = SpeculativeConfig(method=step.method, num_tokens=step.num_speculative_tokens, options=step.options)
    if step.draft is not None:
        folder = locate_checkpoint(step.draft, root)
        check_draft(folder, target=source)
        draft = read_checkpoint(folder, root=root, reference=step.draft)
        check_finite(iterate_weights(folder), where=folder)
        config = config.model_copy(update={"draft_digest": draft.digest, "draft_path": draft.path})
    return StepResult(coverage=(), fallbacks=(), record=step.build_record(), speculative=config)
