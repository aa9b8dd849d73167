"""The CLIP that judges likeness to a prompt: whole, finite and in float32, or no judge."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError
from pipeline.products.images.scoring import ClipScorer
from pipeline.records.files import write_text
from tests.paths import ROOT

CLIP = ROOT / "models/product-shots-clip"
PROJECTION = "visual_projection.weight"
Weights = dict[str, torch.Tensor]


def copy_clip(folder: Path, edit: Callable[[Weights], object]) -> Path:
    """Copy the shipped CLIP with other weights."""
    shutil.copytree(CLIP, folder)
    weights = load_file(CLIP / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda weights: weights.pop(PROJECTION), "1 tensors are missing, such as 'visual_projection.weight'"),
        (lambda weights: weights[PROJECTION].fill_(float("nan")), "finite weights, got NaN or infinity in 'visual_"),
    ],
    ids=["missing", "nan"],
)
def test_a_clip_that_lacks_numbers_is_refused(tmp_path: Path, edit: Callable[[Weights], object], said: str) -> None:
    """transformers draws a missing tensor anew in each process: chance judged both sides, and passed them as alike."""
    with pytest.raises(CheckpointError, match=said):
        ClipScorer(copy_clip(tmp_path / "clip", edit))


def test_a_clip_that_is_stored_in_16_bits_judges_in_float32(tmp_path: Path) -> None:
    def halve(weights: Weights) -> None:
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    folder = copy_clip(tmp_path / "clip", halve)
    config = (folder / "config.json").read_text()
    write_text(folder / "config.json", config.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    assert ClipScorer(folder).score(draw(), ["a lamp", "a cup"]).dtype == torch.float32


def test_a_prompt_that_is_too_long_for_clip_is_cut_whatever_its_tokenizer_says(tmp_path: Path) -> None:
    folder = copy_clip(tmp_path / "clip", lambda weights: None)
    prompts = ["a lamp", "a cup " + "and " * 100]
    wanted = ClipScorer(folder).score(draw(), prompts)
    config = folder / "tokenizer_config.json"
    write_text(config, config.read_text().replace('  "model_max_length": 16,\n', ""))
    assert torch.equal(ClipScorer(folder).score(draw(), prompts), wanted)
