"""Errors and ranges of layers against sums done by hand."""

from __future__ import annotations

import copy
import json
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import EngineError, NumericsError
from pipeline.products.vision import layer_numerics
from pipeline.products.vision.conv_policy import ConvArithmetic, apply_policy
from pipeline.products.vision.layer_numerics import LayerNumerics, build_layer_notes, compare_layers


def compare(reference: nn.Module, candidate: nn.Module, inputs: Any, **named: Any) -> dict[str, Any]:
    """Run both modules on the same inputs."""
    runs = [(partial(reference, x), partial(candidate, x)) for x in inputs]
    return compare_layers(reference, candidate, runs, **named)


def build(*, in_place: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(in_place),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(2),
        nn.Linear(256, 5),
    ).eval()


def draw(num: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 3, 8, 8, generator=generator) * (i + 1) for i in range(num)]


def spoil(network: nn.Module, where: object, value: float) -> nn.Module:
    """Put a value into the first layer's output."""
    spoilt = copy.deepcopy(network)

    def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output[where] = value

    spoilt[0].register_forward_hook(hook)
    return spoilt


@torch.no_grad()
def test_the_error_is_the_rms_over_all_inputs() -> None:
    """A mean of each input's own ratio weighs a dark picture like a bright one."""
    reference, candidate, inputs = build(), build(), draw()
    candidate[0].weight.mul_(1.01)
    found = compare(reference, candidate, inputs, dtypes={"0": torch.float16})
    exact, other = (torch.cat([n[0](x) for x in inputs]).double() for n in (reference, candidate))
    assert list(found) == ["0", "2", "4"]
    assert found["0"].relative_error == pytest.approx(((other - exact).norm() / exact.norm()).item(), rel=1e-9)
    assert found["0"].absmax == other.abs().max().item() and found["0"].nonfinite_count == 0
    assert found["0"].headroom_bits == pytest.approx(math.log2(65504 / found["0"].absmax))
    assert found["2"].headroom_bits > 100


def test_the_error_of_a_layer_carries_on_to_those_behind_it() -> None:
    """An error of each layer on the reference's inputs would be zero behind the one that rounds."""
    reference, candidate = build(), build()
    apply_policy(candidate, {"0": ConvArithmetic(algorithm="winograd_f43", dtype="bfloat16")})
    found = compare(reference, candidate, draw(), dtypes={})
    assert all(1e-3 < numerics.relative_error < 0.2 for numerics in found.values())
    same = compare(reference, build(), draw(), dtypes={})
    assert {numerics.relative_error for numerics in same.values()} == {0.0}


def test_values_that_are_not_finite_are_counted_and_left_out_of_the_error() -> None:
    """One NaN would make the error of a whole layer NaN, and the rest of its error unseen."""
    reference = build()
    found = compare(reference, spoil(reference, (0, 0, 0), math.nan), draw(2), dtypes={"0": torch.float16})
    assert found["0"].relative_error == 0 and found["0"].nonfinite_count == 2 * 8
    assert found["0"].absmax == math.inf and found["0"].headroom_bits == -math.inf


def test_nothing_finite_is_no_error_of_zero() -> None:
    reference = build()
    found = compare(reference, spoil(reference, ..., math.inf), draw(2), dtypes={})
    assert found["0"].relative_error is None
    assert build_layer_notes(found)["0"] == {
        "relative_error": None,
        "absmax": None,
        "nonfinite_count": 2 * 8 * 64,
        "headroom_bits": None,
    }


@torch.no_grad()
def test_an_error_where_the_reference_writes_zero_is_infinite() -> None:
    reference, candidate = build(), build()
    for parameter in reference[0].parameters():
        parameter.zero_()
    assert compare(reference, candidate, draw(), dtypes={})["0"].relative_error == math.inf
    assert compare(reference, reference, draw(), dtypes={})["0"].relative_error == 0


