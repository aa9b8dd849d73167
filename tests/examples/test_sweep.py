"""The guidance sweep: its grid, the Pareto set, the table from synthetic records, and what a second run keeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.guidance_sweep.judging import find_pareto_set, judge_sweep, resample_pareto_set
from examples.guidance_sweep.plot import plot_sweep
from examples.guidance_sweep.rendering import take_prompts
from examples.guidance_sweep.settings import list_settings, make_sweep_product, name_setting, read_setting
from examples.guidance_sweep.table import format_step, render_sweep, render_table
from pipeline.errors import SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.images.serving import serve
from pipeline.products.images.settings import GuidanceStep, ImagesProduct
from pipeline.records.digests import digest_text
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Checkpoint
from pipeline.records.record_files import write_record
from tests.fakes.synthetic_images import write_image_evaluation
from tests.paths import ROOT

NUM_PROMPTS = 96


def make_track(**gate: Any) -> ImagesProduct:
    return ImagesProduct.model_validate(
        {
            "name": "shots",
            "kind": "images",
            "reference": "shots",
            "release": ["half"],
            "candidates": {
                "shots": {"checkpoint": "models/product-shots", "steps": []},
                "half": {
                    "checkpoint": "models/product-shots",
                    "steps": [{"kind": "vae_precision", "dtype": "float16"}],
                },
            },
            "serving": {"num_inference_steps": 2, "guidance": {"scale": 5}, "batch_size": 4, "num_threads": 1},
            "resources": {"num_workers": 1},
            "evals": {"shots": {"kind": "images", "evalset": "evalsets/shots", "clip": "models/product-shots-clip"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {
                    "shots/saturated_pixel_fraction": {"overall": 0.01},
                    "shots/clip_similarity": {"overall": 0.01},
                },
            }
            | gate,
        }
    )


def make_sweep(settings: list[GuidanceStep]) -> ImagesProduct:
    return make_sweep_product(make_track(), settings, eval_name="shots", evalset="evalsets/shots")


def write_tree(build: Path, product: ImagesProduct, shown: dict[str, tuple[float, float]]) -> None:
    """Write what a rendered sweep leaves: of each setting the mean saturation and similarity that `shown` gives it."""
    noise = np.random.default_rng(0).normal(0, 0.004, NUM_PROMPTS)
    for name, (saturated, similar) in shown.items():
        built = BuiltCandidate(
            name=name,
            libraries={"torch": "2.13.0"},
            steps=tuple(
                step.model_dump(mode="json") | {"serving": {"guidance_scale": step.scale}}
                for step in product.candidates[name].steps
                if isinstance(step, GuidanceStep)
            ),
            checkpoint=Checkpoint(
                path="models/product-shots",
                kind="StableDiffusionXLPipeline",
                format="diffusers",
                dtype="float32",
                num_parameters=1,
                num_bytes=4,
                digest=digest_text(name),
            ),
        )
        write_record(build / "candidates" / name / "candidate.json", built)
        candidate, folder = serve(built, product), build / "evaluations" / name
        records = [
            CaseRecord(
                case_id=f"shot-{i}",
                input_digest=digest_text(str(i)),
                cluster=str(i),
                prompt="a ball",
                output=f"{name} {i}",
                fingerprint=candidate.fingerprint,
                scores={
                    "sound": 1.0,
                    "saturated": min(max(saturated + float(noise[i]), 0.0), 1.0),
                    "std_ratio": 1.5,
                    "oversaturated": float(saturated > 0.05),
                    "clip": similar + float(noise[-i]),
                    "seam_levels": 0.0,
                    "ssim": 1.0,
                    "psnr_db": 100.0,
                    "clipped": 0.0,
                    "nonfinite": 0.0,
                    "black": 0.0,
                    "latents_out_of_range": 0.0,
                },
            )
            for i in range(NUM_PROMPTS)
        ]
        write_image_evaluation(folder, candidate, product, records, {"decoder": {}})


def test_a_setting_without_threshold_has_no_maximum_and_comes_once() -> None:
    settings = list_settings([5, 12], [0, 0.7], [None, 99.5], [1, 4])
    names = [name_setting(step) for step in settings]
    assert len(set(names)) == len(names) == 4 + 8
    assert names[3] == "scale-12-rescale-0-7" and names[-1] == "scale-12-rescale-0-7-percentile-99-5-max-4"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (([0.5], [0.0], [None], [1.0]), "scale: expected 1 or more, got 0.5"),
        (([5.0], [1.5], [None], [1.0]), "rescale: expected 1 or less, got 1.5"),
        (([5.0], [0.0], [100.0], [1.0]), "dynamic_threshold_percentile: expected less than 100, got 100.0"),
        (([5.0], [0.0], [99.5], [0.5]), "sample_max_value: expected 1 or more, got 0.5"),
    ],
)
def test_a_number_out_of_range_is_one_line(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=f"^{said}$"):
        list_settings(*asked)


def test_the_references_own_guidance_is_rendered_once() -> None:
    product = make_sweep(list_settings([5, 9], [0], [None], [1]))
    assert list(product.candidates) == ["shots", "scale-9-rescale-0"]
    assert read_setting(product, "shots") == GuidanceStep(kind="guidance", scale=5)
    with pytest.raises(SettingsError, match="expected a setting beside the reference's own guidance"):
        make_sweep(list_settings([5], [0], [None], [1]))


def test_likeness_is_not_asked_of_another_guidance() -> None:
    """Each setting would be refused: nothing of a sweep is compared with the reference's pictures."""
    gate = make_track().gate.model_dump(mode="json")
    gate["tolerances"] |= {"shots/reference_ssim": {"overall": 0.03}}
    product = make_sweep_product(
        make_track(**gate), list_settings([9], [0], [None], [1]), eval_name="shots", evalset="evalsets/shots"
    )
    assert set(product.gate.tolerances) == {"shots/saturated_pixel_fraction", "shots/clip_similarity"}


