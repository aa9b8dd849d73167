"""Pipelines with a transformer: they draw what plain diffusers draws, and what they would ignore is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, SettingsError
from pipeline.products.images import quantize, rendering
from pipeline.products.images.denoiser_checks import check_denoiser
from pipeline.products.images.denoisers import DENOISERS, find_denoiser
from pipeline.products.images.folders import find_weights, list_absent, open_pipeline, read_part, read_shape
from pipeline.products.images.linear_layers import list_stored_matrices
from pipeline.products.images.rendering import Prompt, count_cut_tokens, decode_latents, load_pipeline, make_latents
from pipeline.products.images.settings import ImagesProduct, find_image_problems
from pipeline.products.images.start import start_images
from pipeline.products.params import load_params
from pipeline.records.serving import PipelineServing
from tests.fakes.tiny_transformers import write_tiny_flux, write_tiny_sd3
from tests.paths import ROOT

PLAIN = PipelineServing(num_inference_steps=2, guidance_scale=3)
TEXT = "a red mug on a white table"
WRITERS: dict[str, Callable[[Path], Path]] = {
    "flux": write_tiny_flux,
    "schnell": lambda folder: write_tiny_flux(folder, guidance_embeds=False),
    "sd3": write_tiny_sd3,
    "sd3-without-t5": lambda folder: write_tiny_sd3(folder, has_t5=False),
}
TRANSFORMERS = tuple(name for name, denoiser in DENOISERS.items() if denoiser.part == "transformer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: write(root / name) for name, write in WRITERS.items()}


@pytest.fixture
def small_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DENOISERS, "FluxPipeline", dataclasses.replace(DENOISERS["FluxPipeline"], size=16))


def draw_plainly(folder: Path, output_type: str, **options: Any) -> torch.Tensor:
    """Draw as a user of diffusers does, with one generator."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        folder, local_files_only=True, **dict.fromkeys(list_absent(folder))
    )
    pipe.set_progress_bar_config(disable=True)
    images: torch.Tensor = pipe(
        prompt=[TEXT],
        num_inference_steps=2,
        guidance_scale=3,
        generator=[torch.Generator("cpu").manual_seed(7)],
        output_type=output_type,
        **options,
    ).images
    if images.ndim == 3:
        size = options.get("height") or pipe.default_sample_size * pipe.vae_scale_factor
        images = pipe._unpack_latents(images, size, size, pipe.vae_scale_factor)
    return images


@pytest.mark.parametrize("name", WRITERS)
def test_latents_and_pictures_are_those_of_plain_diffusers(folders: dict[str, Path], name: str) -> None:
    """At the size that the pipeline draws by itself, with its noise, its limits of prompts and its decode."""
    pipe = load_pipeline(folders[name], PLAIN)
    latents = make_latents(pipe, [Prompt(TEXT, 7)], PLAIN)
    wanted = draw_plainly(folders[name], "latent")
    assert torch.equal(latents.values, wanted) and latents.values.is_contiguous()
    assert len(latents.std_ratios) == (2 if name.startswith("sd3") else 0)
    pictures = (decode_latents(pipe.vae, latents.values) / 2 + 0.5).clamp(0, 1)
    assert (pictures - draw_plainly(folders[name], "pt")).abs().max() < 1e-6
    shape = read_shape(folders[name])
    assert pictures.shape[-1] == shape.pixels and latents.values.shape[1] == shape.latent_channels == 16
    exact = rendering.load_exact_vae(folders[name])
    assert torch.equal(decode_latents(exact, wanted), decode_latents(pipe.vae, wanted))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_is_said_of_a_pipeline_is_what_diffusers_does(name: str) -> None:
    pipeline, denoiser = getattr(diffusers, name), DENOISERS[name]
    options = inspect.signature(pipeline.__call__).parameters
    assert options["max_sequence_length"].default == denoiser.max_tokens
    assert ("guidance_rescale" in options) == (denoiser.guidance == "rescaled")
    components = inspect.signature(pipeline.__init__).parameters
    assert denoiser.t5 and {*denoiser.needed, *denoiser.t5} <= components.keys()
    assert components["scheduler"].annotation.__name__ == denoiser.scheduler


