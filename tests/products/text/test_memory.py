"""The memory estimate: right order of magnitude, an error only when no retry can help."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import CheckpointError
from pipeline.products.text.memory import MemoryNeed, check_needs, measure_weights, read_available_mib
from pipeline.running.weight_files import TensorInfo


def tensor(*shape: int, dtype: str = "F32") -> TensorInfo:
    return TensorInfo(dtype=dtype, shape=shape, num_bytes=0, file="model.safetensors")


def need(weights_mib: int, other_mib: int = 100, activity: str = "quantising") -> MemoryNeed:
    return MemoryNeed("big", "models/big", activity, weights_mib, other_mib)


def test_packed_int4_counts_as_it_unpacks() -> None:
    packed = tensor(64, 32, dtype="I32")
    sizes = measure_weights({"a.weight": tensor(64, 256), "b.weight_packed": packed, "n": tensor(9)})
    assert sizes.num_weights == 64 * 256 + 64 * 32 * 8 + 9
    assert sizes.max_in_features == 256


def test_what_fits_is_not_mentioned() -> None:
    assert check_needs([need(900)], total_mib=4000, available_mib=1000) == []


@pytest.mark.parametrize(("activity", "lever"), [("serving", "num_servers"), ("quantising", "num_samples")])
def test_tight_memory_warns_with_numbers_and_a_way_out(activity: str, lever: str) -> None:
    (line,) = check_needs([need(950, activity=activity)], total_mib=4000, available_mib=1000)
    assert all(part in line for part in ("candidates.big (models/big)", "1,050 MiB", "1,000 MiB are free", lever))


def test_impossible_weights_are_refused_before_loading() -> None:
    with pytest.raises(CheckpointError, match=r"candidates\.big.*5,000 MiB for the weights alone.*4,000 MiB"):
        check_needs([need(5000)], total_mib=4000, available_mib=3000)


def test_available_memory_respects_a_smaller_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8192000 kB\nMemAvailable: 4096000 kB\n")
    assert read_available_mib(8000, meminfo) == 4000
    assert read_available_mib(2000, meminfo) == 2000
    assert read_available_mib(2000, tmp_path / "none") == 2000
