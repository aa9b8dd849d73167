"""The calibrated policy: what it keeps on numbers known by hand, and on the detector that F(4,3) breaks."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evalsets.make.scenes import render
from models.make.imbalance_people import BRANCH
from models.make.train_people import TRAIN
from models.people.detector import open_detector, preprocess
from pipeline.errors import NumericsError
from pipeline.numerics.winograd import winograd_conv2d
from pipeline.products.vision.conv_policy import ConvArithmetic, apply_policy, list_convolutions, resolve_policy
from pipeline.products.vision.proposal import LayerProposal, find_saved_fraction, make_policy, propose_policy
from tests.paths import ROOT


def draw(channels: int = 16, size: int = 16, num: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, channels, size, size, generator=generator) for _ in range(num)]


def make(channels: int = 16, *, kernel_size: int = 3, stride: int = 1) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(channels, channels, kernel_size, stride=stride, padding=kernel_size // 2)


def chequer(scale: float) -> torch.Tensor:
    """A tile that F(4,3)'s input transform makes 100 times larger, and F(2,3)'s 4 times."""
    signs = torch.tensor([1.0, 0, -1, 0, 1, 0])
    return scale * torch.outer(signs, signs).view(1, 1, 6, 6)


def propose_for(x: torch.Tensor, **settings: float) -> LayerProposal:
    conv = nn.Conv2d(1, 1, 3, bias=False)
    nn.init.constant_(conv.weight, 1e-2)
    return propose_policy(nn.Sequential(conv), [x], dtype="float16", max_relative_error=1.0, **settings)[0]


@pytest.mark.parametrize(
    ("scale", "algorithm", "dtype", "reason"),
    [
        (300, "winograd_f43", "float16", "F(4,3) leaves 1.1 doublings, error "),
        (
            400,
            "winograd_f23",
            "float16",
            "F(4,3)'s input transform reaches 40,000, 0.7 doublings below float16's end of "
            "65,504; F(2,3) leaves 5.4 doublings, error ",
        ),
        (
            1000,
            "winograd_f23",
            "float16",
            "F(4,3)'s input transform reaches 100,000, float16 ends at 65,504; F(2,3) lea",
        ),
        (
            10_000,
            "direct",
            "float16",
            "F(4,3)'s input transform reaches 1,000,000, float16 ends at 65,504; F(2,3)'s input "
            "transform reaches 40,000, 0.7 doublings below float16's end of 65,504; direct in float16 leaves 2.7 "
            "doublings",
        ),
        (
            50_000,
            "direct",
            "bfloat16",
            "direct's input reaches 50,000, 0.4 doublings below float16's end of 65,504; direct in bfloat16 leaves ",
        ),
        (
            70_000,
            "direct",
            "bfloat16",
            "direct's input reaches 70,000, float16 ends at 65,504; direct in bfloat16 leaves ",
        ),
    ],
)
def test_range_decides_between_algorithms_and_dtypes(scale: float, algorithm: str, dtype: str, reason: str) -> None:
    """A maximum taken from inputs alone would keep F(4,3) until its transform overflows on the next picture."""
    found = propose_for(chequer(scale))
    assert (found.algorithm, found.dtype) == (algorithm, dtype)
    assert reason in found.reason
    assert found.numbers["winograd_f43 float16"]["largest"] == 100 * scale
    assert found.numbers["direct float16"]["largest"] == scale


def test_the_headroom_is_a_setting() -> None:
    assert propose_for(chequer(400), min_headroom_bits=0.5).algorithm == "winograd_f43"
    assert propose_for(chequer(300), min_headroom_bits=2).algorithm == "winograd_f23"


def test_an_overflow_on_one_image_of_many_counts() -> None:
    """The last image's numbers, or a mean, would not show it."""
    conv = make(1)
    images = [chequer(1), chequer(1000), chequer(1)]
    found = propose_policy(nn.Sequential(conv), iter(images), dtype="float16", max_relative_error=1.0)[0]
    assert found.algorithm != "winograd_f43" and found.numbers["winograd_f43 float16"]["nonfinite_count"] > 0


@pytest.mark.parametrize(
    ("limit", "algorithm", "reason"),
    [
        (0.1, "winograd_f43", "leaves 12[0-9.]+ doublings, error 3[0-9.]* %"),
        (0.01, "winograd_f23", r"F\(4,3\)'s error is 3[0-9.]* %, over 1 %; F\(2,3\) leaves "),
        (0.001, "direct", "; direct in bfloat16 leaves "),
    ],
)
def test_error_decides_where_range_does_not(limit: float, algorithm: str, reason: str) -> None:
    """The direct sum's own error in bfloat16 is over the last limit: no algorithm above twice that is kept for it."""
    found = propose_policy(nn.Sequential(make()), draw(), dtype="bfloat16", max_relative_error=limit)[0]
    errors = [found.numbers[f"{name} bfloat16"]["relative_error"] for name in ("direct", "winograd_f23")]
    assert 0.001 < errors[0] < errors[1] / 2
    assert (found.algorithm, found.dtype) == (algorithm, "bfloat16")
    assert re.search(reason, found.reason)


