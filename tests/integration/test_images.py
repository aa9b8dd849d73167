"""The image product through its stages, on the shipped pipelines and a few of their prompts."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from evalsets.seal import seal
from pipeline.errors import EngineError, JournalError, QuantgateError
from pipeline.products import KINDS
from pipeline.products.images import workers
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.evaluate import evaluate_images, open_replica
from pipeline.products.images.folders import find_weights, iterate_weights, open_pipeline
from pipeline.products.images.layout import LayoutMeasurement
from pipeline.products.images.preflight import check_images
from pipeline.products.images.rendering import load_pipeline
from pipeline.products.images.serving import read_image_candidate, sample_plainly
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.images.vae_range_fix import _replace_vae
from pipeline.products.text.serving.engines.keeper import list_descendants
from pipeline.records.digests import digest_file, digest_files, list_files
from pipeline.records.evaluations import Evaluation, read_cases
from pipeline.records.medians import MedianInterval
from pipeline.records.record_files import read_record, write_cases
from pipeline.report.terminal import render_gate
from pipeline.running.shards import Shard
from pipeline.running.tracing import list_traces
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.processes import is_running, wait_for_end
from tests.fakes.workers_here import start_here

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 8
VAE_WEIGHTS = "vae/diffusion_pytorch_model.safetensors"
HALF = {"kind": "vae_precision", "dtype": "float16"}
CANDIDATES: dict[str, Any] = {
    "shots": ("models/product-shots", []),
    "hot": ("models/product-shots-hot-vae", [HALF]),
    "fixed": ("models/product-shots-hot-vae", [{"kind": "vae_range_fix", "num_prompts": NUM_PROMPTS}, HALF]),
    "bf16": ("models/product-shots-hot-vae", [{"kind": "vae_precision", "dtype": "bfloat16"}]),
    "guided": (
        "models/product-shots",
        [{"kind": "guidance", "scale": 12, "by_category": {"background/white": {"scale": 5}}}],
    ),
    "half-unet": ("models/product-shots", [{"kind": "unet_precision", "dtype": "bfloat16"}]),
    "laid-out": ("models/product-shots", [{"kind": "channels_last", "parts": ["unet", "vae"]}]),
    "wild": ("models/wild", []),
}


def make_product(names: list[str], **changes: Any) -> ImagesProduct:
    return ImagesProduct.model_validate(
        {
            "name": "shots",
            "kind": "images",
            "reference": "shots",
            "release": names[-1:],
            "candidates": {name: {"checkpoint": CANDIDATES[name][0], "steps": CANDIDATES[name][1]} for name in names},
            "serving": {
                "num_inference_steps": 6,
                "guidance": {"scale": 5},
                "batch_size": 4,
                "num_threads": 1,
            },
            "resources": {"num_workers": 1},
            "evals": {"shots": {"kind": "images", "evalset": "evalsets/few", "clip": "models/product-shots-clip"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {"shots/sound_image_rate": {"overall": 0.02}, "shots/decode_ssim": {"overall": 0.01}},
            },
        }
        | changes
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for name in ("product-shots", "product-shots-hot-vae", "product-shots-clip"):
        shutil.copytree(ROOT / "models" / name, root / "models" / name)
    shutil.copytree(ROOT / "evalsets/shots", root / "evalsets/few")
    cases = (ROOT / "evalsets/shots/cases.jsonl").read_text().splitlines(keepends=True)
    (root / "evalsets/few/cases.jsonl").write_text("".join(cases[:: len(cases) // NUM_PROMPTS][:NUM_PROMPTS]))
    seal(root / "evalsets/few")
    return root


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process: its own would import torch and diffusers for each evaluation."""
    monkeypatch.setattr(workers, "start_workers", start_here)