def test_an_activation_in_place_does_not_write_over_what_is_compared() -> None:
    """Read after the run, the output of a layer in front of ReLU(inplace=True) is what ReLU made of it."""
    reference, candidate = build(), build(in_place=True)
    candidate[0].register_forward_hook(lambda _m, _i, output: -output)
    found = compare(reference, candidate, draw(), dtypes={})
    assert found["0"].relative_error == pytest.approx(2)


def test_a_layer_that_runs_twice_is_compared_twice() -> None:
    """A head that several levels of a pyramid share: the last level alone would be a third of the evidence."""

    class Twice(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head, self.unused, self.factor = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * self.factor) + self.head(x)

    found = compare(Twice(1), Twice(2), [torch.ones(1, 4)], dtypes={})
    assert list(found) == ["head"] and found["head"].relative_error == pytest.approx(math.sqrt(1 / 2))


def count_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many copies of outputs are alive, noted at each copy."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts, clone = [], torch.Tensor.clone

    def spy(tensor: torch.Tensor, **named: Any) -> torch.Tensor:
        copied = clone(tensor, **named)
        alive.add(copied)
        counts.append(len(alive))
        return copied

    monkeypatch.setattr(torch.Tensor, "clone", spy)
    return counts


def test_only_what_the_reference_wrote_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both networks' outputs were held until the end: 500 MiB for 40 layers of 4 MiB."""
    reference, candidate = build(), build(in_place=True)
    counts = count_held(monkeypatch)
    compare(reference, candidate, draw(), dtypes={})
    assert max(counts) == 3, "layers of one network, for one input"


@pytest.mark.parametrize(("num_bytes", "most"), [(0, 1), (4 * 4096, 4), (5 * 4096 - 1, 4), (7 * 4096, 7)])
def test_no_more_is_held_than_is_allowed_and_the_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, most: int
) -> None:
    """All outputs of 350 layers at 512 x 512 are 14 GB; a layer's NaN counted in each pass is many times too often."""
    torch.manual_seed(0)
    shared = nn.Conv2d(4, 4, 3, padding=1)  # called in several passes
    reference = nn.Sequential(*(m for _ in range(5) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), shared)))
    candidate = spoil(reference, (0, 0, 0, 0), math.nan)
    for parameter in candidate.parameters():
        parameter.data.mul_(1.01)
    inputs = [torch.randn(1, 4, 16, 16) for _ in range(2)]  # 4096 bytes, as each of ten outputs
    whole = compare(reference, candidate, inputs, dtypes={})
    monkeypatch.setattr(layer_numerics, "_MAX_HELD", num_bytes)
    counts = count_held(monkeypatch)
    assert compare(reference, candidate, inputs, dtypes={}) == whole
    assert max(counts) == most and len(counts) == 2 * 10
    assert whole["0"].nonfinite_count == 2 and 0 < whole["2"].relative_error < 1


def test_what_cannot_be_paired_is_no_error_of_the_network() -> None:
    """Raised inside of its run, it would be told as the network's own, which stops the evaluation."""

    def run_candidate() -> None:
        try:
            candidate(torch.ones(1, 3, 8, 8))
        except NumericsError as error:
            raise EngineError("the module failed") from error

    reference, candidate = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, padding=1)
    runs = [(partial(reference, torch.ones(1, 3, 8, 8)), run_candidate)]
    with pytest.raises(NumericsError, match="without tiles"):
        compare_layers(reference, candidate, runs, dtypes={})


@pytest.mark.parametrize(
    ("networks", "inputs", "message"),
    [
        ((build(), build()), [], "expected one input or more"),
        ((build(), build()[:3]), draw(), "'4' is in one only"),
        ((nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, padding=1)), draw(), "without tiles"),
    ],
    ids=["no input", "other layers", "other shapes"],
)
def test_what_cannot_be_paired_is_refused(
    networks: tuple[nn.Module, nn.Module], inputs: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(NumericsError, match=message):
        compare(*networks, inputs, dtypes={})


def test_json_has_five_digits() -> None:
    found = LayerNumerics(0.0123456789, 65504.123, 0, math.inf).as_json()
    assert found == {"relative_error": 0.012346, "absmax": 65504.0, "nonfinite_count": 0, "headroom_bits": None}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
