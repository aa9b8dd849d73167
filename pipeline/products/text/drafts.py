"""Draft models for speculative decoding, as files: does a draft fit its target?

Not covered: a draft with another tokenizer than the target's.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.products.text.checkpoints import embedding_rows
from pipeline.records.digests import digest_file

TOKENIZER = "tokenizer.json"


def check_draft(draft: Path, *, target: Path) -> None:
    """Refuse a draft whose tokens are not the target's.

    Raises:
        CheckpointError: no folder, another tokenizer, or an embedding of another size.
    """
    if not draft.is_dir():
        raise CheckpointError(f"{draft}: expected the draft's checkpoint folder, found none; correct the path")
    for folder in (draft, target):
        if not (folder / TOKENIZER).is_file():
            raise CheckpointError(f"{folder / TOKENIZER}: expected a file that draft and target share, found none")
    if digest_file(draft / TOKENIZER) != digest_file(target / TOKENIZER):
        raise CheckpointError(
            f"{draft / TOKENIZER}: expected the same bytes as {target / TOKENIZER}, found others; a "
            "draft must use the target's tokenizer"
        )
    rows, expected = embedding_rows(draft), embedding_rows(target)
    if rows != expected:
        raise CheckpointError(
            f"{draft}: expected an embedding of {expected} tokens, as the target has, got {rows}; "
            "use a draft of the same vocabulary"
        )
