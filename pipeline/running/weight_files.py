"""Read safetensors files: names, types and shapes from their headers, and values one at a time.

A header is a few kilobytes of JSON, so a checkpoint of any size is inspected in milliseconds and
without torch. A file is checked against its header, and a sharded checkpoint against its index.
Pickle weights are never opened: unpickling runs code.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file, from its header."""

    dtype: str  # as the format spells it: "F32", "BF16", "I32", ...
    shape: tuple[int, ...]
    num_bytes: int
    file: str

    @property
    def num_elements(self) -> int:
        """Number of stored elements (a packed tensor holds several weights in each)."""
        return math.prod(self.shape)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Read the headers of all safetensors files of a checkpoint, sharded or not.

    Raises:
        CheckpointError: pickle weights only, no weights, both a whole file and an index, or a damaged or missing file.
    """
    if (folder / WEIGHTS_FILE).is_file() and (folder / INDEX_FILE).is_file():
        whole = read_header(folder / WEIGHTS_FILE)
        if _read_weight_map(folder / INDEX_FILE) == dict.fromkeys(whole, WEIGHTS_FILE):  # as some tools write it
            return whole
        raise CheckpointError(
            f"{folder}: expected {WEIGHTS_FILE} or {INDEX_FILE}, found both, and engines differ in which one they "
            "load; remove one with its files"
        )
    if (folder / WEIGHTS_FILE).is_file():
        return read_header(folder / WEIGHTS_FILE)
    if (folder / INDEX_FILE).is_file():
        return read_shards(folder / INDEX_FILE)
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{folder}: expected safetensors weights, found pickle weights {pickles[0]!r}, which run code when "
            "opened; convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: expected {WEIGHTS_FILE} or {INDEX_FILE}, found neither")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read one safetensors header and check that the file holds the bytes it promises, and that the library reads it.

    Raises:
        CheckpointError: names the file, and what is wrong with it, such as tensors that overlap.
    """
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file, or cut short at {size} bytes; copy it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(entry, path.name) for name, entry in header.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path}: the safetensors header is damaged; copy the file again") from None
    if end != size:
        raise CheckpointError(f"{path}: its header promises {end} bytes, the file has {size}; copy it again")
    try:
        with safe_open(path, framework="np"):
            return tensors
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: safetensors refuses the file: {error}; copy it again, or write it by safetensors"
        ) from None


def iterate_weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and torch tensor of every weight, one at a time."""
    with open_weights(folder) as read:
        for name in read_tensors(folder):
            yield name, read(name)


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Open all files of a checkpoint, and give a function that returns a tensor by its name.

    A tensor is mapped from its file: what is never looked at is never read, and nothing is copied.
    """
    from safetensors import safe_open

    files = {name: tensor.file for name, tensor in read_tensors(folder).items()}
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in sorted(set(files.values()))
        }
        yield lambda name: opened[files[name]].get_tensor(name)


def read_tensor(folder: Path, info: TensorInfo, name: str) -> Any:
    """Return one torch tensor of a checkpoint."""
    from safetensors import safe_open

    with safe_open(folder / info.file, framework="pt") as opened:
        return opened.get_tensor(name)


def check_finite(tensors: Iterable[tuple[str, Any]], *, where: object) -> None:
    """Refuse NaN and infinity in named torch tensors; integers are finite by type.

    Raises:
        CheckpointError: names the first such tensor and how many of its values are broken.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            continue
        if not _is_finite(tensor):
            bad = int((~tensor.float().isfinite()).sum())
            raise CheckpointError(
                f"{where}: tensor {name!r} has {bad} NaN or infinite values of {tensor.numel()}; "
                "make the checkpoint again"
            )


# of floats of eight bits, without their sign: from here on they stand for NaN or infinity
_FIRST_BROKEN = {"torch.float8_e4m3fn": 0x7F, "torch.float8_e5m2": 0x7C}


def _is_finite(values: Any) -> bool:
    """Whether all values are finite: the least and the largest are NaN where one is, and take one pass and no copy."""
    if values.numel() == 0:
        return True
    if values.element_size() > 1:
        return all(math.isfinite(bound) for bound in values.aminmax())
    import torch  # which compares no floats of eight bits

    if (first := _FIRST_BROKEN.get(str(values.dtype))) is None:
        return _is_finite(values.float())
    return int((values.view(torch.uint8) & 0x7F).amax()) < first


def _tensor_info(entry: dict[str, Any], file: str) -> TensorInfo:
    start, end = entry["data_offsets"]
    return TensorInfo(dtype=entry["dtype"], shape=tuple(entry["shape"]), num_bytes=end - start, file=file)


def read_shards(path: Path) -> dict[str, TensorInfo]:
    """Read the headers of the shards that an index names, and check them against it."""
    folder, weight_map = path.parent, _read_weight_map(path)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(f"{path}: names the shard {file!r}, which is not in the folder; copy it again")
        header = read_header(folder / file)
        if twice := next((name for name in header if name in tensors), None):
            raise CheckpointError(
                f"{path}: expected tensor {twice!r} in one shard, found it in {tensors[twice].file!r} and {file!r}, "
                "and loaders differ in which one they take; write the shards again"
            )
        tensors |= header
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(f"{path}: expected tensor {name!r} in {file!r}, it is not there; copy both again")
    return tensors


def _read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index has it."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: expected JSON with a `weight_map`; copy the file again") from None
