"""A server of the embedded engine whose GPU fails: `python -m tests.fakes.failing_launcher`, for tests without a GPU.

The variable FAILS_AT says where: while the checkpoint is loaded, in a forward pass of the generation thread, or in one
for scores. FAILS_WITH is what torch says. The requests by which an engine gets to know its server go well.
"""

from __future__ import annotations

import os
import sys
from typing import Any

for package in ("sklearn", "scipy"):  # as the launcher has it, which comes too late for the import below
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # an import of it fails

from pipeline.products.text.serving import generation, launcher, loading  # noqa: E402

load, score = loading.load_candidate, generation.score_sequences
WHERE, ERROR = os.environ["FAILS_AT"], RuntimeError(os.environ["FAILS_WITH"])
NUM_PASSES = 40  # of the generation thread: two answers of eight tokens, and the readiness check


def load_failing(*arguments: Any, **options: Any) -> Any:
    """Load a model that fails where it was told to."""
    if WHERE == "load":
        raise ERROR
    loaded = load(*arguments, **options)
    passes = iter(range(NUM_PASSES))

    def fail(*_: Any) -> None:
        if next(passes, None) is None:
            raise ERROR

    if WHERE == "chat":
        loaded.model.register_forward_pre_hook(fail)
    return loaded


def score_failing(model: Any, sequences: list[list[int]], **options: Any) -> Any:
    """Score the short sequence of the readiness check, and nothing else."""
    if WHERE == "score" and len(sequences[0]) > 3:
        raise ERROR
    return score(model, sequences, **options)


if __name__ == "__main__":
    loading.load_candidate, generation.score_sequences = load_failing, score_failing
    sys.exit(launcher.main(sys.argv[1:]))
