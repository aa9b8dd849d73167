"""How an image candidate is run: options of a scheduler belong to it, and older releases stay equal without any."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from pipeline.errors import EngineError, SettingsError
from pipeline.gate.loosening import digest_serving
from pipeline.products.images import workers
from pipeline.products.images.rendering import Prompt, load_pipeline, make_latents
from pipeline.products.images.settings import GuidanceStep, VaePrecisionStep
from pipeline.products.images.steps import STEPS
from pipeline.records.evaluations import Evaluation
from pipeline.records.record_files import read_record
from pipeline.records.serving import PipelineServing

ROOT = Path(__file__).resolve().parents[3]
PLAIN = PipelineServing(num_inference_steps=2, guidance_scale=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a pipeline's folder with what a step looks at."""
    path = tmp_path / "scheduler/scheduler_config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"_class_name": "DDIMScheduler", "dynamic_thresholding_ratio": 0.995}))
    return tmp_path


def read_files(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_step_that_rewrites_no_weights_leaves_the_folder_alone(folder: Path) -> None:
    before = read_files(folder)
    guidance = GuidanceStep(kind="guidance", scale=12, dynamic_threshold_percentile=99, sample_max_value=3)
    serving = STEPS["guidance"](folder, PLAIN, step=guidance).serving
    serving = STEPS["vae_precision"](
        folder, serving, step=VaePrecisionStep(kind="vae_precision", dtype="float16")
    ).serving
    assert serving.scheduler == {"thresholding": True, "dynamic_thresholding_ratio": 0.99, "sample_max_value": 3}
    assert serving.vae_dtype == "float16" and "dynamic thresholding" in serving.summary
    assert serving.identity()["scheduler"] != PLAIN.identity()["scheduler"] == {}
    assert read_files(folder) == before


def test_an_option_that_a_scheduler_took_over_from_another_is_none_of_its_own(folder: Path) -> None:
    """diffusers keeps them in the config; Euler then ignored the threshold that was recorded as set."""
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(path.read_text().replace("DDIM", "EulerDiscrete"))
    guidance = GuidanceStep(kind="guidance", scale=12, dynamic_threshold_percentile=99, sample_max_value=3)
    with pytest.raises(SettingsError, match="expected a scheduler with dynamic thresholding .* got EulerDiscrete"):
        STEPS["guidance"](folder, PLAIN, step=guidance)


def test_serving_without_scheduler_options_is_written_as_before_there_were_any() -> None:
    """Else the next release would ask why its reference is run in another way."""
    release = ROOT / "release/shots"
    evaluation = read_record(release / "evaluations/shots/evaluation.json", Evaluation)
    assert isinstance(evaluation.serving, PipelineServing) and "scheduler" not in evaluation.serving.model_dump()
    reference = json.loads((release / "manifest.json").read_text())["reference"]
    assert digest_serving(evaluation.serving) == reference["serving_digest"]


def test_a_pipeline_that_the_gpu_does_not_hold_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_setup: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore lines")

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # a worker sets it for its whole process
    monkeypatch.setattr(workers, "_load_all", refuse)
    monkeypatch.setattr(workers, "choose_gpu", lambda _gpus: None)
    setup: Any = SimpleNamespace(candidate=SimpleNamespace(name="half"))
    with pytest.raises(EngineError) as caught:
        workers._load(setup)
    said = str(caught.value)
    assert said.startswith("half: its pipeline beside a float32 decoder and CLIP: out of memory: 20.00 MiB needed; ")
    assert "unet_precision" in said and "num_workers" in said and "\n" not in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_seed_gives_the_same_noise_in_every_number_format(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 no picture in bfloat16 was like the reference's: the noise was drawn in the format of the weights."""
    draw, drawn = torch.randn, []

    def watch(*args: Any, **options: Any) -> torch.Tensor:
        assert options.get("dtype") in (None, torch.float32)
        drawn.append(draw(*args, **options))
        return drawn[-1]

    monkeypatch.setattr(torch, "randn", watch)
    pipe = load_pipeline(ROOT / "models/product-shots", PLAIN.model_copy(update={"unet_dtype": dtype}))
    make_latents(pipe, [Prompt("a red square", 1), Prompt("a red square", 2)], PLAIN)
    assert [noise.shape[0] for noise in drawn] == [1, 1] and not torch.equal(*drawn)
    assert torch.equal(drawn[0], draw(drawn[0].shape, generator=torch.Generator("cpu").manual_seed(1)))


class StableDiffusionPipeline(MagicMock):
    """What is asked for its class."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: unspecified launch failure", RuntimeError),
        ("CUDA error: out of memory", RuntimeError),
        ("shapes differ", EngineError),
    ],
)
def test_a_device_that_failed_is_not_a_fault_of_the_prompts(text: str, expected: type[Exception]) -> None:
    pipe = StableDiffusionPipeline(side_effect=RuntimeError(text))
    pipe.unet = MagicMock(dtype=torch.float32, config=SimpleNamespace(in_channels=4, sample_size=2))
    serving = MagicMock(guidance_scale=1.0, guidance_rescale=0.0, guidance_by_category={})
    with pytest.raises(expected, match=text):
        make_latents(pipe, [Prompt("a red square", 1)], serving)
