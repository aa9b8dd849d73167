"""Three products of parts say what one in float32 does, though each of them reads TF32's ten bits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.numerics import split_products
from pipeline.numerics.split_products import SplitProducts, convolve, normalize, split

CONV2D = torch.conv2d  # as it is before a test replaces it


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cut(values: torch.Tensor) -> torch.Tensor:
    """Read float32 as tensor cores do that cut off."""
    return (values.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def convolve_tf32(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
    return CONV2D(cut(x), cut(weight), *more)


def far(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).abs().max() / exact.std())


def test_the_parts_of_a_number_sum_to_it_and_are_ones_that_tf32_holds() -> None:
    values = draw(2, 8, 5, 7) * 10.0 ** torch.arange(-20, 20, 5).view(1, 8, 1, 1)
    high, low = split(values)
    assert torch.equal(high + low, values)
    assert torch.equal(cut(high), high)
    assert ((low - cut(low)).abs() <= values.abs() * 2.0**-20).all()
    assert high.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "more", [(None, 1, 1), (draw(12, seed=3), 2, 0), (None, 1, "same", 2), (draw(12, seed=3), 1, 1, 1, 4)]
)
def test_a_convolution_by_parts_is_far_nearer_than_tf32(monkeypatch: pytest.MonkeyPatch, more: tuple[Any, ...]) -> None:
    groups = more[4] if len(more) == 5 else 1
    x, weight = draw(2, 32, 20, 24), draw(12, 32 // groups, 3, 3, seed=1)
    exact = CONV2D(x.double(), weight.double(), *(v.double() if isinstance(v, torch.Tensor) else v for v in more))
    monkeypatch.setattr(torch, "conv2d", convolve_tf32)
    assert far(convolve(x, weight, *more), exact) < 3e-6
    assert far(convolve_tf32(x, weight, *more), exact) > 3e-4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_group_norm_is_torchs_in_any_memory_format(memory_format: torch.memory_format) -> None:
    x = draw(2, 12, 6, 10, scale=30).add(5).contiguous(memory_format=memory_format)
    weight, bias = draw(12, seed=1), draw(12, seed=2)
    ours = normalize(x, 4, weight, bias, 1e-6)
    torch.testing.assert_close(ours, functional.group_norm(x, 4, weight, bias, 1e-6), atol=1e-5, rtol=1e-5)
    assert ours.is_contiguous(memory_format=memory_format)
    flat = x.flatten(2)  # as the attention of a decoder norms it
    torch.testing.assert_close(normalize(flat, 3), functional.group_norm(flat, 3), atol=1e-5, rtol=1e-5)


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 1)).eval()


@torch.inference_mode()
def test_nothing_changes_where_no_gpu_gains() -> None:
    network, x = build_network(), draw(1, 4, 8, 8)
    wanted = network(x)
    with SplitProducts():
        assert torch.equal(network(x), wanted)


@torch.inference_mode()
def test_both_are_replaced_on_a_gpu_that_gains_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, seen = build_network(), draw(1, 4, 8, 8), []
    wanted = network(x)

    def note(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return CONV2D(x, weight, *more)

    monkeypatch.setattr(torch, "conv2d", note)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(split_products, "_is_fast", lambda device: True)
    with SplitProducts():
        close = network(x)
        in_half = network.bfloat16()(x.bfloat16())
    torch.testing.assert_close(close, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.equal(close, wanted)
    assert seen == [True] * 6
    assert not torch.backends.cudnn.allow_tf32
    assert torch.equal(in_half, network(x.bfloat16()))


def test_calls_that_no_module_makes_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_products, "_is_fast", lambda device: True)
    x, weight = draw(2, 4, 8, 8), draw(6, 4, 3, 3, seed=1)
    convolved, normed = CONV2D(x, weight), functional.group_norm(x, 2)
    with SplitProducts():
        assert torch.equal(functional.conv2d(input=x, weight=weight), convolved)
        torch.testing.assert_close(functional.conv2d(x[0], weight), convolved[0])
        assert functional.group_norm(x[:0], 2).shape == (0, 4, 8, 8)
        torch.testing.assert_close(functional.group_norm(input=x, num_groups=2), normed)
        with pytest.raises(RuntimeError, match="type"):
            functional.conv2d(x, weight.half())
