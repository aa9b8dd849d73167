"""The output is checked on the GPU where it fits there; a GPU without memory left is one line with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.products.text import model_loading
from pipeline.products.text.model_loading import load_model
from pipeline.products.text.optimize import llm_compressor
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import _choose_device, _run
from pipeline.products.text.step_settings import QuantizeStep
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(("has_gpu", "free", "device"), [(True, 1 << 40, "cuda"), (True, 9, "cpu"), (False, 0, "cpu")])
def test_device_follows_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, free: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 41))
    assert _choose_device(folder) == device


def test_a_named_device_gets_the_weights_directly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(model_loading, "check_memory", lambda folder, **options: asked.append(options))
    model = load_model(folder, dtype="float32", device="cpu")
    assert model.device.type == "cpu"
    assert asked[0]["available_bytes"] > 0


def test_a_full_card_is_one_line_with_a_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_recipe(*args: Any, **options: Any) -> None:
        cause = torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB "
            "is free. More"
        )
        raise torch.OutOfMemoryError("Sequential pipeline ran out of memory.\nTry sequential_targets") from cause

    monkeypatch.setattr(llm_compressor, "run_recipe", run_recipe)
    log, plan = StepLog("gptq"), LayerPlan(asked={}, excluded={}, schemes={})
    step = QuantizeStep(kind="quantize", scheme="W8A8")
    with pytest.raises(QuantizationError, match=r"max_tokens") as caught:
        _run(torch.nn.Module(), None, step, plan, log, samples=[], destination=tmp_path)
    assert "quantising: out of memory on GPU 0: 2.00 GiB needed, 1.00 GiB of 79.11 GiB free; " in str(caught.value)
    assert "\n" not in str(caught.value)
