"""The activation watch against outputs kept by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.activation_watch import ActivationWatch, _find_absmax
from tests.fakes.tiny_vae import build_vae, draw_latents


class Doubler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Residual(nn.Module):
    """Its sum is the output of no leaf."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def watch_once(model: nn.Module, *inputs: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad(), ActivationWatch(model) as watch:
        for x in inputs:
            model(x)
    return watch.read()


def test_every_module_of_a_decoder_is_read_and_right() -> None:
    vae, latents = build_vae(channels=(16, 32)), draw_latents()
    kept: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: kept.setdefault(name, []).append(out))
        for name, module in vae.decoder.named_modules()
    ]
    found = watch_once(vae.decoder, *latents.split(1))
    for handle in handles:
        handle.remove()
    watched = {name for name, m in vae.decoder.named_modules() if not isinstance(m, (nn.SiLU, nn.Dropout))}
    assert set(found) == watched & set(kept)
    assert {"", "up_blocks.0", "up_blocks.0.resnets.0", "mid_block.attentions.0.to_v"} <= set(found)
    for name, value in found.items():
        assert value.absmax == max(out.abs().max().item() for out in kept[name])
        assert (value.calls, value.nonfinite_count, value.nonfinite_calls) == (2, 0, 0)


def test_a_residual_sum_is_seen() -> None:
    found = watch_once(Residual(nn.Sequential(Doubler())), torch.tensor([1.0, -5.0]))
    assert found["inner.0"].absmax == found["inner"].absmax == 10
    assert found[""].absmax == 15


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_by_element_and_call(bad: float) -> None:
    first, second = torch.ones(2, 3), torch.tensor([[bad, 1.0], [2.0, bad]])
    found = watch_once(Doubler(), first, second, first)[""]
    assert (found.nonfinite_count, found.nonfinite_calls, found.calls) == (2, 1, 3)
    assert found.absmax == math.inf and found.headroom_bits(torch.float32) == -math.inf


def test_an_overflow_of_float16_is_counted() -> None:
    found = watch_once(Doubler(), torch.tensor([4e4, 1.0], dtype=torch.float16))[""]
    assert found.nonfinite_count == 1


@pytest.mark.parametrize(("absmax", "headroom"), [(65504.0, 0), (65504 / 8, 3), (2 * 65504.0, -1), (0.0, math.inf)])
def test_headroom_counts_doublings(absmax: float, headroom: float) -> None:
    found = watch_once(Doubler(), torch.tensor([absmax / 2, -absmax / 4]))[""]
    assert found.headroom_bits(torch.float16) == headroom


def test_channels_last_and_negative_extremes_are_read() -> None:
    x = torch.randn(2, 8, 6, 4, generator=torch.Generator().manual_seed(0))
    x[1, 7, 5, 3] = -9
    found = watch_once(Doubler(), x.to(memory_format=torch.channels_last), x.transpose(2, 3))[""]
    assert (found.absmax, found.calls) == (18, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        [1.5, -2.5],
        [-1.0, -3.0],
        [-0.0, 0.0],
        [2.0, 1e-7],
        [math.inf, 1],
        [-math.nan, 1],
        [1.0, -math.inf],
        [math.nan, -math.inf],
        [6e4, -5e4],
    ],
    ids=str,
)
def test_the_largest_magnitude_by_bit_patterns_is_that_of_torch(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=dtype)
    found, expected = _find_absmax(x), x.abs().max().item()
    assert found == expected or not (math.isfinite(found) or math.isfinite(expected))


def test_other_outputs_and_modules_that_never_ran_are_left_out() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    assert watch_once(Pair(), torch.ones(2)) == {}


def test_hooks_are_gone_afterwards_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError), ActivationWatch(model):
        model(torch.ones(3))
    assert not any(module._forward_hooks for module in model.modules())


def test_numbers_add_up_over_blocks_and_entering_twice_is_refused() -> None:
    model = Doubler()
    watch = ActivationWatch(model, prefix="decoder")
    for value in (1.0, 3.0):
        with watch:
            model(torch.tensor([value]))
    assert (watch.read()["decoder"].absmax, watch.read()["decoder"].calls) == (6, 2)
    with watch, pytest.raises(NumericsError, match="already runs"):
        watch.__enter__()


def test_a_sampling_watch_still_sees_every_bad_run() -> None:
    model = Residual(nn.Sequential(Doubler()))
    with torch.no_grad(), ActivationWatch(model, every=3) as watch:
        for value in (1.0, 8.0, math.inf, 2.0, 9.0):
            model(torch.tensor([value]))
    found = watch.read()
    assert (found["inner.0"].calls, found["inner.0"].absmax, found["inner.0"].nonfinite_count) == (2, 4, 0)
    assert (found[""].calls, found[""].nonfinite_calls) == (5, 1)
    with pytest.raises(NumericsError, match="every=0"):
        ActivationWatch(model, every=0)


def test_what_an_accelerator_keeps_is_folded_alike() -> None:
    """The path without synchronisation, on the CPU: scalars instead of numbers."""
    watch = ActivationWatch(Doubler())
    tally = watch._tallies[""]
    for absmax in (3.0, math.nan, 1.0):
        tally.pending.append(torch.tensor(absmax, dtype=torch.float16))
        tally.calls += 1
    found = watch.read()[""]
    assert (found.absmax, found.nonfinite_count, found.nonfinite_calls, found.calls) == (math.inf, 1, 1, 3)