def run(project: Path, product: ImagesProduct, name: str) -> list[Any]:
    build = project / "build"
    build_image_candidate(name, product, root=project, build=build)
    evaluate_images(read_image_candidate(build, name, product), product, root=project, build=build)
    return read_cases(build / "evaluations" / name / "shots.jsonl")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_an_overflow_is_found_named_and_repaired(project: Path) -> None:
    product = make_product(["shots", "hot", "fixed", "bf16"])
    check_images(product, project)
    scores = {name: [r.scores for r in run(project, product, name)] for name in product.candidates}
    assert not any(s["latents_out_of_range"] for s in scores["shots"])
    broken = sum(s["nonfinite"] for s in scores["hot"])
    assert 0 < broken < NUM_PROMPTS, "depends on the picture"
    assert all(s["sound"] == 1 and s["ssim"] > 0.99 for name in ("fixed", "bf16") for s in scores[name])
    assert all(s["saturated"] == 1 and s["clip"] == -1 for s in scores["hot"] if s["nonfinite"]), "worst, not none"
    proof = read_image_candidate(project / "build", "fixed", product).steps[0]["proof"]
    assert proof["max_difference"] < 1e-3 and min(proof["headroom_bits_after"].values()) >= 2
    compared = compare_release(product, project / "build")
    verdicts = {v.candidate: v for v in compared.judgement.verdicts}
    assert any(
        f"{broken:.0f} of {NUM_PROMPTS} raw decodes hold NaN or infinity" in reason
        and "first overflows in 'up_blocks." in reason
        for reason in list_said(verdicts["hot"])
    )
    assert verdicts["hot"].outcome != "pass"
    assert "first overflows in" in render_report(compared)
    released = compared.judgement.policy.model_copy(update={"release": ("hot",)})
    assert "first overflows in" in render_gate(compared.judgement.model_copy(update={"policy": released}))


@pytest.mark.usefixtures("here")
def test_a_category_has_its_own_guidance_and_a_kill_loses_nothing(project: Path) -> None:
    product = make_product(["shots", "guided"])
    traced = product.candidates["guided"].model_copy(update={"trace": True})
    product = product.model_copy(update={"candidates": product.candidates | {"guided": traced}})
    plain, guided = ({r.case_id: r for r in run(project, product, name)} for name in product.candidates)
    for case_id, record in guided.items():
        assert (record.output == plain[case_id].output) == ("background/white" in record.buckets)
    (trace,) = list_traces(project / "build/evaluations/guided")
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert "aten::convolution" in names and not list_traces(project / "build/evaluations/shots")