@pytest.mark.usefixtures("small_flux")
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_seed_gives_the_same_noise_in_any_batch_and_number_format(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = torch.randn, []

    def watch(*args: Any, **options: Any) -> torch.Tensor:
        assert options.get("dtype") in (None, torch.float32)
        drawn.append(draw(*args, **options))
        return drawn[-1]

    alone = make_latents(load_pipeline(folders[name], PLAIN), [Prompt(TEXT, 7)], PLAIN).values
    size = {"height": 32, "width": 32} if name == "flux" else {}
    assert torch.equal(alone, draw_plainly(folders[name], "latent", **size))
    monkeypatch.setattr(torch, "randn", watch)
    for dtype in ("float32", "bfloat16", "float16"):
        pipe = load_pipeline(folders[name], PLAIN.model_copy(update={"unet_dtype": dtype}))
        assert find_denoiser(pipe)[1].dtype == getattr(torch, dtype)
        latents = make_latents(pipe, [Prompt("a lamp", 1), Prompt(TEXT, 7)], PLAIN).values
        assert torch.nn.functional.cosine_similarity(latents[1].flatten(), alone[0].flatten(), dim=0) > 0.99
        assert not torch.equal(latents[0], latents[1]) and latents.dtype == torch.float32
    noise = draw(1, 16, 16, 16, generator=torch.Generator("cpu").manual_seed(7))
    assert len(drawn) == 6 and all(torch.equal(tensor, noise) for tensor in drawn[1::2])


@pytest.mark.usefixtures("small_flux")
def test_guidance_is_an_input_of_flux_alone(folders: dict[str, Path]) -> None:
    def draw(name: str, scale: float) -> torch.Tensor:
        pipe = load_pipeline(folders[name], PLAIN)
        return make_latents(pipe, [Prompt(TEXT, 7)], PLAIN.model_copy(update={"guidance_scale": scale})).values

    assert not torch.equal(draw("flux", 1), draw("flux", 9))
    assert torch.equal(draw("schnell", 1), draw("schnell", 9)), "why such a setting is refused"


def test_an_index_without_a_place_for_the_t5_is_one_with_none(folders: dict[str, Path], tmp_path: Path) -> None:
    """Who deletes the two entries, and not just the folders, has diffusers look for them in vain."""
    folder = shutil.copytree(folders["sd3-without-t5"], tmp_path / "sd3")
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in index.items() if k not in ("text_encoder_3", "tokenizer_3")}))
    pipes = [load_pipeline(each, PLAIN) for each in (folder, folders["sd3-without-t5"])]
    latents = [make_latents(pipe, [Prompt(TEXT, 7)], PLAIN).values for pipe in pipes]
    assert torch.equal(*latents)


@pytest.mark.parametrize(("name", "cut"), [("flux", 1003 - 512), ("sd3", 1003 - 256), ("sd3-without-t5", None)])
def test_a_prompt_is_cut_by_what_reads_most_of_it(folders: dict[str, Path], name: str, cut: int | None) -> None:
    """Each word of the prompt is two tokens to the T5, which ends with one."""
    pipe = load_pipeline(folders[name], PLAIN)
    prompt = " ".join(["a"] * 501)
    by_clip = len(pipe.tokenizer(prompt).input_ids) - 16
    assert count_cut_tokens(pipe, prompt) == (by_clip if cut is None else cut) > 0
    assert count_cut_tokens(pipe, "a " * 30) == (len(pipe.tokenizer("a " * 30).input_ids) - 16 if cut is None else 0)


def rewrite(path: str, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps(config | changes))

    return damage


Tensors = dict[str, torch.Tensor]
POSITIONS = {"text_model.embeddings.position_ids": torch.arange(16)[None]}  # older files have it, and nothing reads it


