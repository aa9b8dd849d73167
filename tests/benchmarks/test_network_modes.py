"""The networks of the layout and mode benchmark are those it names, and its turns are fair."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import network_modes
from benchmarks.mode_networks import NETWORKS, Bench
from benchmarks.network_modes import LAYOUTS, MODES, WARM_UP_BLOCKS, time_blocks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet", 25_557_032),  # torchvision's resnet50
        ("unet", 859_520_964),  # of stable-diffusion-v1-5/stable-diffusion-v1-5
        ("mlp", 3 * (256 * 256 + 256)),
    ],
)
def test_the_networks_have_as_many_parameters_as_the_releases(name: str, expected: int) -> None:
    with torch.device("meta"):
        network = NETWORKS[name].build(False)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_settings_name_networks_and_dtypes_that_exist() -> None:
    for setting in (*LAYOUTS, *MODES):
        name, batch, dtype, *_ = setting.split(":")
        assert name in NETWORKS and int(batch) > 0 and isinstance(getattr(torch, dtype), torch.dtype)
    assert len(set(MODES)) == len(MODES) == 7 * 4


def test_runs_take_turns_and_warm_ups_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that always follows another one meets the clock and the caches that the other leaves."""
    turns: list[str] = []
    monkeypatch.setattr(network_modes, "time_passes", lambda bench, run, passes: [run()] * passes)

    def run(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    runs = {name: partial(run, name) for name in ("first", "last")}
    times = time_blocks(Bench("mlp", 1, torch.float32, tiny=True), runs, 6, tiny=True)
    assert turns[:4] == ["first", "last", "last", "first"]
    assert len(turns) == 2 * (WARM_UP_BLOCKS + 6) and len(times["first"]) == len(times["last"]) == 6
    assert min(times["first"]) > 2 * WARM_UP_BLOCKS


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_both_layouts_reach_weights_and_pixels(layout: str) -> None:
    """Channels-last weights that meet channels-first pixels would be timed as NHWC and copied at the first layer."""
    seen = []
    bench = Bench("resnet", 2, torch.float32, tiny=True)
    network = bench.build(layout).cpu()
    convolution = next(module for module in network.modules() if isinstance(module, torch.nn.Conv2d))
    convolution.register_forward_pre_hook(lambda conv, given: seen.extend([conv.weight, given[0]]))
    bench.device, bench.arguments = "cpu", {name: value.cpu() for name, value in bench.arguments.items()}
    bench.bind(network, layout)()
    assert [x.is_contiguous(memory_format=torch.channels_last) for x in seen] == [layout == "NHWC"] * 2
