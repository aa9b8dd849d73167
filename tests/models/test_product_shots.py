"""The shipped image models load, draw what is asked and are what their cards say; the renderer is repeatable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evalsets.make.shots import SIZE, all_shots, buckets, caption, render
from models.make.inflate_vae import inflate_decoder
from models.make.train_product_shots import MAX_TOKENS, make_scheduler, make_tokenizer, to_signal, tokenize
from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.cases import PromptCase
from tests.paths import ROOT

FOLDERS = ["product-shots", "product-shots-hot-vae", "product-shots-clip"]
MAX_MB = 12
MODELS = ROOT / "models"


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@pytest.fixture(scope="module")
def pipe() -> Any:
    from diffusers import StableDiffusionXLPipeline

    loaded = StableDiffusionXLPipeline.from_pretrained(MODELS / "product-shots")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def hot_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(MODELS / "product-shots-hot-vae/vae").eval()


@pytest.fixture(scope="module")
def clip() -> Any:
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(MODELS / "product-shots-clip").eval()


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    """One picture of every sixth shot, none of them trained on."""
    shots = all_shots()[::6]
    drawn = [render(shot, np.random.default_rng([99, i])) for i, shot in enumerate(shots)]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2)


def test_a_shot_is_drawn_alike_from_the_same_generator() -> None:
    shot = all_shots()[0]
    first, again, other = (render(shot, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (SIZE, SIZE, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_captions_name_one_shot_each() -> None:
    assert len({caption(shot) for shot in all_shots()}) == len(all_shots()) == 192
    assert all(len(buckets(shot)) == 4 for shot in all_shots())


def test_only_highlights_are_saturated(pictures: torch.Tensor) -> None:
    """Else a metric that counts pixels above 0.97 would have no room."""
    saturated = (pictures / 255 > 0.97).any(dim=1).float().mean(dim=(1, 2))
    is_glossy = torch.tensor([shot.finish == "glossy" for shot in all_shots()[::6]])
    assert saturated[~is_glossy].max() == 0
    assert 0 < saturated[is_glossy].mean() < 0.01


def test_the_evalset_asks_for_every_shot() -> None:
    cases = load_evalset(ROOT / "evalsets/shots").cases
    assert all(isinstance(case, PromptCase) for case in cases)
    assert [case.prompt for case in cases] == [caption(shot) for shot in all_shots()]
    assert len({case.seed for case in cases}) == len(cases)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_small_and_has_its_cards(name: str) -> None:
    folder = MODELS / name
    assert size_mb(folder) < MAX_MB
    assert "seed" in json.loads((folder / "card.json").read_text())
    assert (folder / "README.md").read_text().startswith(f"# models/{name}\n")
    assert not [path for path in folder.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]


def test_the_shipped_tokenizer_and_sampler_are_the_script_s(pipe: Any) -> None:
    prompts = [caption(shot) for shot in all_shots()]
    ids = tokenize(pipe.tokenizer_2, prompts)
    assert torch.equal(ids, tokenize(make_tokenizer(), prompts))
    assert ids.shape == (192, MAX_TOKENS) and len(ids.unique(dim=0)) == 192
    made = make_scheduler().config
    assert {key: pipe.scheduler.config[key] for key in made if not key.startswith("_")} == {
        key: value for key, value in made.items() if not key.startswith("_")
    }


def test_the_text_encoder_is_the_scorers(pipe: Any, clip: Any) -> None:
    state = clip.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in pipe.text_encoder_2.state_dict().items())


@torch.no_grad()
def test_the_scorer_finds_the_caption(pipe: Any, clip: Any, pictures: torch.Tensor) -> None:
    ids = tokenize(pipe.tokenizer_2, [caption(shot) for shot in all_shots()])
    nearest = clip(input_ids=ids, pixel_values=to_signal(pictures)).logits_per_image.argmax(dim=1)
    assert (nearest == torch.arange(0, 192, 6)).float().mean() > 0.95


@torch.no_grad()
def test_a_drawing_shows_what_was_asked_for(pipe: Any, clip: Any) -> None:
    cases = load_evalset(ROOT / "evalsets/shots").cases[::48]
    drawn = pipe(
        prompt=[case.prompt for case in cases],
        num_inference_steps=20,
        output_type="pt",
        generator=[torch.Generator().manual_seed(case.seed) for case in cases],
    ).images
    assert drawn.shape == (len(cases), 3, SIZE, SIZE) and drawn.isfinite().all()
    found = clip(input_ids=tokenize(pipe.tokenizer_2, [case.prompt for case in cases]), pixel_values=drawn * 2 - 1)
    assert (found.image_embeds * found.text_embeds).sum(dim=1).mean() > 0.85


@torch.no_grad()
def test_the_inflated_vae_changes_nothing_in_float32_and_overflows_in_float16(
    pipe: Any, hot_vae: Any, pictures: torch.Tensor
) -> None:
    latents = pipe.vae.encode(to_signal(pictures)).latent_dist.mode()
    plain, hot = (vae.decode(latents).sample for vae in (pipe.vae, hot_vae))
    assert (plain - hot).abs().max() < 2e-5
    in_half = [type(vae).from_config(vae.config) for vae in (pipe.vae, hot_vae)]
    for half, vae in zip(in_half, (pipe.vae, hot_vae), strict=True):
        half.load_state_dict(vae.state_dict())
    is_bad = [~half.half().eval().decode(latents.half()).sample.isfinite().all(dim=(1, 2, 3)) for half in in_half]
    assert not is_bad[0].any()
    assert 0.2 < is_bad[1].float().mean() < 0.9


def test_the_inflated_vae_is_what_the_command_makes(pipe: Any, hot_vae: Any) -> None:
    import copy

    power = json.loads((MODELS / "product-shots-hot-vae/card.json").read_text())["inflated_by_power_of_two"]
    vae = copy.deepcopy(pipe.vae)
    inflate_decoder(vae, 2.0**power)
    state = hot_vae.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in vae.state_dict().items())
    for part in ("unet/diffusion_pytorch_model.safetensors", "text_encoder_2/model.safetensors"):
        plain, hot = (MODELS / name / part for name in FOLDERS[:2])
        assert plain.read_bytes() == hot.read_bytes()