def as_on_the_hub(tensors: Tensors) -> Tensors:
    """Name a CLIP's tensors as in files of before transformers 5."""
    return {f"text_model.{name}": tensor for name, tensor in tensors.items()} | POSITIONS


def as_of_a_wrapper(tensors: Tensors) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def without(name: str, tensors: Tensors) -> Tensors:
    return {own: tensor for own, tensor in tensors.items() if not own.endswith(name)}


def rewrite_weights(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = find_weights(folder)
    tensors = {name: tensor.clone() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.usefixtures("small_flux")
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("text_encoder", as_on_the_hub),
        ("text_encoder_2", lambda tensors: tensors | {"encoder.embed_tokens.weight": tensors["shared.weight"]}),
    ],
)
def test_names_that_a_library_knows_draw_the_same(
    folders: dict[str, Path], tmp_path: Path, part: str, change: Callable[[Tensors], Tensors]
) -> None:
    folder = Path(shutil.copytree(folders["flux"], tmp_path / "flux"))
    rewrite_weights(folder / part, change)
    drawn = [make_latents(load_pipeline(one, PLAIN), [Prompt(TEXT, 7)], PLAIN) for one in (folders["flux"], folder)]
    assert torch.equal(drawn[0].values, drawn[1].values)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("transformer", as_of_a_wrapper),
        ("text_encoder", as_of_a_wrapper),
        ("text_encoder", lambda tensors: without("layers.1.mlp.fc1.weight", as_on_the_hub(tensors))),
    ],
)
def test_as_many_unknown_tensors_are_no_excuse_for_missing_ones(
    folders: dict[str, Path], tmp_path: Path, part: str, change: Callable[[Tensors], Tensors]
) -> None:
    """A library fills what it does not find with random numbers, whatever else lies there."""
    folder = Path(shutil.copytree(folders["flux"], tmp_path / "flux"))
    rewrite_weights(folder / part, change)
    with pytest.raises(CheckpointError, match=f"/{part}: expected the tensor '.*', found none of that name; "):
        load_pipeline(folder, PLAIN)


