"""The decision to keep channels-last, the timing that it rests on, and what is read out of oneDNN's log."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pipeline.errors import EvidenceError
from pipeline.products.images.layout import decide_layout, measure_runs
from pipeline.records.medians import MedianInterval
from pipeline.running.memory_format import count_reorders
from pipeline.running.timing import compare_outputs

LOG = """\
onednn_verbose,v1,info,oneDNN v3.11.0 (commit 0)
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors
onednn_verbose,v1,primitive,create:cache_miss,cpu,reorder,jit:uni,undef,src_f32::blocked:abcd::f0,,,4x32x16x16,0.1
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:abcd::f0 dst,,,4x32x16x16,0.012
a line of another library, with a reorder
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:abcd::f0 dst,,,64x32x3x3,0.004
onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx512_core,forward_inference,src,,alg:d,mb4_ic32oc64,0.3
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:aBcd16b::f0 dst,,,4x64x16x16,0.011
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:ab::f0 dst,,,32x128,0.001
"""


@pytest.mark.parametrize(
    ("low", "high", "difference", "expected"),
    [
        (0.80, 0.90, 1e-6, "keep"),
        (0.80, 0.95, 1e-6, "leave off"),  # 5 % is not surely saved
        (0.80, 1.20, 1e-6, "leave off"),
        (1.10, 1.20, 1e-6, "leave off"),
        (0.80, 0.90, 2e-4, "leave off"),  # another output
        (0.80, 0.90, math.nan, "leave off"),
    ],
)
def test_only_a_sure_gain_with_the_same_output_is_kept(
    low: float, high: float, difference: float, expected: str
) -> None:
    ratio = MedianInterval(median=(low + high) / 2, low=low, high=high)
    assert decide_layout(ratio, difference=difference, tolerance=1e-4) == expected


def make_runs(*seconds: float) -> tuple[Callable[[], float], list[str], list[Callable[[], torch.Tensor]]]:
    """Return a clock, the order of calls, and runs that take so long by that clock."""
    now, called = [0.0], []

    def make(name: str, took: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            called.append(name)
            now[0] += took
            return torch.zeros(1)

        return run

    return lambda: now[0], called, [make(name, took) for name, took in zip("ab", seconds, strict=True)]


def test_the_ratio_is_of_channels_last_to_channels_first() -> None:
    clock, called, (first, last) = make_runs(0.5, 0.25)
    found = measure_runs("vae", first, last, rounds=6, difference=0.0, tolerance=1e-4, clock=clock)
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == (0.5, 0.5, 0.5)
    assert (found.channels_first_s, found.channels_last_s, found.decision) == (0.5, 0.25, "keep")
    assert "".join(called[-8:]) == "abbaabba"  # who comes first alternates, so that a trend hits both


def test_a_slower_format_is_left_off() -> None:
    clock, _, (first, last) = make_runs(0.25, 0.5)
    assert measure_runs("unet", first, last, rounds=6, difference=0.0, tolerance=1, clock=clock).decision == "leave off"


def test_too_few_rounds_are_refused() -> None:
    clock, _, (first, last) = make_runs(1, 1)
    with pytest.raises(EvidenceError, match="six rounds"):
        measure_runs("unet", first, last, rounds=5, difference=0.0, tolerance=1, clock=clock)


def test_reorders_of_weights_and_matrices_are_not_counted() -> None:
    assert count_reorders(LOG, {(64, 32, 3, 3), (128, 32)}) == 2
    assert count_reorders(LOG, set()) == 3
    assert count_reorders("", {(64, 32, 3, 3)}) == 0


def test_outputs_are_compared_in_units_of_their_spread() -> None:
    expected = torch.tensor([1.0, 3.0])
    assert compare_outputs(expected + torch.tensor([0.0, 0.1]), expected) == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert math.isnan(compare_outputs(torch.tensor([1.0, math.nan]), expected))