@torch.no_grad()
def test_a_layer_is_tried_on_its_own_float32_input() -> None:
    """On the input that the layers before it give in float16, it would answer for their errors."""
    network, images = nn.Sequential(make(), nn.ReLU(inplace=True), make()), draw()
    found = propose_policy(network, images, dtype="float16")[1]
    given = torch.cat([network[:2](x) for x in images])
    exact = F.conv2d(given, network[2].weight, network[2].bias, padding=1)
    other = winograd_conv2d(given, network[2].weight, network[2].bias, tile=4, dtype=torch.float16)
    expected = ((other - exact).norm() / exact.norm()).item()
    assert found.numbers["winograd_f43 float16"]["relative_error"] == pytest.approx(expected, rel=1e-3)


def test_other_convolutions_get_a_dtype_that_holds_them() -> None:
    """A policy's dtype is that of 1x1 convolutions, too: left out, the proposal would let them overflow."""
    network = nn.Sequential(make(kernel_size=1), make(stride=2))
    with torch.no_grad():
        network[0].weight.mul_(1e6)
        network[1].weight.mul_(1e-6)
    found = propose_policy(network, draw(), dtype="float16")
    assert [(p.algorithm, p.dtype, p.can_run_winograd) for p in found] == [("direct", "bfloat16", False)] * 2
    assert found[0].reason.startswith("1x1 kernel; direct's output reaches ")
    assert found[1].reason.startswith("stride 2; direct's input reaches ")


def test_multiplications_are_those_of_whole_tiles() -> None:
    """Half-filled tiles cost as much as full ones; 17 pixels need five tiles of four."""
    network = nn.Sequential(make(kernel_size=1), make())
    for size, num_tiles in ((16, 4), (17, 5)):
        found = propose_policy(network, draw(size=size), dtype="float32")
        assert [p.algorithm for p in found] == ["direct", "winograd_f43"]
        direct = [2 * size**2 * 256, 2 * size**2 * 256 * 9]
        kept = [direct[0], 2 * num_tiles**2 * 36 * 256]
        assert [p.direct_multiplications for p in found] == direct and [p.multiplications for p in found] == kept
        assert find_saved_fraction(found) == pytest.approx(1 - sum(kept) / sum(direct))


def test_a_layer_that_no_image_reaches_stays_as_it_is() -> None:
    """Nothing is known of its range."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = make(), make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.used(x))  # a layer that runs twice is tried on both

    found = {p.layer: p for p in propose_policy(Half(), draw(), dtype="float16")}
    assert (found["unused"].algorithm, found["unused"].dtype) == ("direct", "float32")
    assert "no calibration image reached it" in found["unused"].reason
    assert found["used"].direct_multiplications == 2 * 2 * 16**2 * 256 * 9


def test_the_network_is_left_as_it_was() -> None:
    network = nn.Sequential(make())
    before = network(draw()[0])
    found = propose_policy(network, draw(), dtype="float16")
    assert torch.equal(network(draw()[0]), before) and not network[0]._forward_hooks
    assert json.loads(json.dumps(found[0].numbers, allow_nan=False)) == found[0].numbers


@pytest.mark.parametrize(
    ("images", "message"),
    [([], "one calibration image or more"), ([torch.full((1, 16, 8, 8), torch.nan)], "^0: expected finite numbers")],
)
def test_calibration_without_numbers_is_refused(images: list[torch.Tensor], message: str) -> None:
    with pytest.raises(NumericsError, match=message):
        propose_policy(nn.Sequential(make()), images, dtype="float16")


@torch.no_grad()
def test_on_people_hard_it_leaves_the_algorithm_that_breaks_the_branch_for_small_people() -> None:
    """Uniform F(4,3) in float16 gives NaN there; every other layer can keep it."""
    images = [preprocess(torch.from_numpy(render(np.random.default_rng([1, TRAIN, i])).pixels)[None]) for i in range(2)]
    found = propose_policy(open_detector(ROOT / "models/people-hard"), images, dtype="float16")
    slow = {p.layer for p in found if p.can_run_winograd and p.algorithm != "winograd_f43"}
    assert slow and all(name.startswith(f"branches.{BRANCH}.") for name in slow)
    is_finite = []
    for policy in (
        make_policy(found),
        resolve_policy(open_detector(ROOT / "models/people-hard"), algorithm="winograd_f43", dtype="float16").layers,
    ):
        network = open_detector(ROOT / "models/people-hard")
        assert list(policy) == list(list_convolutions(network))
        apply_policy(network, policy)
        is_finite.append(all(bool(out.isfinite().all()) for x in images for out in network(x)))
    assert is_finite == [True, False]
    assert ConvArithmetic(algorithm="winograd_f43", dtype="float16") in make_policy(found).values()
