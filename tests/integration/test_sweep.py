"""A guidance sweep on the shipped pipeline and two of its prompts: what a second run renders, and what it keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.guidance_sweep.rendering import render_settings, take_prompts
from examples.guidance_sweep.settings import list_settings, make_sweep_product
from pipeline.products.images import workers
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.evaluations import read_cases
from tests.examples.test_sweep import make_track
from tests.fakes.workers_here import start_here
from tests.paths import ROOT

THRESHOLDED = "scale-9-rescale-0-percentile-99-5-max-2"


@pytest.mark.slow
def test_finished_settings_are_kept_while_they_are_what_would_be_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "start_workers", start_here)
    shutil.copytree(ROOT / "models/product-shots", tmp_path / "models/product-shots")
    shutil.copytree(ROOT / "models/product-shots-clip", tmp_path / "models/product-shots-clip")
    take_prompts(ROOT / "evalsets/shots", 2, tmp_path / "prompts")
    build = tmp_path / "build"

    def product(*percentiles: float | None) -> ImagesProduct:
        settings = list_settings([9], [0], percentiles, [2])
        return make_sweep_product(make_track(), settings, eval_name="shots", evalset="prompts")

    def run(asked: ImagesProduct) -> list[str]:
        said: list[str] = []
        rendered = render_settings(asked, root=tmp_path, build=build, say=said.append)
        assert len(said) == len(asked.candidates)
        return rendered

    assert run(product(None)) == ["shots", "scale-9-rescale-0"]
    assert run(product(None, 99.5)) == [THRESHOLDED]
    assert not list(build.glob("candidates/*/checkpoint")), "a copy of the pipeline for each setting"
    pictures = {
        name: [r.output for r in read_cases(build / "evaluations" / name / "shots.jsonl")]
        for name in product(None, 99.5).candidates
    }
    assert len({tuple(drawn) for drawn in pictures.values()}) == 3, "every setting reached the sampler"

    with (build / "evaluations/scale-9-rescale-0/shots.jsonl").open("a") as edited:
        edited.write("\n")
    assert run(product(None, 99.5)) == ["scale-9-rescale-0"], "records that were edited"
    config = tmp_path / "models/product-shots/scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"solver_order": 1}))
    assert len(run(product(None))) == 2, "another pipeline"
