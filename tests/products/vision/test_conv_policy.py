"""Which convolution computes how: patterns, fallbacks, and networks that stay what they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from models.people.detector import open_detector
from pipeline.errors import NumericsError, SettingsError
from pipeline.numerics.winograd import direct_conv2d, winograd_conv2d
from pipeline.products.vision.conv_policy import (
    ConvArithmetic,
    EmulatedConv2d,
    Rule,
    apply_policy,
    can_run_winograd,
    list_convolutions,
    resolve_policy,
)
from tests.paths import ROOT

FOUR = ConvArithmetic(algorithm="winograd_f43", dtype="float16")
TWO = ConvArithmetic(algorithm="winograd_f23", dtype="bfloat16")
DIRECT, PLAIN = (ConvArithmetic(algorithm="direct", dtype=dtype) for dtype in ("float16", "float32"))


class OwnConv2d(nn.Conv2d):
    """Computes otherwise than Conv2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same"))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.body(self.stem(x))))


@pytest.fixture
def network() -> Network:
    return Network().eval()


def draw(channels: int = 3) -> torch.Tensor:
    return torch.randn(1, channels, 18, 22, generator=torch.Generator().manual_seed(1))


def make(**settings: Any) -> nn.Conv2d:
    torch.manual_seed(2)
    return nn.Conv2d(8, 8, **({"kernel_size": 3, "padding": 1} | settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"padding": 0}, ""),
        ({"padding": "same"}, ""),
        ({"padding": "valid"}, ""),
        ({"kernel_size": 1, "padding": 0}, "1x1 kernel"),
        ({"kernel_size": (3, 5)}, "3x5 kernel"),
        ({"stride": 2}, "stride 2"),
        ({"stride": (1, 2)}, "stride 1x2"),
        ({"dilation": 2}, "dilation 2"),
        ({"groups": 8}, "8 groups"),
        ({"padding_mode": "reflect"}, "padding mode reflect"),
        ({"padding": (1, 0)}, "padding 1x0"),
    ],
)
def test_a_convolution_that_winograd_cannot_do_runs_direct_and_says_why(
    settings: dict[str, Any], expected: str
) -> None:
    """A stride or a padding mode that is overlooked would give another picture, not an error."""
    network = nn.Sequential(make(**settings))
    found = resolve_policy(network, algorithm="winograd_f43", dtype="float16")
    reasons = [reason for _, reason in found.fallbacks]
    assert can_run_winograd(network[0]) == (not expected)
    assert reasons == ([f"{expected}: direct instead of winograd_f43"] if expected else [])
    assert found.layers == {"0": DIRECT if expected else FOUR}
    x, exact = draw(8), network(draw(8))
    apply_policy(network, found.layers)
    assert network(x).shape == exact.shape and (network(x) - exact).abs().max() < 5e-2
    apply_policy(network, {"0": PLAIN})
    assert torch.equal(network(x), exact)


def test_the_first_rule_that_matches_holds(network: Network) -> None:
    rules: list[Rule] = [(["body.2", "he*"], "direct", "float32"), (["body.*"], "winograd_f23", "bfloat16")]
    found = resolve_policy(network, algorithm="winograd_f43", dtype="float16", rules=rules)
    assert found.layers == {"stem": DIRECT, "body.0": TWO, "body.2": PLAIN, "head": PLAIN}
    assert dict(found.fallbacks) == {
        "stem": "stride 2: direct instead of winograd_f43",
        "up": "ConvTranspose2d is not covered: it runs as torch runs it",
    }


def test_nothing_falls_back_where_no_winograd_is_asked_for(network: Network) -> None:
    """A 1x1 convolution that was asked to run direct got what was asked."""
    rules: list[Rule] = [(["body.*"], "winograd_f43", "float32")]
    assert not resolve_policy(network, algorithm="direct", dtype="float32", rules=rules).fallbacks


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("bodi.*", r"^rules.1.layers.1: 'bodi.\*' matches no convolution; the nearest are body.2, body.0, "),
        ("body.1", "matches no convolution; the nearest are body.2, body.0"),
        ("up", "'up' matches up, a ConvTranspose2d, which a policy does not cover"),
    ],
)
def test_a_pattern_without_a_convolution_is_refused(network: Network, pattern: str, message: str) -> None:
    """It would leave the layer that it was meant for as the default has it, and nobody would see."""
    rules: list[Rule] = [(["stem"], "direct", "float16"), (["head", pattern], "direct", "float16")]
    with pytest.raises(SettingsError, match=message):
        resolve_policy(network, algorithm="winograd_f43", dtype="float16", rules=rules)


def test_a_policy_for_another_network_is_refused_whole(network: Network) -> None:
    """Half of a policy, applied before the name that is wrong, would be measured as if it were all of it."""
    with pytest.raises(SettingsError, match="'neck' matches no convolution"):
        apply_policy(network, {"body.0": FOUR, "neck": FOUR})
    with pytest.raises(NumericsError, match="stem: expected a 3x3 convolution with stride 1 for winograd_f43, got str"):
        apply_policy(network, {"body.0": FOUR, "stem": FOUR})
    assert not [m for m in network.modules() if isinstance(m, EmulatedConv2d)]