@pytest.mark.usefixtures("here")
def test_latents_that_are_no_numbers_are_not_the_decoders_fault(project: Path) -> None:
    """A U-Net that overflows: finite weights, so that no check of the files can see it."""
    from safetensors.torch import load_file, save_file

    wild = project / "models/wild"
    shutil.copytree(project / "models/product-shots", wild)
    weights = load_file(wild / "unet/diffusion_pytorch_model.safetensors")
    weights["conv_out.weight"] *= 1e37
    save_file(weights, wild / "unet/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    product = make_product(["shots", "wild"])
    run(project, product, "shots")
    records = run(project, product, "wild")
    assert all(r.scores["latents_out_of_range"] == r.scores["nonfinite"] == 1 for r in records)
    verdict = compare_release(product, project / "build").judgement.verdicts[0]
    assert verdict.outcome != "pass"
    said = next(reason for reason in list_said(verdict) if "raw decodes" in reason)
    assert f"{NUM_PROMPTS} had latents out of range, which is not the decoder's doing" in said
    assert "first overflows" not in said


@pytest.mark.usefixtures("here")
def test_number_and_memory_formats_are_what_runs_and_their_costs_are_told(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = make_product(["shots", "half-unet", "laid-out"])
    plain, half = (run(project, product, name) for name in ("shots", "half-unet"))
    assert all(0 < abs(a.scores["clip"] - b.scores["clip"]) < 0.1 for a, b in zip(plain, half, strict=True))
    from pipeline.products.images import channels_last

    monkeypatch.setattr(channels_last, "measure_layout", measure_as_if)
    laid_out = run(project, product, "laid-out")
    candidate = read_image_candidate(project / "build", "laid-out", product)
    assert candidate.serving.channels_last == ("vae",)
    assert [(f.layer, "it takes 1.000 (0.900 to 1.100) of the time" in f.reason) for f in candidate.fallbacks] == [
        ("unet", True)
    ]
    assert max(abs(a.scores["ssim"] - 1) for a in laid_out) < 1e-6
    report = render_report(compare_release(product, project / "build"))
    assert "Channels-last is kept for the vae: it takes 0.800 (0.780 to 0.820) of the time" in report
    assert "Fallback: `unet`: channels-last is left off" in report
    notes = json.loads((project / "build/evaluations/shots/shots.json").read_text())
    assert len(notes["std_ratio_by_step"]) == 6 and notes["decode_to_float32"] is None, "two batches give no interval"
    assert notes["decode_peak_mib"] > 4 * 64 * 64 * 16 * 4 / 2**20, "a batch's activations at full size"


def measure_as_if(_pipe: Any, part: Any, *_: Any, rounds: int) -> LayoutMeasurement:
    low, median, high = (0.78, 0.8, 0.82) if part == "vae" else (0.9, 1.0, 1.1)
    return LayoutMeasurement(part, MedianInterval(median=median, low=low, high=high), 1.0, median, 1e-6, 1e-4)


STAGE = """
import sys
from pathlib import Path
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.images.serving import read_image_candidate, sample_plainly
from pipeline.products.images.evaluate import evaluate_images
if __name__ == "__main__":
    root, product = Path(sys.argv[1]), ImagesProduct.model_validate_json(sys.argv[2])
    evaluate_images(read_image_candidate(root / "build", "shots", product), product, root=root, build=root / "build")
"""


@pytest.mark.usefixtures("here")
def test_weights_that_were_changed_after_the_build_are_not_evaluated(project: Path) -> None:
    product = make_product(["shots", "fixed"])
    build = project / "build"
    build_image_candidate("fixed", product, root=project, build=build)
    ours = build / "candidates/fixed/checkpoint" / VAE_WEIGHTS
    shutil.copy(project / "models/product-shots" / VAE_WEIGHTS, ours)
    with pytest.raises(QuantgateError, match=f"candidate 'fixed' was built of, {VAE_WEIGHTS} differs"):
        evaluate_images(read_image_candidate(build, "fixed", product), product, root=project, build=build)


def test_only_a_step_that_rewrites_weights_takes_disk(project: Path) -> None:
    """A pipeline of SDXL's size is 6.3 GB."""
    dynamic = [{"kind": "guidance", "scale": 12, "dynamic_threshold_percentile": 99.5, "sample_max_value": 3}, HALF]
    product = make_product(
        ["shots", "fixed"],
        candidates={
            "shots": SHOTS,
            "dynamic": SHOTS | {"steps": dynamic},
            "fixed": {"checkpoint": CANDIDATES["fixed"][0], "steps": CANDIDATES["fixed"][1]},
        },
    )
    build, options = project / "build", {"thresholding": True, "dynamic_thresholding_ratio": 0.995}
    made = build_image_candidate("dynamic", product, root=project, build=build)
    assert made.serving.scheduler == options | {"sample_max_value": 3} and made.serving.vae_dtype == "float16"
    assert [path.name for path in (build / "candidates/dynamic").iterdir()] == ["candidate.json"]
    assert made.checkpoint.path == "models/product-shots"
    assert made.fingerprint != build_image_candidate("shots", product, root=project, build=build).fingerprint
    loaded = load_pipeline(project / made.checkpoint.path, made.serving).scheduler.config
    assert options.items() <= loaded.items()

    fixed = build_image_candidate("fixed", product, root=project, build=build)
    assert fixed.checkpoint.path == "build/candidates/fixed/checkpoint"
    config = json.loads((project / fixed.checkpoint.path / "vae/config.json").read_text())
    assert config["force_upcast"] is False, "diffusers would decode in float32 whatever is asked"


def test_a_step_rewrites_a_copy_of_what_counts(project: Path, tmp_path: Path) -> None:
    """A link to a folder above would be copied into itself until names are too long."""
    source = tmp_path / "models/linked"
    shutil.copytree(project / CANDIDATES["fixed"][0], source)
    shutil.move(source / "vae", tmp_path / "vae")
    (source / "vae").symlink_to(tmp_path / "vae")
    (source / "up").symlink_to(source.parent)
    (source / "sample.png").write_bytes(b"")
    shutil.copytree(project / "evalsets", tmp_path / "evalsets")
    fixed = {"checkpoint": "models/linked", "steps": CANDIDATES["fixed"][1]}
    product = make_product(["fixed"], reference="fixed", candidates={"fixed": fixed})
    made = build_image_candidate("fixed", product, root=tmp_path, build=tmp_path / "build")
    copy = tmp_path / made.checkpoint.path
    assert list_files(copy).keys() == list_files(source).keys() - {"sample.png"}
    assert not (copy / "vae").is_symlink(), "a step would write into the original"


def test_a_pipeline_in_shards_is_the_same_pipeline(project: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    whole, sharded = project / "models/product-shots", tmp_path / "shots"
    shutil.copytree(whole, sharded)
    for part, kind in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        shutil.rmtree(sharded / part)
        kind.from_pretrained(whole / part).save_pretrained(sharded / part, max_shard_size="500KB")
        assert len(list((sharded / part).glob("*.safetensors"))) > 1
    names = {part: tensors.keys() for part, tensors in open_pipeline(whole).items()}
    assert {part: tensors.keys() for part, tensors in open_pipeline(sharded).items()} == names
    expected, weights = dict(iterate_weights(whole)), dict(iterate_weights(sharded))
    assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in weights)
    shards = {f"unet/{path.name}" for path in (sharded / "unet").glob("*.safetensors")}
    assert {name.split(".")[0] for name, _ in iterate_weights(sharded, shards)} == {"unet"}

    pipe = load_pipeline(sharded, sample_plainly(make_product(["shots", "hot"])))
    assert pipe.unet.conv_out.weight.equal(expected["unet.conv_out.weight"].to(pipe.unet.device))
    _replace_vae(pipe.vae, sharded / "vae")
    assert sorted(path.name for path in (sharded / "vae").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ], "a shard that is left would be read in its place"
    next((sharded / "unet").glob("*.safetensors")).unlink()
    with pytest.raises(QuantgateError, match="names the shard 'diffusion_pytorch_model-0000"):
        open_pipeline(sharded)


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("text_encoder_2", "text_model.encoder.layers.0.self_attn.q_proj.weight"),
        ("unet", "conv_out.weight"),
    ],
)
def test_a_missing_tensor_is_not_filled_with_random_numbers(
    project: Path, tmp_path: Path, part: str, tensor: str
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(project / "models/product-shots", tmp_path / "shots")
    path = find_weights(tmp_path / "shots" / part)
    weights = load_file(path)
    del weights[tensor]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(QuantgateError, match=f"expected the tensor '{tensor}', found none of that name; 1 are missing"):
        load_pipeline(tmp_path / "shots", sample_plainly(make_product(["shots", "hot"])))


@pytest.mark.usefixtures("here")
def test_a_kill_loses_neither_images_nor_notes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.products.images import evaluate

    product, build = make_product(["shots", "guided"]), project / "build"
    run(project, product, "shots")
    whole = json.loads((build / "evaluations/shots/shots.json").read_text())
    with monkeypatch.context() as context:
        context.setattr(evaluate, "_build_notes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(project, product, "shots")
    monkeypatch.setattr(evaluate, "render_batch", "nothing is rendered twice")
    evaluate_images(read_image_candidate(build, "shots", product), product, root=project, build=build)
    resumed = json.loads((build / "evaluations/shots/shots.json").read_text())
    assert resumed["decoder"] == whole["decoder"] and resumed["std_ratio_by_step"] == whole["std_ratio_by_step"]
    assert resumed["step_ms_per_image"] > 0
    assert resumed["other_seed_ssim"] == whole["other_seed_ssim"] and len(whole["other_seed_ssim"]) == NUM_PROMPTS


@pytest.mark.usefixtures("here")
def test_latents_of_the_reference_are_those_that_a_candidate_would_draw(project: Path) -> None:
    """With what decodes changed alone; the U-Net in another format draws its own."""
    serving = {"num_inference_steps": 6, "guidance": {"scale": 5}, "batch_size": 2, "num_threads": 1}
    product, build = make_product(["shots", "bf16", "half-unet"], serving=serving), project / "build"

    def evaluate(name: str) -> tuple[list[Any], dict[str, Any]]:
        records = [record.model_dump(exclude={"latency_s"}) for record in run(project, product, name)]
        return records, json.loads((build / f"evaluations/{name}/shots.json").read_text())

    shutil.rmtree(build / "latents", ignore_errors=True)
    alone, own = evaluate("bf16")
    assert own["num_taken"] == 0 and own["step_ms_per_image"] > 0
    evaluate("shots")
    taken, notes = evaluate("bf16")
    assert taken == alone and notes["num_taken"] == NUM_PROMPTS - 2 * 2 and notes["step_ms_per_image"] is None
    assert notes["std_ratio_by_step"] == own["std_ratio_by_step"] and notes["decoder"] == own["decoder"]
    assert evaluate("half-unet")[1]["num_taken"] == 0 and not notes["latents_differ"]
    report = render_report(compare_release(product, build))
    assert f"4 of {NUM_PROMPTS} pictures were decoded from the reference's latents" in report


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_shards_make_the_records_and_pictures_of_one_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that drew shards put the evaluation together: no other ones are started."""
    from pipeline.products.images import evaluate

    product, build = make_product(["shots", "guided"]), project / "build"
    alone = [record.model_dump(exclude={"latency_s"}) for record in run(project, product, "shots")]
    folder = build / "evaluations/shots"
    pictures = digest_files(folder / "shots")
    floor = json.loads((folder / "shots.json").read_text())["other_seed_ssim"]
    candidate = read_image_candidate(build, "shots", product)
    with open_replica(candidate, product, root=project, build=build) as replica:
        for number in (2, 1):
            replica.run(Shard(number, 2))
        monkeypatch.setattr(evaluate, "start_renderers", "those that run are asked on")
        replica.finish([])
    merged = read_record(folder / "evaluation.json", Evaluation)
    records = read_cases(folder / "shots.jsonl")
    assert [record.model_dump(exclude={"latency_s"}) for record in records] == alone
    assert digest_files(folder / "shots") == pictures
    assert json.loads((folder / "shots.json").read_text())["other_seed_ssim"] == floor
    assert merged.shards is not None and merged.shards.num_shards == 2


@pytest.mark.usefixtures("here")
def test_likeness_is_judged_beside_the_floor_that_the_reference_alone_draws(project: Path) -> None:
    """Through the stages, with real pictures: rounding costs little, another guidance or seed much."""
    candidates = {
        "shots": SHOTS,
        "half-unet": SHOTS | {"steps": CANDIDATES["half-unet"][1]},
        "stronger": SHOTS | {"steps": [{"kind": "guidance", "scale": 12}]},
    }
    product, build = make_product([], release=["stronger"], candidates=candidates), project / "build"
    (build / "benchmarks").mkdir(parents=True, exist_ok=True)
    for name in product.candidates:
        run(project, product, name)
    KINDS["images"].benchmark(product, root=project, build=build)
    notes = {n: json.loads((build / f"evaluations/{n}/shots.json").read_text()) for n in product.candidates}
    assert [name for name in notes if "other_seed_ssim" in notes[name]] == ["shots"]
    compared = compare_release(product, build)
    values = {
        v.candidate: next(c for c in v.comparisons if (c.metric, c.bucket) == ("shots/reference_ssim", None)).candidate
        for v in compared.judgement.verdicts
    }
    floor = statistics.fmean(notes["shots"]["other_seed_ssim"].values())
    assert 1 > values["half-unet"] > max(values["stronger"], floor) and 0 < floor < 1
    drawn = {path.stem for path in (build / "evaluations/shots/shots").iterdir()}
    assert len(drawn) == NUM_PROMPTS, "a picture of another seed is no case"
    assert "the floor: `shots` with another seed" in render_report(compared)


@pytest.mark.usefixtures("here")
def test_a_batch_that_the_gpu_does_not_hold_is_one_line_and_the_next_run_goes_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose second decode finds no memory."""
    import torch

    from pipeline.products.images import batches

    product = make_product(["shots"], release=["again"], candidates={"shots": SHOTS, "again": SHOTS})
    build = project / "build"
    build_image_candidate("again", product, root=project, build=build)
    candidate = read_image_candidate(build, "again", product)
    decode, render = batches.decode_latents, batches.render
    rendered: list[int] = []  # images of each batch

    def decode_first_batch(*arguments: Any) -> Any:
        if len(rendered) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nMore lines")
        return decode(*arguments)

    def count_batches(loaded: Any, batch: Any, category: str | None) -> Any:
        rendered.append(len(batch))
        return render(loaded, batch, category)

    monkeypatch.setattr(batches, "render", count_batches)
    with monkeypatch.context() as context, pytest.raises(EngineError) as caught:
        context.setattr(batches, "decode_latents", decode_first_batch)
        evaluate_images(candidate, product, root=project, build=build)
    said = str(caught.value)
    assert said.startswith("again: a batch of 4 images: out of memory: 9.00 GiB needed; ")
    assert all(help in said for help in ("serving.batch_size", "vae_tiling", "vae_precision", "are kept"))
    assert "\n" not in said and rendered == [4, 4]
    evaluate_images(candidate, product, root=project, build=build)
    assert rendered == [4, 4, 4], "the first batch was not rendered again"


@pytest.mark.usefixtures("here")
def test_a_batch_that_is_judged_in_parts_scores_as_a_whole_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does it; the images are the same, and the decode beside them but for rounding."""
    from pipeline.products.images import batches

    tiled = SHOTS | {"steps": [{"kind": "vae_tiling", "tile": 32, "overlap": 0, "window": "none"}]}
    product, build = (
        make_product(["shots", "guided"], release=["tiled"], candidates={"shots": SHOTS, "tiled": tiled}),
        project / "build",
    )
    candidate = build_image_candidate("tiled", product, root=project, build=build)
    records = []
    for size in (4, 3, 1):
        parts = [slice(i, i + size) for i in range(0, 4, size)]
        monkeypatch.setattr(batches, "split_batch", lambda *_, parts=parts: parts)
        evaluate_images(candidate, product, root=project, build=build)
        records.append(read_cases(build / "evaluations/tiled/shots.jsonl"))
    for whole, *divided in zip(*records, strict=True):
        for part in divided:
            assert part.output == whole.output and part.scores == pytest.approx(whole.scores, abs=1e-3)


def test_records_of_another_judge_are_not_taken_over(project: Path, tmp_path: Path) -> None:
    from pipeline.evalsets.cards import load_evalset
    from pipeline.products.images.evaluate import digest_judges, digest_work

    product = make_product(["shots", "guided"])
    shutil.copytree(project / "models", tmp_path / "models")
    (settings,), evalset = product.evals.values(), load_evalset(project / "evalsets/few")
    keys = [digest_work(settings, evalset, digest_judges(product, settings, root)) for root in (project, tmp_path)]
    assert keys[0] == keys[1]
    for changed in ("product-shots-clip/model.safetensors", f"product-shots/{VAE_WEIGHTS}"):
        path = tmp_path / "models" / changed
        path.write_bytes(path.read_bytes() + b" ")
        keys.append(digest_work(settings, evalset, digest_judges(product, settings, tmp_path)))
    assert len(set(keys)) == 3


@pytest.mark.usefixtures("here")
def test_a_reference_that_draws_nothing_proves_nothing(project: Path) -> None:
    product = make_product(
        ["shots", "hot"],
        reference="wild-reference",
        candidates={
            "wild-reference": {"checkpoint": "models/product-shots-hot-vae", "steps": []},
            "hot": {"checkpoint": "models/product-shots", "steps": [HALF]},
        },
    )
    for name in product.candidates:
        run(project, product, name)
    path = project / "build/evaluations/wild-reference"
    records = read_cases(path / "shots.jsonl")
    broken = [
        r.model_copy(update={"scores": r.scores | {"sound": 0.0, "black": 1.0}}) if i == 0 else r
        for i, r in enumerate(records)
    ]
    write_cases(path / "shots.jsonl", broken)
    evaluation = json.loads((path / "evaluation.json").read_text())
    evaluation["evals"]["shots"]["sha256"] = digest_file(path / "shots.jsonl")
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    verdict = compare_release(product, project / "build").judgement.verdicts[0]
    assert verdict.outcome == "refused"
    assert any("the reference is unfit" in reason and "1 are black" in reason for reason in list_said(verdict))


def test_a_second_evaluation_of_one_candidate_at_a_time_is_refused(project: Path) -> None:
    """Two would write into one folder and one journal."""
    product, folder = make_product(["shots", "guided"]), project / "build"
    build_image_candidate("shots", product, root=project, build=folder)
    (folder / "journal").mkdir(exist_ok=True)
    with FileLock(folder / "journal/shots.lock"), pytest.raises(JournalError) as refused:
        evaluate_images(read_image_candidate(folder, "shots", product), product, root=project, build=folder)
    said = str(refused.value)
    assert "shots.lock: expected one process to work on 'shots' at a time, another one does" in said
    assert said.endswith("; wait for it or end it")
    assert "\n" not in said and not (folder / "evaluations/.shots.new").exists()


def test_after_sigkill_no_worker_is_left(project: Path) -> None:
    product = make_product(["shots", "guided"])
    build_image_candidate("shots", product, root=project, build=project / "build")
    script = project / "stage.py"
    script.write_text(STAGE)
    stage = subprocess.Popen(
        [sys.executable, str(script), str(project), product.model_dump_json()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 60
    while not (workers := list_descendants(stage.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)  # the worker has begun to load
    workers = list_descendants(stage.pid)
    stage.kill()
    stage.wait()
    wait_for_end(*workers, limit_s=60)
    assert workers and not any(map(is_running, workers))


Damage = Callable[[Path], Any]


SHOTS = {"checkpoint": "models/product-shots", "steps": []}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        pytest.param(
            [{"kind": "vae_tiling", "tile": 64, "overlap": 0, "window": "none"}],
            "steps.0.tile: expected less than the images' 64 pixels",
            id="tile-as-large-as-the-image",
        ),
        pytest.param(
            [{"kind": "vae_tiling", "tile": 30, "overlap": 0, "window": "none"}],
            "and a multiple of 4, got 30",
            id="tile-between-latent-pixels",
        ),
        pytest.param(
            [{"kind": "vae_tiling", "tile": 32, "overlap": 0.1, "window": "hann"}],
            "steps.0.overlap: expected a latent pixel (4 pixels) or more for window hann to blend, got 0.1 of a "
            "tile of 32; raise it, or set window: none",
            id="overlap-below-a-latent-pixel",
        ),
        pytest.param(
            [
                {
                    "kind": "guidance",
                    "scale": 5,
                    "by_category": {"background/white": {"scale": 9}, "finish/glossy": {"scale": 2}},
                }
            ],
            "expected one guidance for a prompt, got those of",
            id="two-guidances",
        ),
        pytest.param(
            [{"kind": "guidance", "scale": 5, "by_category": {"metal": {"scale": 9}}}],
            "by_category.metal: the evalsets have no such bucket",
            id="no-such-category",
        ),
    ],
)
def test_a_step_that_the_files_contradict_is_told_before_any_work(project: Path, steps: Any, said: str) -> None:
    product = make_product(["shots", "hot"], candidates={"shots": SHOTS, "hot": SHOTS | {"steps": steps}})
    with pytest.raises(QuantgateError) as caught:
        check_images(product, project)
    assert str(caught.value).startswith("candidates.hot.steps.0") and said in str(caught.value)


def test_a_seam_can_not_pass_for_want_of_a_tolerance(project: Path) -> None:
    """On 512 pixels, steps of 8 levels leave an SSIM of 0.998."""
    tiled = SHOTS | {"steps": [{"kind": "vae_tiling", "tile": 32, "overlap": 0.25, "window": "hann"}]}
    product = make_product(["shots", "hot"], candidates={"shots": SHOTS, "hot": tiled})

    def gate(**tolerances: Any) -> ImagesProduct:
        gate = product.gate.model_dump()
        return ImagesProduct.model_validate(
            product.model_dump() | {"gate": gate | {"tolerances": gate["tolerances"] | tolerances}}
        )

    seams = "shots/seam_step_levels"
    check_images(gate(**{seams: {"overall": 0.5}}), project)
    for ungated in (product, gate(**{seams: {"overall": 0.5, "tier": "advisory"}})):
        with pytest.raises(QuantgateError, match="shots/seam_step_levels: expected an overall tolerance that can stop"):
            check_images(ungated, project)


def test_a_candidate_of_another_size_is_told_before_any_work(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "models", tmp_path / "models")
    (tmp_path / "evalsets").symlink_to(project / "evalsets")
    rewrite("unet/config.json", sample_size=12)(tmp_path / "models/product-shots-hot-vae")
    with pytest.raises(
        QuantgateError,
        match="expected images as the reference draws them, 64 pixels from 4 latent channels, got 48 from 4",
    ):
        check_images(make_product(["shots", "hot"]), tmp_path)


def test_options_of_another_scheduler_are_no_mistake(project: Path, tmp_path: Path) -> None:
    """diffusers keeps them when a scheduler is swapped, and SDXL's own config has some."""
    shutil.copytree(project / "models", tmp_path / "models")
    (tmp_path / "evalsets").symlink_to(project / "evalsets")
    foreign = rewrite("scheduler/scheduler_config.json", clip_sample=False, skip_prk_steps=True)
    foreign(tmp_path / "models/product-shots")
    check_images(make_product(["shots", "hot"]), tmp_path)


def rewrite(path: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / path).read_text())
        config.update(changes)
        (folder / path).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda f: shutil.rmtree(f), "expected a pipeline folder, found none", id="no-folder"),
        pytest.param(
            lambda f: (f / "model_index.json").unlink(),
            "model_index.json: expected a diffusers pipeline folder's index, found no file",
            id="no-index",
        ),
        pytest.param(lambda f: (f / "model_index.json").write_text("{"), "got no JSON", id="index-no-json"),
        pytest.param(
            rewrite("model_index.json", vae=None), "expected a component 'vae', found", id="component-unnamed"
        ),
        pytest.param(
            rewrite("model_index.json", _class_name="PixArtSigmaPipeline"),
            "_class_name: expected a pipeline from text to an image, StableDiffusionPipeline, "
            "StableDiffusionXLPipeline, FluxPipeline, StableDiffusion3Pipeline, got 'PixArtSigmaPipeline'",
            id="another-kind",
        ),
        pytest.param(
            lambda f: (f / VAE_WEIGHTS).rename(f / "vae/diffusion_pytorch_model.fp16.safetensors"),
            "found diffusion_pytorch_model.fp16.safetensors; save the component again in one file",
            id="variant",
        ),
        pytest.param(rewrite("unet/config.json", sample_size=[16, 24]), "images that are not square", id="not-square"),
        pytest.param(lambda f: shutil.rmtree(f / "unet"), "unet: expected the component that", id="component-missing"),
        pytest.param(
            lambda f: (f / VAE_WEIGHTS).rename(f / "vae/diffusion_pytorch_model.bin"),
            "expected safetensors weights, found pickle weights 'diffusion_pytorch_model.bin'",
            id="pickle",
        ),
        pytest.param(
            lambda f: (f / VAE_WEIGHTS).write_bytes(b"x" * 99),
            "not a safetensors file, or cut short at 99 bytes",
            id="weights-cut",
        ),
        pytest.param(
            rewrite("scheduler/scheduler_config.json", guidence=3, thresholdin=True),
            "scheduler_config.json: "
            "guidence: expected an option of DPMSolverMultistepScheduler, which would ignore this one; remove it",
            id="scheduler-option",
        ),
        pytest.param(
            rewrite("scheduler/scheduler_config.json", thresholdin=True),
            "is `thresholding` meant",
            id="scheduler-option-misspelt",
        ),
        pytest.param(
            rewrite("scheduler/scheduler_config.json", _class_name="MyScheduler"),
            "_class_name: expected a scheduler of diffusers, got 'MyScheduler'",
            id="scheduler-unknown",
        ),
    ],
)
def test_a_malformed_pipeline_folder_is_one_line_before_any_work(
    project: Path, tmp_path: Path, damage: Damage, said: str
) -> None:
    shutil.copytree(project / "models", tmp_path / "models")
    (tmp_path / "evalsets").symlink_to(project / "evalsets")
    damage(tmp_path / "models/product-shots")
    with pytest.raises(QuantgateError) as caught:
        check_images(make_product(["shots", "guided"]), tmp_path)
    assert str(caught.value).startswith("candidates.shots.checkpoint: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            rewrite("unet/config.json", in_channels=5), "expected a pipeline that diffusers", id="other-shape"
        ),
        pytest.param(
            rewrite("model_index.json", scheduler=["diffusers", "DPMSolverSDEScheduler"]),
            "DPMSolverSDEScheduler requires the torchsde library",
            id="scheduler-of-a-package-that-is-not-there",
        ),
        pytest.param(
            rewrite("model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]),
            "StableDiffusionXLPipeline refused",
            id="scheduler-of-other-pipelines",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_only_diffusers_can_tell_is_one_line_too(project: Path, tmp_path: Path, damage: Damage, said: str) -> None:
    shutil.copytree(project / "models", tmp_path / "models")
    (tmp_path / "evalsets").symlink_to(project / "evalsets")
    damage(tmp_path / "models/product-shots")
    with pytest.raises(QuantgateError) as caught:
        run(tmp_path, make_product(["shots", "guided"]), "shots")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("", "cases.jsonl:3: expected a case, found an empty line; remove it", id="empty-line"),
        pytest.param({"prompt": "  "}, "cases.jsonl:3: prompt: expected words", id="blank-prompt"),
        pytest.param({"id": "../out"}, "cases.jsonl:3: id: expected letters, digits", id="id-is-a-path"),
        pytest.param({"seed": -1}, "cases.jsonl:3: seed: ", id="seed"),
        pytest.param(
            {"prompt": "a glossy red ball on a white background", "seed": 1514377135},
            "asks and expects the same as the case on line 1; every case may count once",
            id="doubled",
        ),
    ],
)
def test_a_malformed_prompt_is_named_with_its_line(project: Path, tmp_path: Path, line: Any, said: str) -> None:
    (tmp_path / "models").symlink_to(project / "models")
    shutil.copytree(project / "evalsets", tmp_path / "evalsets")
    path = tmp_path / "evalsets/few/cases.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | line) if line else ""
    path.write_text("\n".join(lines) + "\n")
    with contextlib.suppress(QuantgateError):
        seal(path.parent)
    with pytest.raises(QuantgateError) as caught:
        check_images(make_product(["shots", "guided"]), tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)
