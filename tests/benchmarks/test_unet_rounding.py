"""What plain rounding leaves of a weight."""

from __future__ import annotations

import pytest
import torch

from benchmarks.unet_rounding import round_weight


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_a_channel_has_as_many_levels_as_its_bits_say(bits: int, levels: int) -> None:
    weight = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [100.0]])
    rounded = round_weight(weight, bits, None)
    step = weight.abs().amax(1, keepdim=True) / (levels // 2)
    assert all(len(row.unique()) <= levels for row in rounded), "each channel has a scale of its own"
    assert ((rounded - weight).abs() <= step / 2 * 1.001).all()


def test_smaller_groups_round_less_and_a_channel_that_they_do_not_divide_is_one() -> None:
    weight = torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    errors = [float((round_weight(weight, 4, group) - weight).square().mean()) for group in (None, 32)]
    assert errors[1] < errors[0]
    odd = weight[:, :3, :3, :3]  # 27 weights a channel
    assert torch.equal(round_weight(odd, 4, 32), round_weight(odd, 4, None))
