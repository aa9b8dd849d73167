"""Faster float32 linear layers on CPU: weights laid out once for oneDNN's own matrix product.

Torch multiplies float32 matrices with MKL. On CPUs of other makers than Intel, MKL leaves half of
their vector width unused; oneDNN, which torch ships too, does not. On such a machine a layer takes
half the time. A layer whose inputs compressed-tensors rounds has them rounded as before. Every packed layer is
checked against the original on random inputs. So a layer that does more (an adapter) keeps its own code.
Rounding differs in the last bits; which layers are packed is reported with the server's facts.

Not covered: half precision, which torch gives to oneDNN anyway, and training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipeline.products.text.serving.input_rounding import find_rounding

MAX_PACKED_BYTES = 1 << 30  # packing keeps a second copy of the weights: for small models only
TYPICAL_ROWS = 128  # the layout is tuned for about this many tokens at once
_TOLERANCE = 1e-4  # relative to the largest output


def pack_linear_layers(models: list[Any]) -> int:
    """Pack the linear layers of models that share their weights; return how many were packed.

    Args:
        models: copies of one model over the same tensors; each gets the same packed weights.
    """
    pairs = list(zip(*(model.modules() for model in models), strict=True))
    layers = [modules for modules in pairs if _can_be_packed(modules[0])]
    if sum(modules[0].weight.nbytes for modules in layers) > MAX_PACKED_BYTES:
        return 0
    return sum(_pack(modules) for modules in layers)


def _can_be_packed(module: Any) -> bool:
    return (
        type(module) is torch.nn.Linear
        and torch.backends.mkldnn.is_available()
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
    )


@torch.inference_mode()
def _pack(modules: tuple[Any, ...]) -> bool:
    layer = modules[0]
    try:
        # the operations that torch.compile uses for the same purpose; internal to torch, hence the guard
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL_ROWS)
        forward = partial(_multiply, packed=packed, bias=layer.bias, round_input=find_rounding(layer))
        sample = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(0))
        expected, got = layer(sample), forward(sample)
    except (AttributeError, RuntimeError):
        return False
    if (expected - got).abs().max() > _TOLERANCE * expected.abs().max():
        return False
    for module in modules:
        module.forward = forward
    return True


def _multiply(
    x: torch.Tensor,
    *,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    rounded = x if round_input is None else round_input(x)
    return torch.ops.mkldnn._linear_pointwise(rounded, packed, bias, "none", [], "")
