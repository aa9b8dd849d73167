"""The output is checked on the GPU where it fits there with its packed weights, else on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.products.text import checkpoints
from pipeline.products.text.checkpoints import load_model
from pipeline.products.text.optimize.quantize import _choose_device
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
    monkeypatch.setattr(checkpoints, "check_memory", lambda folder, **options: asked.append(options))
    model = load_model(folder, dtype="float32", device="cpu")
    assert model.device.type == "cpu"
    assert asked[0]["available_bytes"] > 0
