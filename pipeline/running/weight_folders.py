"""What the folders of pipelines and networks share: configs in JSON, and the record of a folder with weights.

Free of torch. What a language model's folder has beyond that, packed weights and a tokenizer, is in `checkpoints.py`
and the modules beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.records.digests import digest_files, digest_json
from pipeline.records.evaluations import Checkpoint
from pipeline.running.weight_files import TensorInfo

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config_file(path: Path, what: str, *, if_missing: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        what: it should be, for the message.
        if_missing: what to do when there is none.

    Raises:
        CheckpointError: no file, or no JSON object in it.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected {what}, found no file; {if_missing}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: expected {what}, got no JSON: {error}; copy the file again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected {what}, got {type(config).__name__}; copy the file again")
    return config


def build_checkpoint(
    folder: Path, tensors: Iterable[TensorInfo], *, root: Path, kind: str, format: str, parent_digest: str | None = None
) -> Checkpoint:
    """Return the record of a folder of unpacked weights.

    Args:
        folder: of the weights.
        tensors: all that it stores, from the headers.
        root: project root, which the record's path is relative to when the folder is inside it.
        kind: what it is.
        format: of the folder.
        parent_digest: digest of the folder that this one was made from.
    """
    stored = list(tensors)
    sizes: dict[str, int] = {}
    for info in stored:
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    main = max(sizes, key=lambda dtype: sizes[dtype], default="F32")  # a module may have no weights
    absolute, base = folder.resolve(), root.resolve()
    return Checkpoint(
        path=absolute.relative_to(base).as_posix() if absolute.is_relative_to(base) else str(absolute),
        kind=kind,
        format=format,
        dtype=_DTYPES.get(main, main),
        num_parameters=sum(info.num_elements for info in stored),
        num_bytes=sum(info.num_bytes for info in stored),
        digest=digest_json(files := digest_files(folder)),
        files=files,
        parent_digest=parent_digest,
    )
