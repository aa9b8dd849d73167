"""Read back what was built of a candidate, and how its steps have it run.

One that params.yaml asks something else of by now is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import EvidenceError
from pipeline.records.evaluations import BuiltCandidate
from pipeline.records.record_files import Record, read_record

S = TypeVar("S", bound=Record)


def fold_steps(built: BuiltCandidate, plain: S) -> S:
    """Return how a candidate is run: the serving config of one without steps, and what its own changed of it."""
    changes = {key: value for step in built.steps for key, value in step.get("serving", {}).items()}
    return type(plain).model_validate(plain.model_dump() | changes)


def read_built(build: Path, name: str, asked: Sequence[dict[str, Any]]) -> BuiltCandidate:
    """Return a candidate's record; what it says of a step is more than was asked.

    Args:
        build: folder of a product's results.
        name: of the candidate.
        asked: its steps in params.yaml, as JSON.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    path = build / "candidates" / name / "candidate.json"
    built = read_record(path, BuiltCandidate)
    if built.name != name:
        raise EvidenceError(f"{path}: expected candidate {name!r}, found {built.name!r}; run `dvc repro`")
    kinds = [[step["kind"] for step in steps] for steps in (asked, built.steps)]
    if kinds[0] != kinds[1]:
        raise EvidenceError(f"{path}: expected steps {kinds[0]}, as params.yaml asks, got {kinds[1]}; run `dvc repro`")
    for i, (step, record) in enumerate(zip(asked, built.steps, strict=True)):
        for key, value in step.items():
            if record.get(key) != value:
                raise EvidenceError(
                    f"{path}: steps.{i}.{key}: expected {value!r}, as params.yaml asks, got "
                    f"{record.get(key)!r}; run `dvc repro`"
                )
    return built
