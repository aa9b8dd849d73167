"""Writes .onnx files of a few operations by hand, field by field: no package for it, and files that no exporter writes.

Numbers of fields are those of onnx.proto3, the format's own description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FLOAT, UINT8, INT8, INT64, FLOAT16 = 1, 2, 3, 7, 10  # TensorProto.DataType
_TYPES = {"float32": FLOAT, "uint8": UINT8, "int8": INT8, "int64": INT64, "float16": FLOAT16}

Side = int | str  # an axis: fixed, or a name for any


def write_model(
    path: Path,
    nodes: Sequence[bytes],
    *,
    inputs: Mapping[str, tuple[int, Sequence[Side]]],
    outputs: Mapping[str, tuple[int, Sequence[Side]]],
    weights: Sequence[bytes] = (),
    opset: int = 17,
    domains: Sequence[str] = (),
) -> Path:
    """Write a model and return its path.

    Args:
        path: of the file.
        nodes: of `make_node`, in order.
        inputs: type and shape by name.
        outputs: likewise.
        weights: of `make_weight`.
        opset: version of ONNX's own operators.
        domains: of other operators.
    """
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"graph")
    graph += b"".join(_field(5, weight) for weight in weights)
    graph += b"".join(_field(11, _describe(name, *kind)) for name, kind in inputs.items())
    graph += b"".join(_field(12, _describe(name, *kind)) for name, kind in outputs.items())
    sets = [("", opset), *((domain, 1) for domain in domains)]
    model = _field(1, 8) + _field(7, graph)
    model += b"".join(_field(8, _field(1, domain.encode()) + _field(2, version)) for domain, version in sets)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model)
    return path


def make_node(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Sequence[int] | int
) -> bytes:
    """Return an operation on named tensors."""
    node = b"".join(_field(1, name.encode()) for name in inputs)
    node += b"".join(_field(2, name.encode()) for name in outputs) + _field(4, kind.encode())
    for name, value in attributes.items():
        held = _field(1, name.encode())
        if isinstance(value, int):
            held += _field(3, value) + _field(20, 2)
        else:
            held += b"".join(_field(8, one) for one in value) + _field(20, 7)
        node += _field(5, held)
    return node + (_field(7, domain.encode()) if domain else b"")


def make_weight(name: str, values: NDArray[np.generic], *, file: Path | None = None) -> bytes:
    """Return a weight; with `file` its bytes are put there, beside the model."""
    tensor = b"".join(_field(1, side) for side in values.shape) + _field(2, _TYPES[values.dtype.name])
    tensor += _field(8, name.encode())
    if file is None:
        return tensor + _field(9, values.tobytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(values.tobytes())
    place = _field(1, b"location") + _field(2, file.name.encode())
    return tensor + _field(13, place) + _field(14, 1)


def _describe(name: str, kind: int, shape: Sequence[Side]) -> bytes:
    sides = [_field(1, side) if isinstance(side, int) else _field(2, side.encode()) for side in shape]
    tensor = _field(1, kind) + _field(2, b"".join(_field(1, side) for side in sides))
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
