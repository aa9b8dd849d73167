"""What a call costs: the memory of what it makes, counted the same each time."""

from __future__ import annotations

import time

import pytest
import torch

from pipeline.running.timing import measure_peak_bytes, time_call

CPU = torch.device("cpu")
MIB = 2**20
GIVEN = torch.zeros(1024, 256)  # 1 MiB


@pytest.mark.parametrize(
    ("call", "mib"),
    [
        pytest.param(lambda: GIVEN + 1, 1, id="one"),
        pytest.param(lambda: GIVEN + 1 + 1 + 1 + 1, 2, id="what-is-no-longer-needed-is-gone"),
        pytest.param(lambda: [GIVEN + i for i in range(5)], 5, id="what-is-kept-counts"),
        pytest.param(lambda: GIVEN.view(-1)[5:].t(), 0, id="a-view-of-what-was-given"),
        pytest.param(lambda: (GIVEN + 1).view(-1).relu_()[:5], 1, id="a-view-and-in-place"),
        pytest.param(lambda: (GIVEN + 1).half(), 1.5, id="two-formats"),
    ],
)
def test_the_peak_is_of_what_is_alive_together(call: object, mib: float) -> None:
    assert callable(call)
    with torch.inference_mode():
        assert measure_peak_bytes(call, CPU) == mib * MIB


def test_seconds_on_a_cpu_are_those_that_it_worked() -> None:
    def wait() -> int:
        time.sleep(0.2)
        return 7

    result, seconds = time_call(wait, CPU)
    assert result == 7 and seconds < 0.1, "waiting is not counted: nor is what else runs on the machine"