NONE = [None, None]
BESIDE = "; save the pipeline again with all of its components"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("flux", rewrite("model_index.json", text_encoder_2=NONE), f"component 'text_encoder_2', found .*{BESIDE}"),
        ("flux", rewrite("model_index.json", transformer=NONE), "component 'transformer', found"),
        ("sd3", rewrite("model_index.json", tokenizer_3=NONE), "component 'tokenizer_3', found"),
        ("sd3", rewrite("model_index.json", text_encoder_2=NONE), "component 'text_encoder_2', found"),
        (
            "flux",
            rewrite("model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"]),
            "scheduler: expected FlowMatchEulerDiscreteScheduler, with which a FluxPipeline is run, got 'EulerDisc",
        ),
        (
            "sd3",
            rewrite("scheduler/scheduler_config.json", stochastic_sampling=True),
            "scheduler_config.json: stochastic_sampling: expected false, as each step would draw noise that no seed",
        ),
        (
            "sd3",
            rewrite("vae/config.json", shift_factor=None),
            "vae/config.json: shift_factor: expected a number, as a StableDiffusion3Pipeline decodes by it, got None",
        ),
        ("flux", rewrite("scheduler/scheduler_config.json", base_shfit=1), "base_shfit: expected an option of Flow"),
    ],
)
def test_a_folder_that_can_not_be_run_is_told_before_any_work(
    folders: dict[str, Path], tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / name))
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_pipeline(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


def test_noise_that_no_seed_decides_is_refused(tmp_path: Path) -> None:
    """Each run drew other pictures, and a candidate that changed nothing failed by its likeness."""
    folder = Path(shutil.copytree(ROOT / "models/product-shots", tmp_path / "sde"))
    name = "DPMSolverSDEScheduler"
    rewrite("model_index.json", scheduler=["diffusers", name])(folder)
    rewrite("scheduler/scheduler_config.json", _class_name=name, noise_sampler_seed=None)(folder)
    with pytest.raises(CheckpointError, match=f"noise_sampler_seed: expected a number, as {name} draws noise that no"):
        open_pipeline(folder)
    rewrite("scheduler/scheduler_config.json", noise_sampler_seed=7)(folder)
    open_pipeline(folder)


def make_product(folder: Path, steps: list[dict[str, Any]], **guidance: float) -> ImagesProduct:
    shots = load_params(ROOT / "params.yaml").products["shots"]
    candidates = {
        "plain": {"checkpoint": str(folder), "steps": []},
        "changed": {"checkpoint": str(folder), "steps": steps},
    }
    serving = shots.model_dump()["serving"] | {"guidance": {"scale": 1} | guidance}
    changes = {"name": "shop", "reference": "plain", "release": ["changed"], "candidates": candidates}
    return ImagesProduct.model_validate(shots.model_dump() | changes | {"serving": serving})


AT = "candidates.changed.steps.0"
INT8 = "Int8WeightOnlyConfig"


@pytest.mark.parametrize(
    ("name", "steps", "guidance", "said"),
    [
        (
            "flux",
            [{"kind": "unet_precision", "dtype": "bfloat16"}],
            {},
            f"{AT}: expected transformer_precision, as a FluxPipeline denoises by its transformer, got unet_precision",
        ),
        (
            "sd3",
            [{"kind": "quantize", "scheme": INT8}],
            {},
            f"{AT}.part: expected transformer, by which a StableDiffusion3Pipeline denoises, got unet",
        ),
        ("flux", [{"kind": "channels_last", "parts": ["vae", "unet"]}], {}, f"{AT}.parts: expected vae alone"),
        (
            "sd3",
            [{"kind": "guidance", "scale": 5, "dynamic_threshold_percentile": 99}],
            {},
            f"{AT}.dynamic_threshold_percentile: expected a scheduler with .* got FlowMatchEulerDiscreteScheduler",
        ),
        ("sd3", [{"kind": "guidance", "scale": 5, "rescale": 0.5}], {}, f"{AT}.rescale: expected 0, as .* got 0.5"),
        (
            "flux",
            [{"kind": "guidance", "scale": 5, "by_category": {"finish/glossy": {"scale": 2, "rescale": 0.7}}}],
            {},
            f"{AT}.by_category.finish/glossy.rescale: expected 0, as .* is a FluxPipeline, which rescales no guidance",
        ),
        ("sd3", [], {"rescale": 0.5}, "products.shop.serving.guidance.rescale: expected 0"),
        (
            "schnell",
            [],
            {"scale": 3.5},
            "products.shop.serving.guidance.scale: expected 1, which is no guidance, as .*config.json has no true "
            "guidance_embeds, got 3.5",
        ),
        ("schnell", [{"kind": "guidance", "scale": 2}], {}, f"{AT}.scale: expected 1, which is no guidance"),
    ],
)
def test_a_setting_that_a_pipeline_would_ignore_is_refused(
    folders: dict[str, Path], name: str, steps: list[dict[str, Any]], guidance: dict[str, float], said: str
) -> None:
    product = make_product(folders[name], steps, **guidance)
    with pytest.raises(SettingsError, match=said) as caught:
        for candidate in product.candidates:
            check_denoiser(product, candidate, ROOT)
    assert "\n" not in str(caught.value)


def test_pipelines_of_two_classes_are_not_compared(folders: dict[str, Path]) -> None:
    """Their latents have as many channels, and mean other pictures."""
    product = make_product(folders["sd3"], [])
    other = product.candidates["changed"].model_copy(update={"checkpoint": str(folders["flux"])})
    product = product.model_copy(update={"candidates": product.candidates | {"changed": other}})
    with pytest.raises(SettingsError, match="candidates.changed.checkpoint: expected a StableDiffusion3Pipeline, as"):
        check_denoiser(product, "changed", ROOT)


def test_a_ratio_that_flux_does_not_have_is_not_gated(folders: dict[str, Path]) -> None:
    """It would be 1 whatever is drawn, and pass."""
    for section, limit in (("tolerances", {"overall": 0.1}), ("tripwires", 0.1)):
        products = {}
        for name in ("sd3", "flux"):
            product = make_product(folders[name], [])
            gate = product.gate.model_dump()
            gate[section] |= {"shots/guided_std_ratio": limit}
            products[name] = ImagesProduct.model_validate(product.model_dump() | {"gate": gate})
        check_denoiser(products["sd3"], "plain", ROOT)
        with pytest.raises(
            SettingsError, match=f"products.shop.gate.{section}.shots/guided_std_ratio: expected no lim"
        ):
            check_denoiser(products["flux"], "plain", ROOT)


def test_a_step_of_a_transformer_is_refused_of_a_unet() -> None:
    steps = ([{"kind": "transformer_precision", "dtype": "bfloat16"}], [{"kind": "quantize", "part": "transformer"}])
    steps[1][0]["scheme"] = INT8
    for own, said in zip(steps, (": expected unet_precision", ".part: expected unet"), strict=True):
        product = make_product(ROOT / "models/product-shots", own, rescale=0.5)
        with pytest.raises(SettingsError, match=re.escape(f"{AT}{said}")):
            check_denoiser(product, "changed", ROOT)


def test_a_unet_that_takes_guidance_as_an_input_rescales_none(tmp_path: Path) -> None:
    """diffusers makes no second pass then: a rescale changed nothing, and the ratio was 1 whatever was drawn."""
    folder = Path(shutil.copytree(ROOT / "models/product-shots", tmp_path / "lcm"))
    rewrite("unet/config.json", time_cond_proj_dim=32)(folder)
    product = make_product(folder, [{"kind": "guidance", "scale": 5, "rescale": 0.5}])
    check_denoiser(product, "plain", ROOT)
    with pytest.raises(SettingsError, match=f"{AT}.rescale: expected 0, as .*, whose U-Net takes guidance as an input"):
        check_denoiser(product, "changed", ROOT)
    gate = product.gate.model_dump()
    gate["tolerances"] |= {"shots/guided_std_ratio": {"overall": 0.1}}
    with pytest.raises(SettingsError, match="shots/guided_std_ratio: expected no limit of it"):
        check_denoiser(ImagesProduct.model_validate(product.model_dump() | {"gate": gate}), "plain", ROOT)


def test_no_guidance_is_not_rescaled() -> None:
    product = make_product(ROOT / "models/product-shots", [{"kind": "guidance", "scale": 1, "rescale": 0.5}])
    with pytest.raises(SettingsError, match=f"{AT}.rescale: expected 0 beside a scale of 1, which is no guidance"):
        check_denoiser(product, "changed", ROOT)


def test_a_format_beside_quantize_is_refused(folders: dict[str, Path]) -> None:
    precision = {"kind": "transformer_precision", "dtype": "bfloat16"}
    product = make_product(folders["flux"], [{"kind": "quantize", "part": "transformer", "scheme": INT8}, precision])
    assert any(".1: expected no transformer_precision beside quantize" in said for said in find_image_problems(product))


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_linear_layers_are_known_from_headers_alone(folders: dict[str, Path], name: str) -> None:
    stored = list_stored_matrices(read_part(folders[name] / "transformer"))
    pipe_class = {"flux": "FluxTransformer2DModel", "sd3": "SD3Transformer2DModel"}[name]
    assert sorted(stored) == sorted(quantize._list_linear(pipe_class, folders[name] / "transformer"))


@pytest.mark.parametrize(("name", "scale"), [("flux", "3.5"), ("schnell", "1"), ("sd3", "5")])
def test_a_new_product_starts_with_guidance_that_its_pipeline_takes(
    folders: dict[str, Path], name: str, scale: str
) -> None:
    start = start_images("shop", str(folders[name]), Path(), clip="models/clip")
    assert f"guidance: {{scale: {scale}}}\n" in start.section
