"""Which modules leave channels-last, and that reading oneDNN's log takes nothing else away."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from pipeline.running.memory_format import list_other_formats, log_onednn


class Turn(nn.Module):
    """Writes channels first, as a view in the wrong order does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def trace(*modules: nn.Module) -> list[str]:
    network = nn.Sequential(*modules).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        return list_other_formats(network, lambda: network(x))


def test_convolutions_keep_the_format_and_a_view_in_the_wrong_order_does_not() -> None:
    assert trace(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)) == []
    assert trace(nn.Conv2d(3, 4, 3), Turn(), nn.ReLU()) == ["1", "2"], "what follows stays channels first"
    assert trace(nn.Sequential(Turn()), nn.Conv2d(3, 4, 3)) == ["0.0"], "named by the module without children"


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param((nn.Conv2d(3, 1, 3), Turn()), id="one-channel"),
        pytest.param((nn.AdaptiveAvgPool2d(1), Turn()), id="one-pixel"),
        pytest.param((nn.Flatten(), nn.Linear(192, 3)), id="matrices"),
        pytest.param((nn.Identity(), Pair()), id="no-tensor"),
    ],
)
def test_what_has_no_format_of_its_own_is_not_listed(modules: tuple[nn.Module, ...]) -> None:
    """A layer would be named as the culprit that copies nothing."""
    assert trace(*modules) == []


def test_a_module_that_is_called_twice_is_listed_once_and_no_hook_stays() -> None:
    turn = Turn()
    network = nn.Sequential(turn, turn)
    x = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert list_other_formats(network, lambda: network(x)) == ["0"]
    assert not turn._forward_hooks
    with pytest.raises(ZeroDivisionError):
        list_other_formats(network, lambda: 1 / 0)
    assert not turn._forward_hooks


def test_the_log_is_of_the_call_alone() -> None:
    conv, x = nn.Conv2d(8, 8, 3), torch.randn(2, 8, 16, 16)
    with torch.inference_mode():
        conv(x)
        log = log_onednn(lambda: conv(x))
    if torch.backends.mkldnn.is_available():
        assert "onednn_verbose" in log and "convolution" in log
    assert "convolution" not in log_onednn(lambda: None)


def test_standard_output_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    """All that a stage prints after a call that failed would be lost."""
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError):
        log_onednn(lambda: (os.write(1, b"inside\n"), 1 / 0))
    os.write(1, b"after\n")
    assert log_onednn(lambda: os.write(1, b"again\n")).endswith("again\n")
    print("printed", flush=True)
    assert capfd.readouterr().out == "after\nprinted\n"
    assert len(os.listdir("/proc/self/fd")) == num_open, "a descriptor for each call would run out"
