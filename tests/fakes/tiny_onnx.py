"""Writes .onnx files of a few operations, also such as no exporter writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT, UINT8, INT64, FLOAT16 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64, TensorProto.FLOAT16

Side = int | str  # an axis: fixed, or a name for any


def write_model(
    path: Path,
    nodes: Sequence[NodeProto],
    *,
    inputs: Mapping[str, tuple[int, Sequence[Side]]],
    outputs: Mapping[str, tuple[int, Sequence[Side]]],
    weights: Sequence[TensorProto] = (),
    opset: int = 17,
    domains: Sequence[str] = (),
) -> Path:
    """Write a model and return its path.

    Args:
        path: of the file.
        nodes: in order.
        inputs: type and shape by name.
        outputs: likewise.
        weights: of `make_weight`.
        opset: version of ONNX's own operators.
        domains: of other operators.
    """
    ends = [[helper.make_tensor_value_info(n, *kind) for n, kind in some.items()] for some in (inputs, outputs)]
    sets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    graph = helper.make_graph(nodes, "graph", *ends, initializer=weights)
    model: ModelProto = helper.make_model(graph, opset_imports=sets, ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def make_weight(name: str, values: NDArray[np.generic], *, file: Path | None = None) -> TensorProto:
    """Return a weight; with `file` its bytes are put there, beside the model."""
    tensor = numpy_helper.from_array(values, name)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=file.name)
    return tensor