def test_pareto_set_is_what_nothing_beats() -> None:
    saturated = np.array([0.01, 0.02, 0.02, 0.03, 0.01, 0.005])
    similar = np.array([0.90, 0.95, 0.94, 0.95, 0.90, 0.20])
    # the fourth has as much similarity as the second and more saturation; equal points beat neither each other
    assert find_pareto_set(saturated, similar).tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_pareto_set_is_that_of_the_definition(seed: int) -> None:
    points = np.random.default_rng(seed).integers(0, 6, (2, 12)) / 10
    found = find_pareto_set(points[0], points[1]).tolist()
    wanted = [
        not any(s <= points[0, i] and c >= points[1, i] and (s, c) != tuple(points[:, i]) for s, c in points.T)
        for i in range(12)
    ]
    assert found == wanted and any(found)


def test_bootstrap_tells_a_clear_setting_from_a_tie() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 0.05, 100)
    jitter = rng.normal(0, 0.01, 100)
    saturated = np.stack([base, base + 0.02, base + jitter - jitter.mean()])
    similar = np.full((3, 100), 0.9)
    shares = resample_pareto_set(saturated, similar, np.arange(100))
    assert shares[1] == 0, "always more saturated, on every prompt"
    assert 0.4 < shares[0] < 0.6 and 0.4 < shares[2] < 0.6 and np.isclose(shares[0] + shares[2], 1)
    assert np.array_equal(shares, resample_pareto_set(saturated, similar, np.arange(100)))


def test_whole_clusters_are_drawn() -> None:
    """Two captions, each rendered from 50 seeds, of which the first alone favours the second setting."""
    clusters = np.repeat([0, 1], 50)
    saturated = np.stack([np.where(clusters == 0, 0.03, 0.0), np.full(100, 0.01)])
    shares = resample_pareto_set(saturated, np.full((2, 100), 0.9), clusters)
    assert 0.2 < shares[0] < 0.3 and 0.7 < shares[1] < 0.8, "a quarter of samples holds the second caption alone"


def test_table_has_a_row_a_setting_with_the_gates_own_verdicts(tmp_path: Path) -> None:
    product = make_sweep(list_settings([5, 12], [0, 0.7], [None], [1]))
    shown = {
        "shots": (0.02, 0.95),
        "scale-5-rescale-0-7": (0.015, 0.95),
        "scale-12-rescale-0": (0.08, 0.80),
        "scale-12-rescale-0-7": (0.025, 0.90),
    }
    write_tree(tmp_path, product, shown)
    rows = {row.name: row for row in judge_sweep(product, tmp_path)}
    assert [name for name, row in rows.items() if row.is_pareto] == ["scale-5-rescale-0-7"]
    assert rows["scale-5-rescale-0-7"].pareto_share == 1 and rows["shots"].verdict is None
    assert {name: row.verdict.outcome for name, row in rows.items() if row.verdict} == {
        "scale-5-rescale-0-7": "pass",
        "scale-12-rescale-0": "fail",
        "scale-12-rescale-0-7": "fail",
    }
    over, none = (rows[name].estimates["oversaturated_image_rate"] for name in ("scale-12-rescale-0", "shots"))
    assert over.value == 1 and over.low < 1 and none.value == 0

    lines = render_table(list(rows.values())).splitlines()
    assert len(lines) == 2 + 4 and {line.count("|") for line in lines} == {12}
    assert lines[2].startswith("| 5 | 0 | none | 2.0") and lines[2].endswith("| – | – | reference |")
    failed = next(line for line in lines if line.startswith("| 12 | 0 |"))
    assert "fail: +6.00 points (6.00 to 6.00 points)" in failed and "fail: +0.1500 (" in failed
    partly = next(line for line in lines if line.startswith("| 12 | 0.7 |"))
    assert "pass: +0.50 points" in partly and "fail: +0.0500" in partly

    text = render_sweep(list(rows.values()), product, picture="sweep.png")
    assert "Of 3 settings: 2 fail, 1 pass. Would pass: `{kind: guidance, scale: 5, rescale: 0.7}`." in text
    assert "tolerated: saturation 1 points, CLIP similarity 0.01" in text
    plot_sweep(list(rows.values()), product, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_in_the_report_can_be_copied_into_params() -> None:
    from ruamel.yaml import YAML

    for step in list_settings([7.5], [0.3], [None, 99.5], [2.5]):
        assert GuidanceStep.model_validate(YAML(typ="safe").load(format_step(step))) == step


def test_more_prompts_hold_the_fewer_and_keep_their_order(tmp_path: Path) -> None:
    for num in (8, 24):
        take_prompts(ROOT / "evalsets/shots", num, tmp_path / str(num))
    few, more = ([case.id for case in load_evalset(tmp_path / name).cases] for name in ("8", "24"))
    whole = [case.id for case in load_evalset(ROOT / "evalsets/shots").cases]
    assert len(few) == 8 and len(more) == 24 and set(few) < set(more)
    assert more == [name for name in whole if name in more]
    with pytest.raises(SettingsError, match="--prompts: expected 1 to 192"):
        take_prompts(ROOT / "evalsets/shots", 193, tmp_path / "none")


def test_the_command_starts() -> None:
    command = [sys.executable, "-m", "examples.guidance_sweep", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--scales" in done.stdout, done.stderr
