"""The folder of a network: config.json, and weights in safetensors. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.digests import digest_files, digest_json
from pipeline.errors import CheckpointError
from pipeline.records import Checkpoint
from pipeline.weight_files import read_tensors

CONFIG_FILE = "config.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: no folder, no file, or no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected the network's config, found no file; correct the path") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}; copy the file again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(config).__name__}; copy the file again")
    return config


def describe_folder(folder: Path, *, root: Path, kind: str) -> Checkpoint:
    """Check a network's folder and describe it as a record.

    Args:
        folder: with config.json and safetensors.
        root: project root, which the record's path is relative to when the folder is inside it.
        kind: what it is.

    Raises:
        CheckpointError: no weights, pickle weights, or a damaged file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json and model.safetensors, found none")
    tensors = list(read_tensors(folder).values())
    sizes: dict[str, int] = {}
    for info in tensors:
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    main = max(sizes, key=lambda dtype: sizes[dtype], default="F32")  # a module may have no weights
    absolute, base = folder.resolve(), root.resolve()
    return Checkpoint(
        path=absolute.relative_to(base).as_posix() if absolute.is_relative_to(base) else str(absolute),
        kind=kind, format="dense", dtype=_DTYPES.get(main, main),
        num_parameters=sum(info.num_elements for info in tensors), num_bytes=sum(info.num_bytes for info in tensors),
        digest=digest_json(files := digest_files(folder)), files=files,
    )  # fmt: skip