@torch.no_grad()
@pytest.mark.parametrize("arithmetic", [FOUR, TWO, DIRECT], ids=lambda a: f"{a.algorithm}-{a.dtype}")
def test_a_layer_computes_what_the_formula_says(arithmetic: ConvArithmetic) -> None:
    network, x = nn.Sequential(make(padding="same")), draw(8)
    weight, bias, dtype = network[0].weight, network[0].bias, getattr(torch, arithmetic.dtype)
    apply_policy(network, {"0": arithmetic})
    tile = {"winograd_f43": 4, "winograd_f23": 2}.get(arithmetic.algorithm)
    expected = (
        winograd_conv2d(x, weight, bias, tile=tile, dtype=dtype)
        if tile
        else direct_conv2d(x, weight, bias, dtype=dtype)
    )
    assert network(x).dtype == torch.float32 and torch.equal(network(x), expected)
    assert torch.equal(network(x[0]), expected[0])


@torch.no_grad()
def test_a_deep_copy_computes_with_its_own_weights(network: Network) -> None:
    """A closure over the first network's layers would go on reading their weights."""
    apply_policy(network, resolve_policy(network, algorithm="winograd_f43", dtype="float16").layers)
    before, copied = network(draw()), copy.deepcopy(network)
    assert torch.equal(copied(draw()), before)
    for parameter in network.parameters():
        parameter.zero_()
    assert torch.equal(copied(draw()), before)
    assert torch.equal(pickle.loads(pickle.dumps(copied))(draw()), before)


@torch.no_grad()
def test_names_weights_and_hooks_stay(network: Network) -> None:
    """Hooks from before and from after both see the output; weights load as before."""
    seen: list[torch.Tensor] = []
    network.body[0].register_forward_hook(lambda _m, _i, output: seen.append(output))
    plain = Network()
    apply_policy(network, {"body.0": FOUR, "head": DIRECT})
    network.body[0].register_forward_hook(lambda _m, _i, output: seen.append(output))
    network(draw())
    assert len(seen) == 2 and seen[0] is seen[1]
    assert list(network.state_dict()) == list(plain.state_dict()) and network.load_state_dict(plain.state_dict())
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(network.body[0], nn.Conv2d) and "winograd_f43 in float16" in repr(network)


@torch.no_grad()
def test_a_second_policy_replaces_the_first(network: Network) -> None:
    exact = network(draw())
    for arithmetic in (DIRECT, PLAIN):
        apply_policy(network, dict.fromkeys(list_convolutions(network), arithmetic))
    assert torch.equal(network(draw()), exact)


@torch.no_grad()
def test_autocast_does_not_reach_inside() -> None:
    """Under autocast F.conv2d would round what the emulation holds in float32: float32 would be bfloat16."""
    network, x = nn.Sequential(make()), draw(8)
    exact = network(x)
    apply_policy(network, {"0": PLAIN})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network(x), exact)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_convolutions_with_a_way_of_their_own_are_left_to_it() -> None:
    """Taken for plain ones they would lose their factor, and the weights that a parametrisation makes."""
    network = nn.Sequential(OwnConv2d(8, 8, 3), parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 8, 3))
    exact = network(draw(8))
    found = resolve_policy(network, algorithm="winograd_f43", dtype="float32")
    assert list(found.layers) == ["2"] and [layer for layer, _ in found.fallbacks] == ["0", "1"]
    apply_policy(network, found.layers)
    assert torch.allclose(network(draw(8)), exact, atol=1e-4)


@torch.no_grad()
def test_padding_is_that_of_its_mode() -> None:
    x, conv = draw(8), make(padding_mode="circular", padding=(2, 1))
    expected = F.conv2d(F.pad(x, (1, 1, 2, 2), mode="circular"), conv.weight, conv.bias)
    apply_policy(conv, {"": PLAIN})
    assert torch.equal(conv(x), expected)


def test_the_people_detector_has_sixteen_convolutions_for_winograd() -> None:
    network = open_detector(ROOT / "models/people")
    found = resolve_policy(network, algorithm="winograd_f43", dtype="float16")
    assert len(found.layers) == 26 and list(found.layers.values()).count(FOUR) == 16
    assert {reason.split(":")[0] for _, reason in found.fallbacks} == {"1x1 kernel", "stride 2"}


def test_a_rule_behind_one_that_takes_all_its_layers_is_refused(network: Network) -> None:
    """It never held, and a policy that was a no-op passed."""
    rules: list[Rule] = [(["*"], "direct", "float32"), (["stem"], "winograd_f23", "float16")]
    with pytest.raises(SettingsError, match="rules.1: every layer that it names is named by a rule before it"):
        resolve_policy(network, algorithm="winograd_f43", dtype="float16", rules=rules)
